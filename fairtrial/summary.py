"""The summary of a window, and its reading again from evidence alone."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial import __version__, rule
from fairtrial.decide import State, fold
from fairtrial.errors import EvidenceError, ExperimentError
from fairtrial.experiment import Experiment, parse
from fairtrial.ledger import read as read_ledger
from fairtrial.store import Store

if TYPE_CHECKING:
    from fairtrial.runner import Runner

SCHEMA = "fairtrial.summary/1"


def rows_of(
    store: Store, experiment: Experiment
) -> tuple[list[dict[str, Any]], dict[str, list[Mapping[str, Any]] | None]]:
    """The cells and checks that a folder holds; a torn last line of the cells is not a cell."""
    cells: list[dict[str, Any]] = []
    for arm in experiment.arms:
        cells += _lines(store, f"arms/{arm.name}/cells.jsonl", torn=True)
    roles = [name for name in (experiment.reading.off, experiment.reading.fix) if name]
    checks: dict[str, list[Mapping[str, Any]] | None] = {}
    for role in roles:
        name = f"arms/{role}/checks.jsonl"
        checks[role] = list(_lines(store, name, torn=False)) if store.exists(name) else None
    return cells, checks


def _lines(store: Store, name: str, *, torn: bool) -> list[dict[str, Any]]:
    if not store.exists(name):
        return []
    found = []
    lines = store.read(name).split(b"\n")
    if torn:
        lines = lines[:-1]
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            found.append(json.loads(line, parse_float=Decimal))
        except ValueError:
            raise EvidenceError(f"{name}: line {number} is not JSON") from None
    return found


def load_evidence(store: Store) -> tuple[Experiment, State, list[dict[str, Any]]]:
    """The experiment, the folded state and the ledger's records of a folder. Raises ``EvidenceError``."""
    try:
        registration = json.loads(store.read("registration.json"))
        experiment = parse(registration["experiment"], file="registration.json")
    except FileNotFoundError:
        raise EvidenceError("registration.json is missing: this is no window's folder") from None
    except (ValueError, KeyError, TypeError) as error:
        raise EvidenceError(f"registration.json cannot be read: {error}") from None
    except ExperimentError as error:
        raise EvidenceError(str(error)) from None
    records = read_ledger(store.read("ledger.jsonl")) if store.exists("ledger.jsonl") else []
    return experiment, fold(records), records


def read_again(store: Store) -> dict[str, Any]:
    """The reading again, from evidence alone. Raises ``EvidenceError`` when there is no verdict."""
    experiment, state, _ = load_evidence(store)
    if not state.complete:
        where = f" (in {state.stop.step}: {state.stop.kind}: {state.stop.reason})" if state.stop else ""
        raise EvidenceError(f"no verdict: this window did not run to its reading{where}")
    cells, checks = rows_of(store, experiment)
    return rule.read(experiment, cells, checks)


def summarise(
    store: Store,
    experiment: Experiment,
    state: State,
    *,
    read: bool,
    restored: bool,
    registered: bool,
    records: Sequence[Mapping[str, Any]],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Compute the summary of a folder; it can be computed again from the rest of the evidence."""
    cells, checks = rows_of(store, experiment)
    reading = rule.read(experiment, cells, checks) if read else None
    return {
        "schema": SCHEMA,
        "experiment": experiment.name,
        "question": experiment.question,
        "registered": registered,
        "status": "COMPLETE" if reading is not None else "STOPPED",
        "restored": restored,
        "verdict": reading["verdict"] if reading else None,
        "reading": reading,
        "stop": state.stop.dump() if state.stop else None,
        "cells": [{key: value for key, value in row.items() if key != "content_ns"} for row in cells],
        "checks": {arm: None if rows is None else len(rows) for arm, rows in checks.items()},
        **times(records),
        "versions": {"fairtrial": __version__, "python": platform.python_version(), "server": _server_version(store)},
        **extra,
    }


def times(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds by step, of the HOLD, and of production's downtime (None: it was not stopped), from a ledger.

    Every actor's records count; between two of them the wall clock runs, so that a dead runner's time is in it. The
    downtime runs from the begin of the first arm's start to the last proof of production, or to the last record.
    """
    durations: dict[str, float] = {}
    held = down = back = None
    for record in records:
        step, kind = record.get("step"), record["kind"]
        if kind == "begin":
            held = held or (record["at"] if step == "hold" else None)
            down = down or (record["at"] if str(step).endswith(".start") and step != "restore.start" else None)
        elif kind == "end":
            durations[str(step)] = round(durations.get(str(step), 0.0) + float(record.get("seconds", 0.0)), 3)
            back = record["at"] if step == "restore.prove" and record["outcome"] == "ok" else back
    last = records[-1]["at"] if records else None
    return {
        "durations": durations,
        "hold_s": _between_s(held, last),
        "downtime_s": _between_s(down, back or last),
    }


def _between_s(begin: str | None, end: str | None) -> float | None:
    if begin is None or end is None:
        return None
    return round((datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds(), 3)


def _server_version(store: Store) -> object:
    """What production said of its version at the snapshot, or None."""
    for name in store.names():
        if name.startswith("snapshot/") and name.endswith(".json"):
            reported = json.loads(store.read(name)).get("reported", {})
            return next((value for path, value in sorted(reported.items()) if path.endswith("version")), None)
    return None


def write_summary(runner: Runner, *, read: bool, restored: bool = False) -> dict[str, Any]:
    """Write ``summary.json``: the cells are saved before the reading is tried."""
    summary = summarise(
        runner.store,
        runner.experiment,
        runner.state,
        read=read,
        restored=restored,
        registered=json.loads(runner.store.read("registration.json"))["registered"],
        records=runner.ledger.records,
        extra={
            **({"accepted": runner.accepted} if runner.accepted else {}),
            "window": runner.window,
        },
    )
    content = json.dumps(summary, indent=1, sort_keys=True, default=_number).encode()
    runner.keep("write", "summary.json", content)
    return summary


def _number(value: object) -> float | int:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    raise TypeError(f"not JSON: {type(value).__name__}")


def folder_name(path: Path) -> str:
    """A folder as a person would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
