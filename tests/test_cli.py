from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE, free_ports

Command = Callable[..., subprocess.CompletedProcess[str]]

COMMANDS = ["demo", "plan", "register", "rehearse", "run", "stop", "restore", "read", "verify", "status"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An experiment whose production does not run: its ports are free, its state folder is this test's."""
    port = free_ports()
    text = (PACKAGE / "demo.toml").read_text().replace("8001", str(port)).replace("8002", str(port + 1))
    text = text.replace('backend = "local"', f'backend = "local"\nstate = "{tmp_path}/state"')
    text = text.replace('source = "', f'source = "{PACKAGE}/')
    path = tmp_path / "x.toml"
    path.write_text(text)
    return path


def test_help_lists_the_commands_of_this_version_and_no_others(command: Command) -> None:
    ended = command("--help")
    assert ended.returncode == 0
    assert re.findall(r"^    (\S+)  ", ended.stdout, re.MULTILINE) == COMMANDS
    for name in COMMANDS:
        assert command(name, "--help").returncode == 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["plan"],
        ["rehearse"],
        ["report", "x"],
        ["demo", "--port", "0"],
        ["demo", "--port", "x"],
        ["demo", "--story", "none-such"],
        ["run", "x.toml", "--max-downtime", "0"],
        ["run", "x.toml", "--max-downtime", "nan"],
        ["restore", "x", "--now", "--accept", "r"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_2_and_says_so(command: Command, words: list[str]) -> None:
    ended = command(*words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.search(r"^(usage: fairtrial|fairtrial: refused: plan needs)", ended.stderr)
    assert "Traceback" not in ended.stderr


def test_the_schema_needs_no_experiment(command: Command) -> None:
    ended = command("plan", "--schema")
    assert ended.returncode == 0
    assert ended.stdout == command("plan", PACKAGE / "demo.toml", "--schema").stdout


def test_without_execute_a_run_is_its_plan(command: Command, file: Path) -> None:
    planned = command("plan", file)
    assert planned.returncode == 0
    for words in ([], ["--out", "out"]):
        ended = command("run", file, *words)
        assert (ended.returncode, ended.stdout) == (0, planned.stdout)
    assert sorted(path.name for path in file.parent.iterdir()) == ["x.toml"]
    shorter = command("run", file, "--max-downtime", "2")
    assert shorter.stdout != planned.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--execute"], "--out DIR"),
        (["--execute", "--out", "full"], "not empty"),
        (["--execute", "--out", "out", "--max-downtime", "0.1"], "make the window smaller"),
        (["--execute", "--out", "out", "--registration", "absent.json"], "absent.json"),
        (["--execute", "--out", "out", "--registration", "x.toml"], "is no registration"),
        (["--execute", "--out", "out"], "production is down"),
    ],
)
def test_a_run_that_is_refused_leaves_nothing(command: Command, file: Path, words: list[str], says: str) -> None:
    (file.parent / "full").mkdir()
    (file.parent / "full" / "kept").write_text("kept")
    ended = command("run", file, *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "fairtrial: refused: " in ended.stderr
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (file.parent / "out").exists()
    assert (file.parent / "full" / "kept").read_text() == "kept"
    assert not (file.parent / "state" / "hold.json").exists()


def test_an_empty_folder_that_was_there_is_left_there(command: Command, file: Path) -> None:
    (file.parent / "out").mkdir()
    assert command("run", file, "--execute", "--out", "out").returncode == 2
    assert list((file.parent / "out").iterdir()) == []


def test_a_registration_is_made_once_and_binds_the_experiment(command: Command, file: Path) -> None:
    made = command("register", file)
    assert (made.returncode, made.stdout.strip()) == (0, str(file.with_suffix(".registration.json")))
    path = file.with_suffix(".registration.json")
    registered = json.loads(path.read_text())
    assert registered["sha256"] in command("plan", file).stdout
    assert registered["schema"] == "fairtrial.registration/1"
    assert registered["registered"] is True
    assert {"commit", "at", "experiment"} <= registered.keys()
    before = path.read_bytes()
    again = command("register", file)
    assert again.returncode == 2
    assert "made once" in again.stderr
    assert path.read_bytes() == before
    # Unchanged, it goes on to ask production, which does not run; changed, it is refused for that.
    words = ["--execute", "--out", "out", "--registration", path]
    assert "production is down" in command("run", file, *words).stderr
    file.write_text(file.read_text().replace("spread_max = 0.15", "spread_max = 0.16"))
    ended = command("run", file, *words)
    assert ended.returncode == 2
    assert "it was changed after it was registered" in ended.stderr
    assert registered["sha256"] in ended.stderr


def test_a_comment_changes_no_registration(command: Command, file: Path) -> None:
    command("register", file)
    file.write_text("# a remark\n" + file.read_text())
    path = file.with_suffix(".registration.json")
    ended = command("run", file, "--execute", "--out", "out", "--registration", path)
    assert "production is down" in ended.stderr


def test_results_go_to_standard_output_and_progress_to_standard_error(
    quick_demo: subprocess.CompletedProcess[str],
) -> None:
    assert "VERDICT  " in quick_demo.stdout
    assert "VERDICT" not in quick_demo.stderr
    for step in ("preflight", "hold", "off.start", "restore.prove", "switch.off"):
        assert re.search(rf"^{re.escape(step)} +ok ", quick_demo.stderr, re.MULTILINE)
        assert not re.search(rf"^{re.escape(step)} ", quick_demo.stdout, re.MULTILINE)
    assert len(re.findall(r"^    \S+ \S+ rep \d: TTFT ", quick_demo.stderr, re.MULTILINE)) == 9
    assert "Ctrl-C now: ends; nothing has been touched" in quick_demo.stderr
    assert "Ctrl-C now: stops the window and restores production" in quick_demo.stderr
    assert "Ctrl-C now: is written down; the restore goes on" in quick_demo.stderr
    assert "\x1b" not in quick_demo.stdout + quick_demo.stderr


def test_no_color_holds_on_a_terminal_too(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "fairtrial", "plan", str(PACKAGE / "demo.toml")]
    environ = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color"}
    process = subprocess.Popen(argv, env=environ, cwd=tmp_path, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 65536):
            said += part
    except OSError:
        # A terminal whose other side is closed.
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"RESTORE" in said
    assert b"\x1b" not in said


def test_json_is_one_document_on_standard_output(command: Command, quick_window: Path) -> None:
    for words in (["plan", PACKAGE / "demo.toml", "--json"], ["read", quick_window, "--json"]):
        ended = command(*words)
        assert ended.returncode == 0
        assert isinstance(json.loads(ended.stdout), dict)
        assert ended.stderr == ""


def test_read_says_the_verdict_again(command: Command, quick_window: Path, quick_demo: Any) -> None:
    ended = command("read", quick_window)
    assert ended.returncode == 0
    [again] = re.findall(r"^VERDICT  .*$", ended.stdout, re.MULTILINE)
    assert again in quick_demo.stdout


def test_a_sealed_window_verifies_and_its_seal_is_the_one_that_was_said(
    command: Command, quick_window: Path, quick_demo: subprocess.CompletedProcess[str]
) -> None:
    [seal] = re.findall(r", seal ([0-9a-f]{64})$", quick_demo.stderr, re.MULTILINE)
    ended = command("verify", quick_window, "--seal", seal)
    assert ended.returncode == 0
    assert seal in ended.stdout
    ended = command("verify", quick_window, "--seal", "0" * 64)
    assert ended.returncode == 1
    assert "SHA256SUMS" in ended.stdout
    last = json.loads((quick_window.parent / "state" / "last.json").read_text())
    assert (last["state"], last["seal"]) == ("released", seal)


def test_the_seal_is_what_sha256sum_reads(quick_window: Path) -> None:
    ended = subprocess.run(
        ["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=quick_window, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


CHANGED = ["summary.json", "ledger.jsonl", "arms/fix/cells.jsonl", "cmd/0001-look.json", "SHA256SUMS", "snapshot/key"]


@pytest.mark.parametrize("name", CHANGED)
def test_one_byte_changed_is_named(command: Command, window_copy: Path, name: str) -> None:
    path = window_copy / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    named(command("verify", window_copy), name)


@pytest.mark.parametrize("name", CHANGED)
def test_a_file_removed_is_named(command: Command, window_copy: Path, name: str) -> None:
    (window_copy / name).unlink()
    named(command("verify", window_copy), name)


@pytest.mark.parametrize("name", ["x", "arms/new/cells.jsonl", ".hidden", "a\nb", "cmd/9999-look.json"])
def test_a_file_added_is_named(command: Command, window_copy: Path, name: str) -> None:
    (window_copy / name).parent.mkdir(exist_ok=True)
    (window_copy / name).write_bytes(b"")
    named(command("verify", window_copy), repr(name)[1:-1])


def named(ended: subprocess.CompletedProcess[str], name: str) -> None:
    assert ended.returncode == 1
    assert name in ended.stdout
    assert all(line for line in ended.stdout.splitlines())
    assert "Traceback" not in ended.stderr


def test_a_window_that_was_released_is_not_touched_by_another_restore_or_stop(
    command: Command, quick_window: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in quick_window.rglob("*")}
    ended = command("restore", quick_window)
    assert ended.returncode == 0
    assert "released before: nothing was touched" in ended.stderr
    ended = command("stop", quick_window)
    assert ended.returncode == 0
    assert "this window has ended before; production was proved to be back" in ended.stdout
    assert {path: path.stat().st_mtime_ns for path in quick_window.rglob("*")} == before


@pytest.mark.parametrize(("name", "code"), [("read", 2), ("verify", 2), ("restore", 2), ("stop", 2), ("status", 2)])
def test_a_folder_that_is_not_there_is_refused(command: Command, name: str, code: int) -> None:
    ended = command(name, "none-such")
    assert (ended.returncode, ended.stdout) == (code, "")
    assert "none-such" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("name", "code"), [("read", 1), ("verify", 1), ("restore", 2), ("stop", 2), ("status", 2)])
def test_a_folder_that_is_no_windows_is_refused(command: Command, tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "empty").mkdir()
    ended = command(name, "empty")
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert list((tmp_path / "empty").iterdir()) == []


def test_status_says_who_holds_what_and_how_far_a_window_is(command: Command, quick_window: Path) -> None:
    ended = command("status")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "no HOLD" in ended.stdout
    state = {"FAIRTRIAL_STATE": str(quick_window.parent / "state")}
    ended = command("status", quick_window, environ=state)
    assert ended.returncode == 0
    assert "no HOLD" in ended.stdout
    assert re.search(r"last: window demo-quick-\S+ released", ended.stdout)
    assert ": ended, and released" in ended.stdout
    assert "production is proved to be back" in ended.stdout
    assert len(re.findall(r"rep \d: TTFT ", ended.stdout)) == 9


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    argv = f"{sys.executable} -m fairtrial plan {PACKAGE / 'demo.toml'} | head -n 1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", argv], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
