from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairtrial.errors import EvidenceError
from fairtrial.store import Directory
from fairtrial.summary import load_evidence, read_again, rows_of
from fairtrial.verdict import screen

Command = Callable[..., subprocess.CompletedProcess[str]]
S = 1_000_000_000
CLEAR: Mapping[str, tuple[int, int]] = {"off": (10 * S, 10 * S), "cause": (5 * S, 5 * S), "fix": (5 * S, 5 * S)}


def reading(path: Path) -> dict[str, Any]:
    return read_again(Directory(path))


def set_ttft(path: Path, ttft_ns: Mapping[str, tuple[int, ...]]) -> None:
    """Give the timed cells of a copy these times, so that a verdict does not hang on this machine's load.

    The copy loses its seal, under which nothing may change.
    """
    (path / "SHA256SUMS").unlink(missing_ok=True)
    for arm, values in ttft_ns.items():
        cells = path / "arms" / arm / "cells.jsonl"
        rows = [json.loads(line) for line in cells.read_text().splitlines()]
        left = iter(values)
        for row in rows:
            if row["timed"]:
                row["ttft_ns"] = next(left)
        cells.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def clear(window_copy: Path) -> Path:
    """A copy of a real window whose times leave no doubt."""
    set_ttft(window_copy, CLEAR)
    return window_copy


def test_the_reading_again_is_the_summarys_own(quick_window: Path) -> None:
    summary = json.loads((quick_window / "summary.json").read_text())
    again = json.loads(json.dumps(reading(quick_window)))
    assert again == summary["reading"]
    assert again["verdict"] == summary["verdict"]
    assert summary["status"] == "COMPLETE"
    assert summary["restored"] is True
    assert summary["stop"] is None
    assert summary["registered"] is False


def test_a_summary_holds_every_cell_that_landed(quick_window: Path) -> None:
    summary = json.loads((quick_window / "summary.json").read_text())
    landed = []
    for arm in ("off", "cause", "fix"):
        landed += [json.loads(line) for line in (quick_window / "arms" / arm / "cells.jsonl").read_text().splitlines()]
    for row in landed:
        # When each piece arrived is kept beside the arm; of each cell the summary has the rest.
        assert row.pop("content_ns")[0] == row["ttft_ns"]
    assert summary["cells"] == landed
    assert [(row["arm"], row["cell"], row["rep"]) for row in landed if row["timed"]] == [
        (arm, "long", rep) for arm in ("off", "cause", "fix") for rep in (1, 2)
    ]


def test_reading_again_needs_neither_the_summary_nor_the_rest_of_the_folder(clear: Path) -> None:
    wanted = reading(clear)
    for name in ("summary.json", "plan.json", "SHA256SUMS", "arm-memory.json"):
        (clear / name).unlink(missing_ok=True)
    assert reading(clear) == wanted


@pytest.mark.parametrize(
    ("ttft_ns", "verdict"),
    [
        (CLEAR, "CONFIRMED"),
        ({**CLEAR, "fix": (10 * S, 10 * S)}, "REFUTED"),
        ({**CLEAR, "cause": (10 * S, 10 * S)}, "CAUSE_NOT_REPRODUCED"),
        ({**CLEAR, "fix": (8 * S, 8 * S)}, "AMBIGUOUS"),
        ({**CLEAR, "off": (10 * S, 30 * S)}, "AMBIGUOUS"),
    ],
)
def test_the_verdict_follows_the_cells(window_copy: Path, ttft_ns: Mapping[str, tuple[int, int]], verdict: str) -> None:
    set_ttft(window_copy, ttft_ns)
    assert reading(window_copy)["verdict"] == verdict


def test_another_answer_of_the_fix_is_unsafe_whatever_the_times(clear: Path) -> None:
    checks = clear / "arms" / "fix" / "checks.jsonl"
    rows = [json.loads(line) for line in checks.read_text().splitlines()]
    row = next(row for row in rows if row["kind"] == "greedy")
    row["sha256"] = "0" * 64
    checks.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert reading(clear)["verdict"] == "UNSAFE"
    set_ttft(clear, {"fix": (10 * S, 10 * S)})
    assert reading(clear)["verdict"] == "UNSAFE"


@pytest.mark.parametrize("gone", [["off"], ["fix"], ["off", "fix"]])
def test_checks_that_were_not_run_block_a_confirmation_and_are_named(clear: Path, gone: list[str]) -> None:
    for arm in gone:
        (clear / "arms" / arm / "checks.jsonl").unlink()
    found = reading(clear)
    assert found["verdict"] == "AMBIGUOUS"
    assert any("checks" in reason and "not run" in reason for reason in found["reasons"])
    set_ttft(clear, {"fix": (10 * S, 10 * S)})
    assert reading(clear)["verdict"] == "REFUTED"


def test_a_torn_last_line_is_no_cell(clear: Path) -> None:
    wanted = reading(clear)
    cells = clear / "arms" / "fix" / "cells.jsonl"
    with cells.open("ab") as file:
        file.write(b'{"arm":"fix","cell":"long","rep":3,"ttft_ns":5')
    assert reading(clear) == wanted
    with cells.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(EvidenceError, match=r"arms/fix/cells\.jsonl: line 4 is not JSON"):
        reading(clear)


