"""What must hold after every run of a rehearsal, whatever its fault. Each is named, and says what it found broken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fairtrial.backends.simulated import Process
from fairtrial.backends.simulated.server import WORDS
from fairtrial.decide import fold
from fairtrial.errors import EvidenceError
from fairtrial.evidence import SUMS, verify_store
from fairtrial.identity import MARK
from fairtrial.rehearsal.story import Story, ledger, state_of
from fairtrial.rehearsal.world import STATE_STAYS

Invariant = Callable[[Story], str | None]


def proved_back(story: Story) -> str | None:
    """In the end production serves, as it was, alone on its port; every exit status said so truly."""
    world, exits = story.world, story.told.exits
    strange = [code for code in exits if code not in (0, 2, 3, 4, "killed")]
    if strange:
        return f"exit {strange[0]}"
    if exits[-1] == 4 or exits[-1] == "killed":
        return f"production was not brought back: exits {exits}"
    for name, host in world.hosts.items():
        listening = [one for one in host.processes.values() if world.experiment.port(name) in one.ports]
        if len(listening) != 1:
            return f"{name}: {len(listening)} processes listen on production's port; exits {exits}"
        if as_started(listening[0]) != as_started(world.production[name]):
            return f"{name}: what serves is not production as it was"
    return None


def as_started(process: Process) -> tuple[object, ...]:
    """What a process was started with."""
    return process.argv, process.environ, process.cwd, process.log


def kept_while_down(story: Story) -> str | None:
    """Exit 4 keeps the HOLD, and the switch where it was armed; the commands it names then work."""
    if 4 in story.told.exits and not story.told.kept:
        return "exit 4, and nothing holds the host any more"
    return None


def not_cut_short(story: Story) -> str | None:
    """What only asks a window to stop, once or twice, ends in a restore that is proved: never in exit 4."""
    if story.asked_to_stop and 4 in story.told.exits[:1]:
        return "exit 4, and nothing had failed: the restore was cut short"
    return None


def unknown_stops(story: Story) -> str | None:
    """A value that cannot be read stops a window that measures: unknown is not safe."""
    first = story.points[0] if story.points else None
    if first is None or first.effect.kind != "sample" or first.fault != "lie" or first.effect.actor:
        return None
    # a phase's guards look at samples that were surely read in it: those of its first moments count for nothing yet
    step = first.effect.step
    early, late = step in ("hold", "snapshot", "switch"), step.startswith(("reading", "restore.", "look", "switch.off"))
    return "a sample that cannot be read stopped nothing" if story.told.exits[0] == 0 and not early | late else None


def switch_alone(story: Story) -> str | None:
    """Where the runner died and nobody came, an armed switch has brought production back by itself."""
    return "the armed switch did not bring production back" if story.told.switch_alone is False else None


def stopped_with_cause(story: Story) -> str | None:
    """Production was stopped only if an arm's start began."""
    world = story.world
    ended = [name for name, host in world.hosts.items() if ("exit", world.production[name].pid) in host.happened]
    begun = [row for row in ledger(story.world) if row["kind"] == "begin" and str(row["step"]).endswith(".start")]
    return "production was stopped, and no arm's start had begun" if ended and not begun else None


def nothing_left(story: Story) -> str | None:
    """Nothing runs that did not before, and the state folder holds what stays."""
    world = story.world
    for name, host in world.hosts.items():
        for pid, process in host.processes.items():
            if pid in world.before[name] or world.experiment.port(name) in process.ports:
                continue
            return f"{' '.join(process.argv)[:80]} still runs"
        for process in host.processes.values():
            if MARK in process.environ:
                return "what serves carries the window's mark"
        folder = world.experiment.hosts[name].state + "/"
        files = sorted(path.removeprefix(folder) for path in host.inodes if path.startswith(folder))
        if files and files != list(STATE_STAYS) and story.told.exits[0] != 2:
            return f"the state folder holds {', '.join(files)}"
        last = state_of(world, name).get("state")
        if files and last != "released" and story.told.exits[0] != 2:
            return f"{name}: its last record says {last}"
    return None


def touched_nothing(story: Story) -> str | None:
    """Exit 2 means that nothing was touched."""
    happened = [what for host in story.world.hosts.values() for what in host.happened]
    return f"refused, and yet: {happened[0]}" if story.told.exits[0] == 2 and happened else None


def only_restore_after_stop(story: Story) -> str | None:
    """After the stop only restore, look, seal: a restore measures nothing and resumes nothing."""
    stopped = False
    for row in ledger(story.world):
        stopped = stopped or row["kind"] in ("stop", "complete", "restorer")
        step = str(row.get("step", ""))
        if stopped and row["kind"] in ("cell", "check"):
            return f"a {row['kind']} after the stop"
        if stopped and row["kind"] == "begin" and not (step.startswith("restore.") or step in ("look", "switch.off")):
            return f"{step} began after the stop"
    return None


