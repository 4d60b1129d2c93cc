"""Who holds what, and how far a running window is: from the state folder and the evidence, changing nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairtrial.decide import State, Status
from fairtrial.demo import state_folder
from fairtrial.errors import EvidenceError, Refused
from fairtrial.experiment import Experiment
from fairtrial.store import Directory
from fairtrial.summary import load_evidence
from fairtrial.switch import procs
from fairtrial.window import steps


def text(path: Path | None) -> str:
    """The status of this machine, and of one window's folder if one is named. Raises ``Refused``."""
    if path is None:
        return "\n".join(_host(Path(state_folder()))) + "\n"
    experiment, state, records = _evidence(path)
    lines = [line for host in experiment.hosts.values() for line in _host(Path(host.state))]
    lines += _window(path, experiment, state, records)
    return "\n".join(lines) + "\n"


def _host(state: Path) -> list[str]:
    hold = _first(state, ["hold.json", *sorted(path.name for path in state.glob("term-*.json"))])
    last = _read(state / "last.json")
    if hold is None:
        lines = [f"{state}: no HOLD"]
    else:
        runs = procs.alive(int(hold.get("pid", 0)), int(hold.get("start", 0)))
        lines = [
            f"{state}: HELD by window {hold.get('window')} of {hold.get('owner')} (pid {hold.get('pid')} on "
            f"{hold.get('control_host')}) since {hold.get('since')}, for: {hold.get('purpose')}",
            f"  evidence: {hold.get('out')}",
        ]
        if not runs:
            lines.append(
                "  its runner does not run on this machine: where it ran here, the dead-man's switch restores when the "
                f"lease has run out; finish it now: fairtrial restore {hold.get('out')}"
            )
    if last:
        kind = (last.get("actor") or {}).get("kind", "?")
        lines.append(
            f"  last: window {last.get('window')} {last.get('state')} since {last.get('since')} "
            f"(term {last.get('term')}, {kind})"
        )
        if last.get("state") == "down":
            lines.append(f"  PRODUCTION IS DOWN: fairtrial restore {last.get('out')}")
    return lines


def _evidence(path: Path) -> tuple[Experiment, State, list[dict[str, Any]]]:
    try:
        return load_evidence(Directory.open(path))
    except (EvidenceError, FileNotFoundError, NotADirectoryError) as error:
        raise Refused(f"{path}: no window's folder: {error}") from None


def _window(path: Path, experiment: Experiment, state: State, records: list[dict[str, Any]]) -> list[str]:
    done = [step.name for step in steps(experiment) if step.name in state.ended]
    store = Directory.open(path)
    summary = json.loads(store.read("summary.json")) if store.exists("summary.json") else {}
    window = records[0]["window"] if records else "?"
    if state.status is Status.RELEASED:
        lines = [f"{path}: window {window}: ended, and released"]
    else:
        lines = [f"{path}: window {window}: {state.status}, in {state.step or 'no step'}; {len(done)} steps ended"]
    if summary.get("verdict"):
        lines.append(f"  verdict {summary['verdict']}")
    if summary.get("restored"):
        lines.append("  production is proved to be back")
    if state.stop:
        lines.append(f"  stopped in {state.stop.step} ({state.stop.kind}): {state.stop.reason}")
    cells = [record for record in records if record["kind"] == "cell"]
    lines += [f"  {cell['arm']} {cell['cell']} rep {cell['rep']}: TTFT {cell['ttft_ns'] / 1e9:.3f} s" for cell in cells]
    return lines


def _first(state: Path, names: list[str]) -> Mapping[str, Any] | None:
    return next((found for name in names if (found := _read(state / name))), None)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
