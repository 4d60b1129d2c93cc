"""A window is a tuple of steps, and some steps undo others.

The plan prints these steps, the runner executes them, and a restore plays those undo steps that are owed. There
is no second list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairtrial.experiment import Arm, Estimate, Experiment

NOT_MEASURED = "not measured here: a guess"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a window.

    ``undoes`` names the steps that make this one owed: from the moment one of them *begins*. ``needs`` names
    the steps that must have ended well, if they are owed at all, before this one may begin. ``commands`` are all
    the commands that the step may send to a host, as templates; the runner sends no other.
    """

    name: str
    does: str
    arm: str | None = None
    undoes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    requests: str = ""
    estimate: Estimate

    @property
    def noun(self) -> str:
        """What the step is about: the arm, or the part of the window."""
        return self.name.partition(".")[0]

    @property
    def verb(self) -> str:
        """What it does: the name after the arm's, or the whole name."""
        return self.name.rpartition(".")[2]


ARM_VERBS = ("budget", "parity", "floor", "start", "identity", "requests", "checks", "collect")

_DOES = {
    "preflight": "asks, and changes nothing: hosts, ports, rights, pins, guards, what the protocol needs",
    "hold": "takes the exclusive HOLD on every host, or on none",
    "snapshot": "reads production's identity: what arms are compared with and the restore must reach",
    "switch": "installs the dead-man's switch, sees it alive, arms it",
    "idle": "waits until production serves nobody",
    "reference": "asks production the greedy prompts twice; keeps those that agree with themselves",
    "stage": "copies the overlay trees to the host, where absent, and checks their hashes",
    "budget": "enough time left before the submission bound",
    "parity": "kernel, clock and software of the host as at the snapshot",
    "floor": "MemAvailable over the floor",
    "start": "stops what serves, proves it stopped, starts the arm fresh, waits until it is ready",
    "identity": "proves that what runs is production plus the declared differences",
    "requests": "sends the timed protocol",
    "checks": "greedy answers by hash, and first-token distributions",
    "collect": "keeps the arm's log, without any text that was sent or received",
    "reading": "reads the verdict by the registered rule; the cells are saved before",
    "restore.end": "ends what this window started, proves it gone and the memory back",
    "restore.start": "starts production",
    "restore.prove": "proves production: identity, readiness, one generation, greedy answers",
    "restore.close": "does what the site does last",
    "look": "looks once more for anything of this window; ends and reports what it finds",
    "switch.off": "removes the dead-man's switch",
    "seal": "closes the evidence and writes its hashes",
    "release": "releases the HOLD",
}

_COMMANDS: dict[str, tuple[str, ...]] = {
    "preflight": ("look", "inspect"),
    "hold": ("hold", "read"),
    "snapshot": ("inspect", "look"),
    "switch": ("play install", "play ask", "play arm"),
    "stage": ("get", "put"),
    "parity": ("look",),
    "start": ("play end", "play start", "inspect", "get"),
    "identity": ("inspect", "get"),
    "collect": ("get",),
    "restore.end": ("play take", "renew", "play end", "play record"),
    "restore.start": ("play start", "play policy", "play record"),
    "restore.prove": ("play prove", "play record"),
    "restore.close": ("site.close", "play record"),
    "look": ("look", "play end", "play record"),
    "switch.off": ("get", "play off", "play record"),
    "seal": (),
    "release": ("look", "play off"),
}

_GUESS_S = {
    "start": 60.0,
    "requests": 60.0,
    "checks": 60.0,
    "restore.start": 60.0,
    "restore.end": 10.0,
    "restore.prove": 10.0,
}


