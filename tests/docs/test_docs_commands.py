"""``docs/commands.md`` shows every command's own ``--help``, and the table of exit statuses that README has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fairtrial.cli import main

ROOT = Path(__file__).parents[2]
WIDTH = "100"


def helped(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out.strip()


def commands(shown: str) -> list[str]:
    return re.findall(r"^    ([a-z]+) {2,}", shown, re.MULTILINE)


def test_the_help_of_every_command_is_shown_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", WIDTH)
    text = (ROOT / "docs" / "commands.md").read_text()
    blocks = [block.strip() for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL)]
    whole = helped(capsys)
    due = [whole, *(helped(capsys, command) for command in commands(whole))]
    assert blocks == due, "docs/commands.md: show these:\n\n" + "\n\n".join(due)


def test_exit_statuses_stand_the_same_in_readme_and_commands() -> None:
    tables = []
    for page in ("README.md", "docs/commands.md"):
        text = (ROOT / page).read_text()
        tables.append([line for line in text.splitlines() if re.match(r"\| ?(exit|\d) ?\|", line)])
    assert len(tables[0]) == 6
    assert tables[0] == tables[1]
