"""One run with one fault to its very end: the window, who restores after it, and a restore that must change nothing."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fairtrial import conduct
from fairtrial.backends.simulated import Killed, Process, SimulatedControl
from fairtrial.canonical import canonical, sha256
from fairtrial.decide import fold, owed
from fairtrial.errors import FairtrialError, Refused, Superseded
from fairtrial.evidence import SUMS
from fairtrial.identity import MARK
from fairtrial.ledger import read as read_ledger
from fairtrial.progress import Lines
from fairtrial.rehearsal.effects import Effect, Effects, StopPoint
from fairtrial.rehearsal.world import OUT, World
from fairtrial.ticks import place
from fairtrial.window import steps

SETTLED_S = 2.0
ASKS = ("signal", "two signals", "stop file", "swap grows", "a stranger at the arm", "a stranger at production")
PATIENCE_S = 900.0


@dataclass(slots=True)
class Told:
    """What became of one run: exit statuses in order, what was said, what was seen on the way."""

    exits: list[Any] = field(default_factory=list)
    output: str = ""
    kept: list[str] = field(default_factory=list)
    switch_alone: bool | None = None
    changed_again: list[str] = field(default_factory=list)


class Story:
    """A world, the window in it, and its end."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.told = Told()
        self.actors: list[Effects] = []
        self.points: list[StopPoint] = []
        self.state = ""
        self._fires: Callable[[Effect], str | None] = lambda effect: None

    def has(self, point: StopPoint) -> str:
        """The fault of a stop point befalls it now. Returns that fault."""
        self.points.append(point)
        return point.fault

    @property
    def asked_to_stop(self) -> bool:
        """Whether its one fault is a signal or a trip: something that nothing on a host fails by."""
        return len(self.points) == 1 and self.points[0].fault.startswith(ASKS)

    @property
    def effects(self) -> Effects:
        """Those of the window's runner."""
        return self.actors[0]

    def play(self, fires: Callable[[Effect], str | None]) -> Told:
        """Run the window; then do what its end asks for. ``fires`` is asked at every effect of whoever acts."""

        def asked(effect: Effect) -> str | None:
            if not self.state and _restores(effect):
                self.state = standing(self.world)
            return fires(effect)

        self._fires = asked
        with said() as output:
            self.world.clock.drive(self._all)
        self.told.output = output.getvalue()
        return self.told

    def _all(self) -> None:
        world = self.world
        world.clock.sleep(SETTLED_S)
        self._act(
            "run",
            lambda control: conduct.run_experiment(
                world.experiment, base=world.base, out=OUT, control=control, progress=Lines()
            ),
        )
        self._aftermath()

    def _act(self, words: str, act: Callable[[SimulatedControl], int], *, watched: bool = True) -> None:
        fires = self._fires if watched else lambda effect: None
        control, effects = self.world.actor(words, fires, len(self.actors))
        if watched:
            self.actors.append(effects)
        exits = self.told.exits
        try:
            exits.append(act(control))
        except Killed:
            exits.append("killed")
        except (Refused, Superseded) as error:
            exits.append(2)
            print(f"refused: {error}")
        except FairtrialError as error:
            # as the command line maps it
            exits.append(4)
            print(f"fairtrial: {error}")
        except Exception as error:
            exits.append(f"a traceback: {place(error)}")
        if control.process.alive:
            self.world.leave(control)

    def _aftermath(self) -> None:
        world, told = self.world, self.told
        for _ in range(4):
            last = told.exits[-1]
            if last in (0, 3) or (last == 2 and len(told.exits) == 1):
                break
            if last == "killed" and self.points[-1].fault.endswith("the switch"):
                told.switch_alone = self._wait_for_switch()
            if last == 4:
                told.kept = held(world)
            world.heal()
            self.restore()
        if told.exits[-1] != 2 and (held(world) or SUMS not in world.evidence.files):
            # production is proved, and the release or the seal was not seen: it was said what to type
            self.restore()
        world.clock.sleep(10)
        world.heal()
        before = picture(world)
        if OUT in world.stores:
            exits = list(told.exits)
            self.restore(watched=False)
            told.exits = exits
            after = picture(world)
            told.changed_again = sorted(
                name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
            )

    def restore(self, *, watched: bool = True) -> None:
        """A person types ``fairtrial restore``."""
        self._act("restore", lambda control: conduct.restore(OUT, control=control, progress=Lines()), watched=watched)

    def _wait_for_switch(self) -> bool | None:
        """Let the dead-man's switches act. None: none was armed, so nothing is due from them."""
        world = self.world
        experiment = world.experiment
        armed = [
            name for name, host in world.hosts.items() if f"{experiment.hosts[name].state}/switch.json" in host.inodes
        ]
        if not armed:
            return None
        limit_s = experiment.waits.lease_s + 3 * experiment.production.start_limit_s + PATIENCE_S
        until_ns = world.clock.now_ns + int(limit_s * 1e9)
        while world.clock.now_ns < until_ns:
            if all(state_of(world, name).get("state") in ("served", "proved", "released") for name in armed):
                return True
            world.clock.sleep(1)
        return False


