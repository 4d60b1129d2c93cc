"""What every backend must do, whatever its hosts are. A new backend is one more parameter here."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fairtrial.backends import Backend, Channel, Local, Pending, Reply
from fairtrial.client import Call, Endpoint
from fairtrial.errors import StepFailed
from fairtrial.identity import MARK

HOST = "here"
LIMIT_S = 30
PYTHON = (sys.executable, "-S", "-E", "-c")


@pytest.fixture(params=["local"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """Every backend, with one host on which this folder is there."""
    program = tmp_path / "host.pyz"
    program.write_text("import sys; print('host program', *sys.argv[1:])")
    return {"local": Local}[request.param](program)


def until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.01)


def ended(pending: Pending) -> Reply:
    """Wait for a command as the runner does, tick by tick."""
    found: list[Reply] = []

    def poll() -> bool:
        reply = pending.poll(0.05)
        found.extend([reply] if reply is not None else [])
        return bool(found)

    until(poll, "the end of the command")
    return found[0]


def run(backend: Backend, code: str, *words: str, stdin: bytes = b"", mark: str | None = None) -> Reply:
    return ended(backend.command(HOST, [*PYTHON, code, *words], stdin=stdin, mark=mark))


def child(process: Path) -> bool:
    """Whether an entry of /proc is a sleeping child of this test."""
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        return int(fields[1]) == os.getpid() and (process / "cmdline").read_bytes() == b"/bin/sleep\x0060\0"
    except OSError:
        return False


# ---- commands ---------------------------------------------------------------------------------------------------


def test_a_command_gives_its_exit_status_and_both_outputs_apart(backend: Backend) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(int(sys.argv[1]))"
    for status in (0, 1, 75, 255):
        assert run(backend, code, str(status)) == Reply(exit=status, stdout=b"out\n", stderr=b"err\n")


def test_a_command_that_a_signal_ended_has_not_ended_well(backend: Backend) -> None:
    reply = run(backend, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert reply.exit is not None
    assert reply.exit != 0


def test_words_arrive_as_they_are_whatever_they_hold(backend: Backend) -> None:
    words = ["", "a b", "'", '"', "$HOME", "`id`", "*", "\\", "a\nb", "--x", "é", ";", "#"]
    reply = run(backend, "import json, sys; print(json.dumps(sys.argv[1:]))", *words)
    assert json.loads(reply.stdout) == words


def test_standard_input_arrives_whole_and_ends(backend: Backend) -> None:
    content = os.urandom(1 << 20)
    code = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    assert run(backend, code, stdin=content).stdout == content
    assert run(backend, code).stdout == b""


def test_a_command_that_reads_no_input_ends_all_the_same(backend: Backend) -> None:
    assert run(backend, "pass", stdin=bytes(1 << 20)).exit == 0


def test_output_that_is_no_utf_8_is_kept(backend: Backend) -> None:
    assert run(backend, r"import sys; sys.stdout.buffer.write(b'\xff\x00\n')").stdout == b"\xff\x00\n"


def test_much_output_does_not_block(backend: Backend) -> None:
    reply = run(backend, "import sys; sys.stdout.write('x' * (1 << 21)); sys.stderr.write('y' * (1 << 21))")
    assert (len(reply.stdout), len(reply.stderr)) == (1 << 21, 1 << 21)


def test_a_program_that_is_not_there_names_host_and_program(backend: Backend) -> None:
    with pytest.raises(StepFailed, match=r"here: /none/such does not start: No such file"):
        ended(backend.command(HOST, ["/none/such"], stdin=b"", mark=None))
    with pytest.raises(StepFailed, match=r"here: /none/such"):
        backend.channel(HOST, ["/none/such"])


def test_a_poll_waits_no_longer_than_it_may(backend: Backend) -> None:
    pending = backend.command(HOST, ["/bin/sleep", "60"], stdin=b"", mark=None)
    before = time.monotonic()
    assert pending.poll(0.05) is None
    assert pending.poll(0) is None
    assert time.monotonic() - before < LIMIT_S
    [pid] = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and child(one)]
    os.kill(pid, signal.SIGTERM)
    assert ended(pending).exit not in (None, 0)


def test_an_abandoned_command_is_indeterminate_and_may_go_on(backend: Backend, tmp_path: Path) -> None:
    started, go, done = (tmp_path / name for name in ("started", "go", "done"))
    code = (
        "import pathlib, sys, time\n"
        "started, go, done = map(pathlib.Path, sys.argv[1:])\n"
        "started.touch()\n"
        "while not go.exists(): time.sleep(0.01)\n"
        "print('x' * 1000000, flush=True)\n"
        "done.touch()\n"
    )
    pending = backend.command(HOST, [*PYTHON, code, *map(str, (started, go, done))], stdin=b"", mark=None)
    pending.poll(0)
    until(started.exists, "the start of the command")
    assert pending.abandon() == Reply(exit=None, stdout=b"", stderr=b"")
    del pending
    gc.collect()
    go.touch()
    until(done.exists, "the end of a command that says much")


def test_only_a_command_with_a_mark_carries_it(backend: Backend) -> None:
    code = f"import os; print(os.environ.get('{MARK}'))"
    assert run(backend, code, mark="w-1").stdout == b"w-1\n"
    assert run(backend, code).stdout == b"None\n"


def test_nothing_of_our_own_environment_reaches_a_host(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_TOKEN", "x")
    monkeypatch.setenv(MARK, "another window")
    reply = run(backend, "import json, os; print(json.dumps(dict(os.environ)))")
    found = json.loads(reply.stdout)
    assert "PATH" in found
    assert "A_SECRET_TOKEN" not in found
    assert MARK not in found


def test_a_signal_to_our_own_group_does_not_reach_a_command(tmp_path: Path) -> None:
    """Ctrl-C at a terminal goes to the whole group: a changing command must end by itself all the same."""
    ready, done = tmp_path / "ready", tmp_path / "done"
    child = (
        "import pathlib, sys, time\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "sys.stdin.read()\n"
        f"pathlib.Path({str(done)!r}).touch()\n"
    )
    runner = (
        "import signal, sys, pathlib, time\n"
        "from fairtrial.backends import Local\n"
        "got = []\n"
        "signal.signal(signal.SIGINT, lambda *a: got.append(a))\n"
        "backend = Local(pathlib.Path('host.pyz'))\n"
        f"channel = backend.channel('here', [sys.executable, '-c', {child!r}])\n"
        "while not got: time.sleep(0.01)\n"
        "sys.exit(3 if channel.ended() else (channel.close(), 0)[1])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", runner], start_new_session=True)
    until(ready.exists, "the start of the program")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(LIMIT_S) == 0
    until(done.exists, "the program's own end")


def test_a_command_leads_a_group_of_its_own(backend: Backend) -> None:
    reply = run(backend, "import os; print(os.getpid(), os.getpgrp(), os.getsid(0))")
    pid, group, leader = map(int, reply.stdout.split())
    assert pid == group == leader
    assert group != os.getpgrp()


def test_the_host_program_is_called_as_the_plan_says(backend: Backend) -> None:
    words = backend.program(HOST)
    assert words[1:3] == ("-S", "-E")
    assert words[-1].endswith("host.pyz")
    assert run_words(backend, [*words, "look", "--state", "/s"]).stdout == b"host program look --state /s\n"


def run_words(backend: Backend, argv: list[str]) -> Reply:
    return ended(backend.command(HOST, argv, stdin=b"", mark=None))


# ---- channels ---------------------------------------------------------------------------------------------------

ECHO = "import sys\nfor line in sys.stdin: print('got', line.strip(), flush=True)"


def heard(channel: Channel, count: int) -> list[str]:
    found: list[str] = []
    until(lambda: (found.extend(channel.lines()), len(found) >= count)[1], f"{count} lines")
    return found


def test_a_channel_carries_lines_both_ways_in_order(backend: Backend) -> None:
    channel = backend.channel(HOST, [*PYTHON, ECHO])
    assert channel.lines() == []
    assert all(channel.send(f"line {number}") for number in range(100))
    assert heard(channel, 100) == [f"got line {number}" for number in range(100)]
    assert channel.lines() == []
    assert not channel.ended()
    channel.close()
    assert channel.ended()


def test_lines_said_before_the_end_are_not_lost(backend: Backend) -> None:
    channel = backend.channel(HOST, [*PYTHON, "print('a'); print('b'); print('no end', end='')"])
    assert heard(channel, 3) == ["a", "b", "no end"]
    until(channel.ended, "the end")
    channel.close()


def test_sending_to_a_program_that_is_gone_is_false_and_never_raises(backend: Backend) -> None:
    channel = backend.channel(HOST, [*PYTHON, "pass"])
    until(channel.ended, "the end")
    assert not channel.send("x" * 100_000)
    assert not channel.send("y")
    channel.close()
    assert not channel.send("z")


def test_closing_ends_the_input_and_so_the_program(backend: Backend, tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = "import pathlib, sys; print('up', flush=True); sys.stdin.read(); pathlib.Path(sys.argv[1]).touch()"
    channel = backend.channel(HOST, [*PYTHON, code, str(done)])
    heard(channel, 1)
    channel.close()
    assert done.exists()
    assert channel.ended()
    channel.close()


def test_a_program_that_does_not_end_at_the_end_of_its_input_is_ended(backend: Backend) -> None:
    channel = backend.channel(HOST, [*PYTHON, "import time; print('up', flush=True); time.sleep(600)"])
    heard(channel, 1)
    before = time.monotonic()
    channel.close()
    assert channel.ended()
    assert time.monotonic() - before < LIMIT_S


def test_a_channel_carries_no_mark(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "w")
    channel = backend.channel(HOST, [*PYTHON, f"import os; print(os.environ.get('{MARK}'), flush=True)"])
    assert heard(channel, 1) == ["None"]
    channel.close()


# ---- files ------------------------------------------------------------------------------------------------------


def test_a_file_reads_back_as_it_was_put_and_replaces_the_old_one(backend: Backend, tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "b" / "file")
    for content in (os.urandom(1 << 18), b"", b"new"):
        backend.put(HOST, path, content)
        assert backend.get(HOST, path) == content
    assert [one.name for one in Path(path).parent.iterdir()] == ["file"]


def test_a_file_that_is_not_there_is_none(backend: Backend, tmp_path: Path) -> None:
    assert backend.get(HOST, str(tmp_path / "absent")) is None
    assert backend.get(HOST, str(tmp_path / "no" / "folder" / "absent")) is None


def test_a_reader_sees_the_old_file_or_the_new_and_nothing_between(backend: Backend, tmp_path: Path) -> None:
    path, size = str(tmp_path / "file"), 1 << 20
    backend.put(HOST, path, b"0" * size)
    seen: set[bytes] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            content = backend.get(HOST, path) or b""
            seen.add(content[:1] + content[-1:] + str(len(content)).encode())

    reader = threading.Thread(target=watch)
    reader.start()
    for digit in b"123456789":
        backend.put(HOST, path, bytes([digit]) * size)
    over.set()
    reader.join(LIMIT_S)
    assert seen <= {bytes([digit, digit]) + str(size).encode() for digit in b"0123456789"}


def test_what_cannot_be_written_or_read_names_host_and_path(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StepFailed, match=rf"here: cannot write {tmp_path}/file/below: "):
        backend.put(HOST, f"{tmp_path}/file/below", b"x")
    with pytest.raises(StepFailed, match=rf"here: cannot write {tmp_path}: "):
        backend.put(HOST, str(tmp_path), b"x")
    with pytest.raises(StepFailed, match=rf"here: cannot read {tmp_path}: "):
        backend.get(HOST, str(tmp_path))
    assert (tmp_path / "file").read_text() == "x"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "host.pyz"]


def test_a_full_disk_leaves_the_old_file(backend: Backend, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    # The kernel's own answer of a full device: what is written aside goes to one.
    aside = tmp_path / f".file.{os.getpid()}"
    aside.symlink_to("/dev/full")
    with pytest.raises(StepFailed, match="No space left on device"):
        backend.put(HOST, str(tmp_path / "file"), b"new")
    assert (tmp_path / "file").read_text() == "old"


# ---- requests and clocks ----------------------------------------------------------------------------------------


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_a_request_runs_by_itself_and_gives_its_exchange(backend: Backend) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        base = Endpoint(host="127.0.0.1", port=server.server_address[1])
        request = backend.request(Call(base=base, path="/health", method="GET", limit_s=LIMIT_S))
        found = []
        until(lambda: (found.append(request.poll(0.05)), found[-1])[1], "the answer")
        assert (found[-1].status, found[-1].body, found[-1].fault) == (200, b"ok", None)
        assert request.local_port
        server.shutdown()


def test_a_request_that_nobody_answers_ends_with_a_fault(backend: Backend) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        port = server.server_address[1]
    base = Endpoint(host="127.0.0.1", port=port)
    request = backend.request(Call(base=base, path="/health", method="GET", limit_s=LIMIT_S))
    found = []
    until(lambda: (found.append(request.poll(0.05)), found[-1])[1], "the fault")
    assert found[-1].status is None
    assert found[-1].fault


def test_the_monotonic_clock_never_goes_back_and_moves_while_time_passes(backend: Backend) -> None:
    times = [backend.monotonic_ns() for _ in range(10_000)]
    assert times == sorted(times)
    backend.sleep(0.01)
    assert backend.monotonic_ns() - times[-1] >= 10_000_000


def test_the_clock_of_the_day_is_this_machines(backend: Backend) -> None:
    before = time.time()
    assert before <= backend.utc() <= time.time()
