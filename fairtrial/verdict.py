"""The end of a window on one screen: arms, reps, medians, spreads and their limits, checks, downtime, what is next."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fairtrial.plan import differences
from fairtrial.store import Directory
from fairtrial.summary import folder_name, load_evidence


def screen(path: Path, again: dict[str, Any] | None = None) -> str:
    """What a folder's summary says, for a person; empty where there is no summary yet.

    ``again``: the reading as it was just read from the evidence, in the place of the summary's.
    """
    store = Directory.open(path)
    if not store.exists("summary.json"):
        return ""
    summary = json.loads(store.read("summary.json"))
    experiment, _, _ = load_evidence(store)
    reading = summary["reading"] if again is None else again
    lines = ["", summary["question"], ""]
    if reading:
        lines += _arms(summary, reading, {arm.name: differences(experiment, arm) for arm in experiment.arms})
        lines += _checks(reading)
        lines += ["", f"VERDICT  {reading['verdict'] or 'none due'}"]
        if reading.get("meaning"):
            lines += [f"  {reading['meaning']}", f"  next: {reading['next']}"]
        lines += [f"  - {_short(reason)}" for reason in deciding(reading)]
        if reading["reasons"]:
            lines.append(f"  (every condition: fairtrial read {folder_name(path.absolute())} --json)")
        if not summary["registered"]:
            lines.append("  not registered before the run")
    else:
        stop = summary["stop"] or {"step": "?", "kind": "?", "reason": "?"}
        lines += [f"STOPPED in {stop['step']} ({stop['kind']}): {stop['reason']}", "  no verdict; cells that landed:"]
        lines += [
            f"    {row['arm']} {row['cell']} rep {row['rep']}: {row['ttft_ns'] / 1e9:.3f} s" for row in summary["cells"]
        ]
    lines += ["", _production(summary)]
    name = folder_name(path.absolute())
    lines.append(f"evidence {name}   check it: fairtrial verify {name}   read it again: fairtrial read {name}")
    return "\n".join(lines) + "\n"


def deciding(reading: dict[str, Any]) -> list[str]:
    """The conditions that gave this verdict: of the reasons, those of the branch that was taken."""
    reasons: list[str] = reading["reasons"]
    timing = [reason for reason in reasons if not reason.startswith(("greedy", "logit"))]
    match reading["verdict"]:
        case "UNSAFE":
            return [reason for reason in reasons if reason not in timing]
        case "AMBIGUOUS":
            return [reason for reason in timing if reason.startswith("AMBIGUOUS") or reason.endswith("does not hold")]
        case "REFUTED":
            return [reason for reason in timing if not reason.startswith("for CONFIRMED")]
        case "CAUSE_NOT_REPRODUCED":
            return [reason for reason in timing if not reason.startswith("for ")]
        case _:
            return [reason for reason in reasons if not reason.startswith("for REFUTED")]


def _short(reason: str) -> str:
    """A reason with at most six significant digits a number; the summary keeps them all."""
    return re.sub(r"\d+\.\d{6,}(?:e-?\d+)?", lambda number: f"{float(number[0]):.6g}", reason)


def _production(summary: dict[str, Any]) -> str:
    down_s = summary.get("downtime_s")
    down = "was not stopped" if down_s is None else f"down {down_s:.1f} s"
    if summary["restored"]:
        return f"production: proved to be back; {down}; HOLD {summary['hold_s'] or 0:.1f} s"
    if summary.get("accepted"):
        accepted = summary["accepted"]
        return f"production: accepted by {accepted['by']} ({accepted['reason']}), not proved"
    return f"production: NOT PROVED to be back; {down}"


def _arms(summary: dict[str, Any], reading: dict[str, Any], declared: dict[str, str]) -> list[str]:
    limit = (reading.get("thresholds") or {}).get("spread_max")
    shown = f" (<= {100 * limit:.1f} %)" if limit is not None else ""
    lines = [f"{'arm':<8} {'TTFT of each rep, s':<26} {'median':>8} {'spread' + shown:>18}   production, with"]
    for arm in declared:
        reps = reading["ttft_s"][arm]
        values = "  ".join(f"{value:.3f}" for value in reps)
        spread = f"{100 * reading['spread'][arm]:.1f} %"
        lines.append(f"{arm:<8} {values:<26} {reading['median_s'][arm]:>8.3f} {spread:>18}   {declared.get(arm, '')}")
    cells = [row for row in summary["cells"] if row["timed"]]
    cold = sum(row["cold"] == "proved" for row in cells)
    alone = sum(row["alone"] == "proved" for row in cells)
    lines.append(
        f"{'':<8} cold proved {cold} of {len(cells)} cells; nobody else served: proved {alone} of {len(cells)}"
    )
    return lines


def _checks(reading: dict[str, Any]) -> list[str]:
    safety = reading.get("safety")
    if safety is None:
        return [f"{'checks':<8} not run"] if reading.get("speed") else []
    greedy, logit = safety["greedy"], safety["logit"]
    return [
        f"{'greedy':<8} {greedy['same']} of {greedy['of']} answers the same",
        f"{'KL':<8} {logit['kl_fix']:.3g} nats (<= {logit['limit']:.3g}; A-A {logit['kl_floor']:.3g}); "
        f"common mass {logit['common_mass']:.4f}: {'pass' if logit['pass'] else 'FAIL'}",
    ]
