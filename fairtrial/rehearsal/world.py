"""The simulated hosts of one experiment: its production, what can befall it, and who acts on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fairtrial.backends.simulated import Clock, Host, Memory, Process, Simulated, SimulatedControl
from fairtrial.backends.simulated.commands import succeed
from fairtrial.backends.simulated.kernel import GIB
from fairtrial.backends.simulated.program import Programs
from fairtrial.backends.simulated.server import Model, runs, start
from fairtrial.client import Endpoint, token_ids
from fairtrial.experiment import Experiment
from fairtrial.identity import MARK
from fairtrial.rehearsal.effects import Effect, Effects
from fairtrial.rehearsal.watched import Kept, Watched
from fairtrial.rule import thresholds

OUT = Path("/rehearsal/out")
STATE_STAYS = ("last.json", "lock")
LASTS_S = 4.0
"""How long what befalls a host lasts."""

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class World:
    """One simulated world."""

    def __init__(self, experiment: Experiment, base: Path) -> None:
        self.experiment, self.base = experiment, base
        self.clock = Clock()
        self.hosts = {name: Host(name, self.clock) for name in experiment.hosts}
        reading = experiment.reading
        fast = [name for name in (reading.cause, reading.fix) if name]
        speedup = min(0.9 * float(thresholds(experiment).speedup_max), 1.0)
        self.model = Model(
            experiment=experiment,
            slowness=lambda process: speedup if any(runs(process, experiment, name) for name in fast) else 1.0,
            bases={
                file.target: file.base_sha256
                for overlay in experiment.overlays.values()
                for file in overlay.files
                if file.base_sha256
            },
        )
        for host in self.hosts.values():
            host.programs = Programs(start(self.model))
            host.make("/run", 0o040755)
            host.make("/run/host.pyz", 0o100755)
            host.make("/var/tmp/production.log", 0o100600)
        self.home = self.hosts[experiment.production.host]
        self.home.commands |= {argv[0]: succeed for argv in experiment.site.close}
        self.backend = Simulated(self.hosts, self.clock, route=self._host_of, lease_s=experiment.waits.lease_s)
        self.stores: dict[Path, Memory] = {}
        self.paths: set[Path] = set()
        self._watched: dict[int, Watched] = {}
        self.production = {name: self._part(name) for name in experiment.ranks_first}
        protocol = experiment.protocol
        low, high = protocol.token_ids
        self.prompts = [
            token_ids(f"{protocol.seed}/{cell.name}", min(cell.prompt_tokens, 6), low, high) for cell in protocol.cells
        ]
        self.before = {name: set(host.processes) for name, host in self.hosts.items()}

    def _part(self, name: str) -> Process:
        """Production's part on a host, as its owner started it."""
        host, server = self.hosts[name], self.experiment.server
        argv = ["/usr/bin/python3", "-m", "server", server.port_argument, str(self.experiment.port(name))]
        if server.context_argument is not None:
            argv += [server.context_argument, str(1 << 30)]
        environ = {"PATH": "/usr/bin", "HOME": "/root"}
        process = host.spawn(tuple(argv), environ, "/", log="/var/tmp/production.log")
        host.programs.start(process)
        return process

    def _host_of(self, base: Endpoint) -> str:
        experiment = self.experiment
        return next(
            (name for name in experiment.hosts if base.port in experiment.ports(name)), experiment.production.host
        )

    @property
    def evidence(self) -> Memory:
        """What the window has written."""
        return self.stores.get(OUT, Memory())

    def actor(
        self, words: str, fires: Callable[[Effect], str | None], number: int = 0
    ) -> tuple[SimulatedControl, Effects]:
        """A new process on the control host, and its effects."""
        control: SimulatedControl
        effects = Effects(fires, lambda what: self.befall(what, control), number)
        watched = Watched(self.backend, effects, self.experiment.server.ready)
        control = SimulatedControl(
            self.home, watched, self.stores, self.paths, lambda memory: Kept(memory, effects), words
        )

        def die() -> None:
            self.home.exit(control.process, -9)
            watched.end()

        effects.die, effects.last_record = die, self.last_record
        self._watched[control.process.pid] = watched
        return control, effects

    def last_record(self) -> str:
        """The kind of the ledger's last record."""
        lines = bytes(self.evidence.files.get("ledger.jsonl", b"")).splitlines()
        return str(json.loads(lines[-1])["kind"]) if lines else ""

    def leave(self, control: SimulatedControl) -> None:
        """A process of the control host has ended, and with it what it had open."""
        self._watched.pop(control.process.pid).end()
        self.home.exit(control.process, 0)

    # ---- what befalls a host

    def happenings(self, steps: list[str]) -> dict[str, tuple[str, ...]]:
        """What can befall each step: every signal; every guard that is active throughout it, tripped on each host."""
        found = {}
        held, ready, armed, idle = False, False, False, False
        # before the first step nobody heeds a signal, and nothing is held
        for step in steps[1:]:
            name = step.rpartition(".")[2]
            if name == "start" and step != "restore.start":
                ready, idle = False, False
            here: tuple[str, ...] = tuple(f"signal {signal}" for signal in SIGNALS)
            here += ("two signals",)
            here += ("stop file", "another restorer") if held else ()
            here += ("a stranger at the arm",) if ready else ()
            # without counters nobody could see it
            here += ("a stranger at production",) if idle and self.experiment.server.metrics else ()
            each: tuple[str, ...] = ("memory low",) if held else ()
            each += ("the switch dies",) if armed and step not in ("switch.off", "seal") else ()
            each += ("swap grows", "the arm's server dies", "a stranger on production's port") if ready else ()
            found[step] = here + tuple(
                self._on(what, host) for what in each for host in self.hosts if self._has(what, host)
            )
            held = held or step == "hold"
            armed = armed or step == "switch"
            idle = (idle or step == "idle") and not ready
            ready = (ready or (name == "start" and step != "restore.start")) and not step.startswith("reading")
        return found

    def _has(self, what: str, host: str) -> bool:
        return what != "the switch dies" or self.experiment.hosts[host].switch != "none"

    def _on(self, what: str, host: str) -> str:
        return f"{what} @{host}" if len(self.hosts) > 1 else what

    def befall(self, what: str, control: SimulatedControl) -> None:
        """Let something happen now."""
        what, _, name = what.partition(" @")
        host = self.hosts[name] if name else self.home
        if what.startswith("signal "):
            self._signal(control, what.removeprefix("signal "))
            return
        happens: dict[str, Callable[[], object]] = {
            "two signals": lambda: self._signal(control, "SIGINT", "SIGINT"),
            "stop file": lambda: self.paths.add(OUT / "STOP"),
            "another restorer": lambda: self.clock.spawn(self.rival),
            "memory low": lambda: self._for_a_while(lambda: _take_memory(host)),
            "swap grows": lambda: setattr(host, "swap_used_b", host.swap_used_b + GIB),
            "the switch dies": lambda: _kill(host, lambda one: "switch" in one.argv),
            "the arm's server dies": lambda: _kill(host, _is_arm),
            "a stranger at the arm": lambda: self._for_a_while(lambda: _talk(host)),
            "a stranger at production": lambda: self._for_a_while(lambda: _ask(host)),
            "a stranger on production's port": lambda: self._for_a_while(
                lambda: _squat(host, self.experiment.port(host.name))
            ),
        }
        happens[what]()

    def _signal(self, control: SimulatedControl, *names: str) -> None:
        for name in names:
            if control.heard is not None:
                control.heard(name)

    def _for_a_while(self, what: Callable[[], Callable[[], None]]) -> None:
        over = what()

        def later() -> None:
            self.clock.sleep(LASTS_S)
            over()

        self.clock.spawn(later)

    def rival(self) -> int:
        """Another person runs ``fairtrial restore --now`` on this window, at the same time."""
        from fairtrial import conduct
        from fairtrial.errors import Refused

        control, _ = self.actor("restore rival", lambda effect: None)
        try:
            return conduct.restore(OUT, now=True, control=control)
        except Refused:
            return 2
        finally:
            self.leave(control)

    def heal(self) -> None:
        """What broke the window is over."""
        for host in self.hosts.values():
            host.reachable, host.full = True, False
        for store in self.stores.values():
            store.full = False
        self.paths.discard(OUT / "STOP")