def test_a_missing_cell_gives_no_verdict(clear: Path) -> None:
    cells = clear / "arms" / "cause" / "cells.jsonl"
    *rest, _ = cells.read_bytes().splitlines(keepends=True)
    cells.write_bytes(b"".join(rest))
    with pytest.raises(EvidenceError, match="cause"):
        reading(clear)
    cells.unlink()
    with pytest.raises(EvidenceError, match="cause"):
        reading(clear)


def test_incomplete_checks_give_no_verdict(clear: Path) -> None:
    checks = clear / "arms" / "off" / "checks.jsonl"
    lines = checks.read_bytes().splitlines(keepends=True)
    for dropped in range(len(lines)):
        checks.write_bytes(b"".join(lines[:dropped] + lines[dropped + 1 :]))
        with pytest.raises(EvidenceError):
            reading(clear)


LINES = st.sampled_from([b"5", b"[]", b"null", b'"x"', b"{}", b'{"arm":"off"}', b'{"kind":"greedy"}', b"\xff"])
ROW = st.fixed_dictionaries(
    {},
    optional={
        "arm": st.sampled_from(["off", 1, None]),
        "cell": st.sampled_from(["long", 1]),
        "rep": st.sampled_from([1, "1", None, 1.0]),
        "ttft_ns": st.sampled_from([1, 0, -1, "1", 1.5, True, None]),
        "kind": st.sampled_from(["identity", "greedy", "logit", 1]),
        "slot": st.sampled_from(["a", "b", 1]),
        "top": st.sampled_from([[], [[1]], "x", [[1, None]], None]),
    },
).map(lambda row: json.dumps(row).encode())


@pytest.mark.parametrize("name", ["arms/off/cells.jsonl", "arms/fix/checks.jsonl"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lines=st.lists(LINES | ROW, min_size=1, max_size=3))
def test_no_line_whatever_gives_anything_but_an_evidence_error(clear: Path, name: str, lines: list[bytes]) -> None:
    path = clear / name
    whole = path.read_bytes()
    try:
        path.write_bytes(whole + b"".join(line + b"\n" for line in lines))
        try:
            found = reading(clear)
        except EvidenceError:
            return
        # Cells of another shape are other cells: they change nothing.
        assert found["verdict"] == "CONFIRMED"
    finally:
        path.write_bytes(whole)


def test_a_window_that_was_stopped_has_no_verdict_and_says_where_it_stopped(clear: Path, command: Command) -> None:
    ledger = clear / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    complete = next(index for index, line in enumerate(lines) if json.loads(line)["kind"] == "complete")
    ledger.write_bytes(b"".join(lines[:complete]))
    with pytest.raises(EvidenceError, match="did not run to its reading"):
        reading(clear)
    ended = command("read", clear)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no verdict" in ended.stderr


@pytest.mark.parametrize("content", [None, b"{", b"{}", b"[]", b'{"experiment": {}}', b'{"experiment": 1}'])
def test_a_folder_without_its_registration_is_no_window(clear: Path, content: bytes | None) -> None:
    (clear / "registration.json").unlink()
    if content is not None:
        (clear / "registration.json").write_bytes(content)
    with pytest.raises(EvidenceError, match=r"registration\.json"):
        load_evidence(Directory(clear))


def test_no_verdict_is_read_from_evidence_that_changed_under_its_seal(window_copy: Path, command: Command) -> None:
    with (window_copy / "arms" / "fix" / "cells.jsonl").open("a") as cells:
        cells.write(" ")
    ended = command("read", window_copy)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "changed: 'arms/fix/cells.jsonl'" in ended.stderr


def test_rows_are_read_with_their_numbers_as_printed(clear: Path) -> None:
    store = Directory(clear)
    _, checks = rows_of(store, load_evidence(store)[0])
    rows = checks["off"]
    assert rows is not None
    top = next(row["top"] for row in rows if row["kind"] == "logit")
    text = (clear / "arms" / "off" / "checks.jsonl").read_text()
    assert all(str(logprob) in text or f"{float(logprob)!r}" in text for _, logprob in top)


def test_the_screen_shows_arms_limits_checks_verdict_and_what_is_next(quick_window: Path) -> None:
    summary = json.loads((quick_window / "summary.json").read_text())
    said = screen(quick_window)
    for arm in ("off", "cause", "fix"):
        assert f"{summary['reading']['median_s'][arm]:.3f}" in said
    for part in ("spread (<= 60.0 %)", "greedy   6 of 6", "nats (<= 0.005", f"VERDICT  {summary['verdict']}"):
        assert part in said
    assert summary["question"] in said
    assert "production: proved to be back; down " in said
    assert "not registered before the run" in said
    assert "next: " in said


def test_the_screen_of_a_reading_again_shows_that_reading_not_the_summarys(clear: Path, command: Command) -> None:
    set_ttft(clear, {"fix": (10 * S, 10 * S)})
    ended = command("read", clear)
    assert ended.returncode == 0
    assert "VERDICT  REFUTED" in ended.stdout
    assert "CONFIRMED" not in ended.stdout.replace("for CONFIRMED", "")
    (clear / "summary.json").unlink()
    assert command("read", clear).stdout == "VERDICT  REFUTED\n"
