"""The dry plan: what a window will do, from the experiment alone. No command, no network, no file.

It is the decision of a run driven with every result assumed good: the steps, their estimates and what each was
measured on, the commands as templates, the bounds with their slack, the guards, and the whole rule.
"""

from __future__ import annotations

from typing import Any

from fairtrial.decide import Complete, Do, Outcome, State, decide, fold
from fairtrial.experiment import Arm, Experiment
from fairtrial.guards import GUARDS
from fairtrial.identity import mounts
from fairtrial.rule import thresholds
from fairtrial.window import Step, bounds, downtime_s, hold_s, steps

SCHEMA = "fairtrial.plan/1"


def order(experiment: Experiment) -> list[Step]:
    """The steps of a whole run, in order: ``decide`` driven with every result good."""
    window = steps(experiment)
    state = fold([{"kind": "window"}])
    done: list[Step] = []
    while True:
        match decide(window, state):
            case Do(step=step):
                done.append(step)
                if step.name == "seal":
                    return [*done, next(other for other in window if other.name == "release")]
                records = [
                    {"kind": "begin", "step": step.name},
                    {"kind": "end", "step": step.name, "outcome": Outcome.OK},
                ]
                state = fold(records, state)
            case Complete():
                state = fold([{"kind": "complete"}], state)
            case _:
                return done


def command_lines(experiment: Experiment, step: Step) -> list[str]:
    """The commands of a step, host by host, as templates."""
    lines = []
    for host, declared in experiment.hosts.items():
        program = f"{host}$ PYTHON -S -E host.pyz"
        common = f"--state {declared.state} --window WINDOW"
        for command in step.commands:
            mode, _, verb = command.partition(" ")
            if mode == "play":
                lines.append(f"{program} play {common} --term N   <- {verb}{_subject(experiment, step, verb)}")
            elif mode == "get":
                lines.append(f"{host}$ read {_read(experiment, host, step)}")
            elif mode == "put":
                lines += [f"{host}$ write {path}" for path in _staged(experiment)]
            elif mode == "site.close":
                close = experiment.site.close if experiment.serves(host) else ()
                lines += [f"{host}$ {' '.join(argv)}" for argv in close]
            else:
                lines.append(f"{program} {mode} {common}")
    return lines


def _subject(experiment: Experiment, step: Step, verb: str) -> str:
    if step.verb == "start" and step.arm:
        first = experiment.arms[0].name == step.arm
        declared = differences(experiment, experiment.arm(step.arm)) or "no difference"
        return {
            "end": " production" if first else " the arm before",
            "start": f" production's command with {declared}",
        }.get(verb, "")
    return {
        "restore.end": {"take": " the next term, where the runner is gone", "end": " all of this window"}.get(verb, ""),
        "restore.start": " production's command",
        "look": " all of this window",
    }.get(step.name, "")


def _read(experiment: Experiment, host: str, step: Step) -> str:
    state = experiment.hosts[host].state
    if step.arm:
        return f"{state}/.log-{step.arm}"
    return f"{state}/switch.log" if step.name == "switch.off" else "what it wrote, again"


def _staged(experiment: Experiment) -> list[str]:
    used = sorted({arm.overlay for arm in experiment.arms if arm.overlay})
    return [
        f"{experiment.overlays[name].generated}/{name}/{file.target} (where absent)"
        for name in used
        for file in experiment.overlays[name].files
    ]


def differences(experiment: Experiment, arm: Arm) -> str:
    """An arm's declared differences from production, in one line."""
    found = []
    if arm.port != experiment.production.port:
        found.append(f"{experiment.server.port_argument} {arm.port}")
    for name, value in arm.arguments.items():
        found.append(f"{name} {'removed' if value in (None, False) else '' if value is True else value}".strip())
    for name, setting in arm.environment.items():
        found.append(f"{name} removed" if setting in (None, False) else f"{name}={setting}")
    count = len(mounts(experiment, arm, ""))
    if count:
        overlay = experiment.overlays[arm.overlay or ""]
        added = sum(file.base_sha256 is None for file in overlay.files)
        found.append(f"overlay {arm.overlay} ({count - added} replaced, {added} added)")
    return "; ".join(found)


def plan(experiment: Experiment, max_downtime_min: float | None = None) -> dict[str, Any]:
    """The plan as a JSON value."""
    window = steps(experiment)
    limits = bounds(experiment, window, max_downtime_min)
    return {
        "schema": SCHEMA,
        "experiment": experiment.name,
        "question": experiment.question,
        "sha256": experiment.sha256,
        "arms": [{"name": arm.name, "differences": differences(experiment, arm)} for arm in experiment.arms],
        "steps": [
            {
                "step": step.name,
                "does": step.does,
                "estimate_s": step.estimate.seconds,
                "basis": step.estimate.basis,
                "requests": step.requests,
                "commands": command_lines(experiment, step),
                "undoes": list(step.undoes),
            }
            for step in order(experiment)
        ],
        "hold_s": round(hold_s(window), 1),
        "downtime_s": round(downtime_s(window), 1),
        "bounds": {
            "submit_s": round(limits.submit_s, 1),
            "abort_s": round(limits.abort_s, 1),
            "arm_s": round(limits.arm_s, 1),
            "slack_s": round(limits.abort_s - hold_s(window), 1),
        },
        "guards": [
            {"guard": guard.name, "rule": guard.rule, "cadence_s": guard.cadence_s, "stale_s": guard.stale_s}
            for guard in GUARDS
        ],
        "waits": experiment.waits.model_dump(),
        "reading": experiment.reading.model_dump(mode="json", exclude_defaults=True),
    }