def _is_arm(process: Process) -> bool:
    return "server" in process.argv and MARK in process.environ


def _kill(host: Host, wanted: Callable[[Process], bool]) -> None:
    for process in [one for one in host.processes.values() if wanted(one)]:
        host.exit(process, -9)


def _take_memory(host: Host) -> Callable[[], None]:
    taken = host.available_b - GIB // 8
    host.taken_b += taken

    def over() -> None:
        host.taken_b -= taken

    return over


def _talk(host: Host) -> Callable[[], None]:
    arm = next((one for one in host.processes.values() if _is_arm(one) and one.ports), None)
    stranger = host.spawn(("curl",), {}, "/")
    connection = host.connect(next(iter(arm.ports)), stranger) if arm is not None else None

    def over() -> None:
        if connection is not None:
            connection.close()
        host.exit(stranger, 0)

    return over


def _ask(host: Host) -> Callable[[], None]:
    servers = [one.server for one in host.processes.values() if one.server is not None]
    for server in servers:
        server.extra += 1

    def over() -> None:
        for server in servers:
            server.extra -= 1

    return over


def _squat(host: Host, port: int) -> Callable[[], None]:
    stranger = host.spawn(("squatter",), {}, "/")
    stranger.ports[port] = lambda connection: iter(())
    return lambda: host.exit(stranger, 0)