def steps(experiment: Experiment) -> tuple[Step, ...]:
    """Return the steps of an experiment's window, in order.

    A step of an arm is named ``ARM.verb``. The steps from ``restore.end`` on are owed once ``hold`` began.
    """

    def step(
        name: str,
        *,
        arm: Arm | None = None,
        undoes: Sequence[str] = (),
        needs: Sequence[str] = (),
        requests: str = "",
    ) -> Step:
        key = name if arm is None else name.rpartition(".")[2]
        waits = {
            "idle": experiment.waits.idle_s,
            "restore.prove": experiment.waits.settle_s + _GUESS_S["restore.prove"],
        }
        found = experiment.estimates.get(name) or experiment.estimates.get(key)
        return Step(
            name=name,
            does=_DOES[key],
            arm=arm.name if arm else None,
            undoes=tuple(undoes),
            needs=tuple(needs),
            commands=_COMMANDS.get(key, ()),
            requests=requests,
            estimate=found or Estimate(seconds=waits.get(key, _GUESS_S.get(key, 1.0)), basis=NOT_MEASURED),
        )

    greedy = experiment.checks.greedy if experiment.checks else None
    first = [
        step("preflight", requests="production: at most 3, of at most 64 output tokens, one of them the probe"),
        step("hold"),
        step("snapshot"),
        step("switch"),
        step("idle", requests="production: GET of its metrics"),
        step(
            "reference",
            requests=f"production: {greedy.prompts} greedy prompts, twice" if greedy else "",
        ),
        step("stage"),
    ]
    middle: list[Step] = []
    for arm in experiment.arms:
        cells = ", ".join(
            f"{cell.name} x {experiment.reps(arm, cell)} "
            f"({cell.prompt_tokens} + {cell.output_tokens} tokens{'' if cell.timed else ', not timed'})"
            for cell in experiment.protocol.cells
        )
        for verb in ARM_VERBS:
            if verb == "checks" and not (arm.checks and experiment.checks):
                continue
            requests = {
                "start": f"{arm.name}: readiness, one generation",
                "requests": f"{arm.name}: {cells}",
                "checks": f"{arm.name}: identity, {greedy.prompts if greedy else 0} greedy, "
                f"{len(arm.checks)} logit ({', '.join(arm.checks)})",
            }.get(verb, "")
            middle.append(step(f"{arm.name}.{verb}", arm=arm, requests=requests))
    starts = [f"{arm.name}.start" for arm in experiment.arms]
    last = [
        step("restore.end", undoes=starts),
        step("restore.start", undoes=starts, needs=["restore.end"]),
        step(
            "restore.prove",
            undoes=["hold"],
            needs=["restore.end", "restore.start"],
            requests="production: readiness, one generation, the greedy prompts",
        ),
        step("restore.close", undoes=["hold"], needs=["restore.prove"]),
        step("look", undoes=["hold"], needs=["restore.close"]),
        step("switch.off", undoes=["switch"], needs=["look"]),
        step("seal", undoes=["hold"], needs=["look", "switch.off"]),
        step("release", undoes=["hold"], needs=["seal"]),
    ]
    return (*first, *middle, step("reading"), *last)


def downtime_s(window: Sequence[Step]) -> float:
    """The planned downtime of production: from the first arm's start to the end of its restore, seconds."""
    names = [step.name for step in window]
    first = next(index for index, step in enumerate(window) if step.verb == "start" and step.arm)
    return sum(step.estimate.seconds for step in window[first : names.index("restore.prove") + 1])


def hold_s(window: Sequence[Step]) -> float:
    """The planned length of the HOLD, seconds."""
    names = [step.name for step in window]
    return sum(step.estimate.seconds for step in window[names.index("hold") :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits on the HOLD clock, seconds: no request after ``submit_s``, all cancelled at ``abort_s``; ``arm_s`` must
    be left before the submission bound when an arm begins."""

    submit_s: float
    abort_s: float
    arm_s: float


def arm_s(window: Sequence[Step], arm: str) -> float:
    """The planned length of one arm, seconds."""
    return sum(step.estimate.seconds for step in window if step.arm == arm)


def bounds(experiment: Experiment, window: Sequence[Step], max_downtime_min: float | None = None) -> Bounds:
    """The bounds of a window: the experiment's own, else from the plan's times; ``--max-downtime`` only shortens.

    From the plan: abort at twice the planned HOLD and two minutes, no request after 80 % of that, and the longest
    arm's planned time before an arm.
    """
    own = experiment.bounds
    abort_s = own.abort_min * 60 if own.abort_min else 2 * hold_s(window) + 120
    if max_downtime_min is not None:
        names = [step.name for step in window]
        first = next(index for index, step in enumerate(window) if step.verb == "start" and step.arm)
        before_s = sum(step.estimate.seconds for step in window[names.index("hold") : first])
        restore = ("restore.end", "restore.start", "restore.prove")
        restore_s = sum(step.estimate.seconds for step in window if step.name in restore)
        abort_s = min(abort_s, before_s + max_downtime_min * 60 - restore_s)
    submit_s = min(own.submit_min * 60 if own.submit_min else 0.8 * abort_s, abort_s)
    longest = max(arm_s(window, arm.name) for arm in experiment.arms)
    return Bounds(submit_s=submit_s, abort_s=abort_s, arm_s=own.arm_min * 60 if own.arm_min else longest)