RULE = {
    "none": ["no verdict: cells and spreads"],
    "match": [
        "raise        cells or checks incomplete, malformed, off-protocol: no verdict",
        "UNSAFE       greedy not {greedy_total} of {greedy_total}, or the logit floor fails, whatever the timing",
        "AMBIGUOUS    an arm's spread over {spread_max:.1%}",
        "CAUSE_NOT_REPRODUCED   a {cause} rep over {speedup_max:g} x {off}",
        "REFUTED      both {fix} reps at least {refute_min:g} x {off}",
        "CONFIRMED    both {fix} reps within {band:.1%} of {cause} and at most {speedup_max:g} x {off}, "
        "both checks pass",
        "AMBIGUOUS    else",
        "logit floor  KL({off} a || {fix} b) <= max({kl_min:g}, {kl_floor_multiple:g} x KL(a || aa)), "
        "common mass >= {mass_min:g}, top {top_n}",
    ],
}


def rule(experiment: Experiment) -> list[str]:
    """The registered rule, line by line, with its limits."""
    limits = thresholds(experiment)
    values = {name: getattr(limits, name) for name in limits.__slots__}
    reading = experiment.reading
    return [line.format(off=reading.off, cause=reading.cause, fix=reading.fix, **values) for line in RULE[reading.rule]]


def text(experiment: Experiment, max_downtime_min: float | None = None) -> str:
    """The plan for a person."""
    value = plan(experiment, max_downtime_min)
    lines = [
        f"{experiment.name}: {experiment.question}",
        f"registration SHA-256 {value['sha256']}",
        "",
        "ARMS     (each is production, freshly started, with only these differences)",
    ]
    lines += [f"  {arm['name']:<10} {arm['differences'] or 'none'}" for arm in value["arms"]]
    lines += ["", "STEPS    (seconds ESTIMATED, and what that was MEASURED on)"]
    for step in value["steps"]:
        lines.append(f"  {step['step']:<18} {step['estimate_s']:>7.1f} s  {step['does']}")
        lines.append(f"  {'':<18} {'':>9}  basis: {step['basis']}")
        if step["requests"]:
            lines.append(f"  {'':<18} {'':>9}  requests to {step['requests']}")
        lines += [f"  {'':<18} {'':>9}  {command}" for command in step["commands"]]
    limits = value["bounds"]
    lines += [
        "",
        f"HOLD     {value['hold_s'] / 60:.1f} min planned; production down {value['downtime_s'] / 60:.1f} min",
        f"BOUNDS   no request after {limits['submit_s'] / 60:.1f} min of HOLD; all cancelled at "
        f"{limits['abort_s'] / 60:.1f} min (slack {limits['slack_s'] / 60:.1f} min); an arm begins only with "
        f"{limits['arm_s'] / 60:.1f} min left",
        "WAITS    " + ", ".join(f"{name.removesuffix('_s')} {seconds:g} s" for name, seconds in value["waits"].items()),
        "GUARDS",
    ]
    own = experiment.guards
    values = {
        "memory": f" ({own.memory_min_gib:g} GiB; {own.memory_floor_gib:g} GiB before an arm)",
        "swap": f" (by more than {own.swap_growth_max_mib:g} MiB)",
    }
    for guard in value["guards"]:
        rule_text = guard["rule"] + values.get(guard["guard"], "")
        when = f"every {guard['cadence_s']:g} s, stale after {guard['stale_s']:g} s"
        lines.append(f"  {guard['guard']:<10} {rule_text} ({when})")
    lines += ["", f"READING  rule {experiment.reading.rule}, cell {experiment.reading.cell}; the first that holds:"]
    lines += [f"  {line}" for line in rule(experiment)]
    lines += ["", "RESTORE  from restore.end on: always, however the window ends; no flag turns it off."]
    for host, declared in experiment.hosts.items():
        if declared.switch == "none":
            lines.append(
                f"  no dead-man restore on {host}: if the runner dies, production stays down until fairtrial restore"
            )
        else:
            lines.append(
                f"  {host}: dead-man's switch as a detached process: it restores when the runner no longer can; it "
                "does not outlive its own death or a reboot: if both die, production stays down until fairtrial restore"
            )
    return "\n".join(lines) + "\n"


__all__ = ["State", "command_lines", "differences", "order", "plan", "rule", "text"]
