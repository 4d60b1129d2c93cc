"""``docs/pf1.md`` shows the driver's own ``--help``, its dry run, a reading, and the campaign's own words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs_tables import table

from offload.launch.windows.pf1_window import MATCH_TEXTS
from offload.prefill_cause2.match_requests import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pf1.md").read_text()
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


READING, HELP, DRY_RUN = blocks("text")


def test_the_help_is_shown_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown == HELP, f"docs/pf1.md: show this:\n\n{shown}"


def test_the_dry_run_prints_what_is_shown(tmp_path: Path) -> None:
    (commands,) = blocks("sh")
    ended = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=ENVIRON, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == DRY_RUN, f"docs/pf1.md: show this:\n\n{ended.stdout}"
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.txt", "probe.txt"}


def test_the_reading_prints_what_is_shown(tmp_path: Path) -> None:
    (code,) = blocks("python")
    argv = [sys.executable, "-c", code]
    ended = subprocess.run(argv, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == (READING, "")


def test_every_verdict_is_shown_in_the_campaigns_own_words() -> None:
    due = [[f"`{verdict}`", text.meaning, text.next] for verdict, text in MATCH_TEXTS.items()]
    assert table("docs/pf1.md", "## The reading") == due