@contextlib.contextmanager
def said() -> Iterator[io.StringIO]:
    """Keep what is printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield output


def state_of(world: World, name: str) -> dict[str, Any]:
    """The last record of a host."""
    inode = world.hosts[name].inodes.get(f"{world.experiment.hosts[name].state}/last.json")
    found: dict[str, Any] = json.loads(bytes(inode.content)) if inode is not None else {}
    return found


def _restores(effect: Effect) -> bool:
    """Whether an effect is the first of a restore: its first step begins, or another actor does."""
    return effect.actor > 0 or effect.step in ("restore.end", "restore.start", "restore.prove")


def standing(world: World) -> str:
    """A hash of what a restore depends on: which undo steps are owed and ended, and how the hosts stand.

    Times and numbers are left out, and which of the arms it is: a restore does not ask.
    """
    state = fold(ledger(world))
    value = {
        "status": state.status,
        "owed": [step.name for step in steps(world.experiment) if owed(step, state)],
        "ended": sorted(state.ended.keys() & {step.name for step in steps(world.experiment) if step.undoes}),
        "complete": state.complete,
        "reference": "snapshot/reference.jsonl" in world.evidence.files,
        "hosts": {name: _host_stands(world, name) for name in world.hosts},
        "paths": sorted(map(str, world.paths)),
        "disk": [(store.full, store.low) for store in world.stores.values()],
    }
    return sha256(canonical(value))[:16]


def _host_stands(world: World, name: str) -> dict[str, object]:
    host, folder = world.hosts[name], world.experiment.hosts[name].state
    files = {path.removeprefix(folder): inode for path, inode in host.inodes.items() if path.startswith(folder)}
    last, begun = (
        json.loads(bytes(files[one].content)) if one in files else {} for one in ("/last.json", "/start.json")
    )
    return {
        "files": sorted({re.sub(r"\d+|\.log-.*", "N", one) for one in files}),
        "last": last.get("state"),
        "begun": [*sorted(one["what"] for one in begun.get("started", [])), str(begun.get("ending_of"))],
        "runs": sorted(_kind(one) for one in host.processes.values() if one.argv[0] != "fairtrial"),
        "listens": world.experiment.port(name) in {port for one in host.processes.values() for port in one.ports},
        "full": host.full,
        "low": host.available_b < 8 << 30,
    }


def _kind(process: Process) -> str:
    """What a process is, whichever arm's or command's it is."""
    if "server" in process.argv:
        return "arm" if MARK in process.environ else "production"
    at = next((number for number, word in enumerate(process.argv) if word.endswith("host.pyz")), None)
    return " ".join(process.argv[at + 1 : at + 2]) if at is not None else process.argv[0]


def held(world: World) -> list[str]:
    """What still holds the hosts: the newest hold or term file, and whether a switch runs."""
    experiment = world.experiment
    found = []
    for name, host in world.hosts.items():
        folder = experiment.hosts[name].state
        found += [
            path for path in host.inodes if path.startswith(folder + "/") and ("hold.json" in path or "/term-" in path)
        ]
        found += ["armed"] if f"{folder}/switch.json" in host.inodes else []
        found += ["switch" for process in host.processes.values() if "switch" in process.argv]
    return found


def picture(world: World) -> dict[str, object]:
    """Everything that a restore could change: files of evidence and hosts, and the processes that run."""
    found: dict[str, object] = {f"evidence {name}": bytes(content) for name, content in world.evidence.files.items()}
    for name, host in world.hosts.items():
        found |= {
            f"{name} {path}": bytes(inode.content) for path, inode in host.inodes.items() if not path.endswith(".log")
        }
        found[f"{name} processes"] = sorted((one.pid, one.argv) for one in host.processes.values())
    return found


def ledger(world: World) -> list[dict[str, Any]]:
    """The records of the window; empty where there are none."""
    content = world.evidence.files.get("ledger.jsonl")
    return read_ledger(bytes(content)) if content else []