def foldable(story: Story) -> str | None:
    """The ledger folds: no record is there that could not follow."""
    try:
        fold(ledger(story.world))
    except EvidenceError as error:
        return str(error)
    return None


def written_before(story: Story) -> str | None:
    """Every change of a host stands in the ledger before it is asked for."""
    return next((found for effects in story.actors for found in effects.unwritten), None)


def one_at_a_time(story: Story) -> str | None:
    """At no moment do two servers run: production beside an arm, or production twice."""
    for name, host in story.world.hosts.items():
        running = {story.world.production[name].pid}
        for what, seen in host.happened:
            if what == "exit":
                running.discard(seen)
            elif "server" in seen[1]:
                if running:
                    return f"a second server was started on {name} while another ran"
                running.add(seen[0])
    return None


def idempotent(story: Story) -> str | None:
    """A restore of what is proved and released changes nothing."""
    changed = story.told.changed_again
    return f"a second restore changed {', '.join(changed[:3])}" if changed else None


def verified(story: Story) -> str | None:
    """The evidence verifies: sealed, every hash, the chain, the registration."""
    memory = story.world.evidence
    if not memory.files or story.told.exits[0] == 2:
        return None
    if "hold" not in {row.get("step") for row in ledger(story.world)} and SUMS not in memory.files:
        return None
    problems = verify_store(memory).problems
    return str(problems[0]) if problems else None


def cells_kept(story: Story) -> str | None:
    """Every cell that the ledger says was completed is in the summary."""
    records = ledger(story.world)
    landed = [(row["arm"], row["cell"], row["rep"]) for row in records if row["kind"] == "cell"]
    if not landed:
        return None
    content = story.world.evidence.files.get("summary.json")
    if content is None:
        return f"{len(landed)} cells landed, and there is no summary"
    kept = {(row["arm"], row["cell"], row["rep"]) for row in json.loads(bytes(content))["cells"]}
    lost = [cell for cell in landed if cell not in kept]
    return f"cell {lost[0]} is not in the summary" if lost else None


def verdict_earned(story: Story) -> str | None:
    """No verdict without a complete run and, for CONFIRMED, complete checks; none where production is not proved."""
    content = story.world.evidence.files.get("summary.json")
    if content is None:
        return None
    summary = json.loads(bytes(content))
    complete = any(row["kind"] == "complete" for row in ledger(story.world))
    if summary["verdict"] is not None and not complete:
        return f"verdict {summary['verdict']} of a window that did not complete"
    if summary["verdict"] == "CONFIRMED" and None in summary["checks"].values():
        return "CONFIRMED without checks"
    return None


def no_text(story: Story) -> str | None:
    """No prompt and no answer is kept or said anywhere."""
    prompts = planted(story)
    for place, content in told(story):
        for needle in prompts:
            if needle in content:
                return f"{place} holds text that was sent or received"
    return None


def planted(story: Story) -> Sequence[bytes]:
    """What must not be found: the words of the answers, and the first ids of the prompts."""
    found = [word.encode() for word in WORDS]
    for ids in story.world.prompts:
        found += [json.dumps(ids[:6]).strip("[]").encode(), ",".join(map(str, ids[:6])).encode()]
    return found


def told(story: Story) -> Iterator[tuple[str, bytes]]:
    """Everything that stays: evidence, names, output, what the hosts keep, command lines."""
    world = story.world
    yield "the terminal", story.told.output.encode()
    for name, content in world.evidence.files.items():
        yield name, bytes(content)
        yield "a file's name", name.encode()
    for host in world.hosts.values():
        for path, inode in host.inodes.items():
            if path != "/var/tmp/production.log":
                yield path, bytes(inode.content)
        for what, seen in host.happened:
            if what == "start":
                yield "a command line", " ".join(seen[1]).encode()


INVARIANTS: dict[str, Invariant] = {
    found.__name__.replace("_", " "): found
    for found in (
        proved_back,
        kept_while_down,
        not_cut_short,
        unknown_stops,
        switch_alone,
        stopped_with_cause,
        nothing_left,
        touched_nothing,
        only_restore_after_stop,
        foldable,
        written_before,
        one_at_a_time,
        idempotent,
        verified,
        cells_kept,
        verdict_earned,
        no_text,
    )
}
"""Name -> check. A check gives what it found broken, or None."""


def broken(story: Story) -> list[tuple[str, str]]:
    """The invariants that do not hold, each with what was found."""
    found: list[tuple[str, Any]] = [(name, check(story)) for name, check in INVARIANTS.items()]
    return [(name, why) for name, why in found if why]
