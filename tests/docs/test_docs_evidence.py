"""``docs/evidence.md`` and ``docs/host.md`` describe the files that a real window leaves, key by key."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "evidence.md").read_text()


def names(heading: str) -> list[str]:
    """What the first column of the first table below a heading names."""
    below = TEXT[TEXT.index(heading) :]
    rows = below[below.index("|---|") :].split("\n\n")[0].splitlines()[1:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_every_file_of_a_window_is_described(quick_window: Path) -> None:
    patterns = [
        re.escape(name).replace("NNNN", "[0-9]{4}").replace("NAME", "[a-z-]+").replace("HOST", "here")
        for name in names("# What a window leaves")
    ]
    patterns = [re.sub(r"ARM(?=/)", "[a-z]+", pattern) for pattern in patterns]
    files = sorted(str(path.relative_to(quick_window)) for path in quick_window.rglob("*") if path.is_file())
    assert [file for file in files if not any(re.fullmatch(pattern, file) for pattern in patterns)] == []


def test_every_described_file_is_left_but_for_those_of_special_ends(quick_window: Path) -> None:
    files = [str(path.relative_to(quick_window)) for path in quick_window.rglob("*") if path.is_file()]
    special = {"restore/N/", "STOP", "reserve"}
    absent = []
    for name in names("# What a window leaves"):
        pattern = re.sub(r"NNNN|NAME|HOST|ARM(?=/)", "[^/]+", re.escape(name))
        if name not in special and not any(re.fullmatch(pattern, file) for file in files):
            absent.append(name)
    assert absent == []


def test_a_cell_has_the_keys_that_are_described(quick_window: Path) -> None:
    row = json.loads((quick_window / "arms" / "off" / "cells.jsonl").read_text().splitlines()[0])
    assert set(names("## A cell")) == set(row)


def test_the_summary_has_the_keys_that_are_described(quick_window: Path) -> None:
    summary = json.loads((quick_window / "summary.json").read_text())
    assert set(names("## The summary")) - {"accepted"} == set(summary)


def test_what_stays_on_the_host_is_what_is_said(quick_window: Path) -> None:
    left = {path.name for path in (quick_window.parent / "state").iterdir()}
    assert left == {"last.json", "lock"}
