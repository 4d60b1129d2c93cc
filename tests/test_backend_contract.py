"""What every backend must do, whatever its hosts are. A new backend is one more bench here.

Each case is an ordinary function that is given a ``Bench`` and is played on every backend. What only a real machine
can show stands at the end, and is of ``local`` alone.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

import pytest

from fairtrial.backends import Backend, Channel, Local, Pending, Reply
from fairtrial.backends.simulated import Clock, Host, Simulated
from fairtrial.backends.simulated.commands import PLAIN
from fairtrial.backends.simulated.kernel import Connection
from fairtrial.backends.simulated.program import Programs
from fairtrial.client import Call, Endpoint, Exchange, Request
from fairtrial.errors import StepFailed
from fairtrial.identity import MARK
from fairtrial.switch import bundle

HOST = "here"
LIMIT_S = 30
BYTES = bytes(range(256)) * 4096
NAP = ("/bin/sleep", "60")
PRINTF = ("/usr/bin/printf", "%s\\n")


class Bench(Protocol):
    """One backend, with one host on which ``folder`` is there and empty, and what a case does to that host."""

    backend: Backend
    folder: str

    def names(self, folder: str) -> list[str]:
        """What lies in a folder of the host."""
        ...

    def terminate(self, argv: Sequence[str]) -> None:
        """Send SIGTERM to the one process that runs with these words."""
        ...

    def serving(self, *, silent: bool = False) -> AbstractContextManager[int]:
        """A port on which a server answers every request with ``ok``; or takes it, and says nothing."""
        ...


class LocalBench:
    """This machine."""

    def __init__(self, folder: Path) -> None:
        program = folder / "host.pyz"
        program.write_bytes(bundle())
        (folder / "empty").mkdir()
        self.folder = str(folder / "empty")
        self.backend = Local(program)

    def names(self, folder: str) -> list[str]:
        return sorted(os.listdir(folder))

    def terminate(self, argv: Sequence[str]) -> None:
        [pid] = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit() and child(one, argv)]
        os.kill(pid, signal.SIGTERM)

    @contextmanager
    def serving(self, *, silent: bool = False) -> Iterator[int]:
        if silent:
            # the kernel takes the connection, and nobody ever does
            with socket.create_server(("127.0.0.1", 0)) as listener:
                yield listener.getsockname()[1]
            return
        with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,)).start()
            yield server.server_address[1]
            server.shutdown()


class SimulatedBench:
    """A simulated host; a case on it runs in a fiber of its clock."""

    def __init__(self) -> None:
        self.clock, self.folder = Clock(), "/var/tmp/bench"
        self.host = Host("simulated-machine", self.clock)
        self.host.programs = Programs(lambda host, process: None)
        self.host.commands |= PLAIN
        for path, mode in ((self.folder, 0o040755), ("/run", 0o040755), ("/run/host.pyz", 0o100755)):
            self.host.make(path, mode)
        self.backend = Simulated({HOST: self.host}, self.clock, route=lambda base: HOST)

    def names(self, folder: str) -> list[str]:
        return self.host.names(folder)

    def terminate(self, argv: Sequence[str]) -> None:
        [process] = [one for one in self.host.processes.values() if one.argv == tuple(argv)]
        self.host.signal(process, signal.SIGTERM)

    @contextmanager
    def serving(self, *, silent: bool = False) -> Iterator[int]:
        def serve(connection: Connection) -> Iterator[tuple[float, bytes]]:
            yield (3600.0 if silent else 0.0), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

        server = self.host.spawn(("server",), {}, "/")
        server.ports[8000] = serve
        yield 8000
        self.host.exit(server, 0)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def child(process: Path, argv: Sequence[str]) -> bool:
    """Whether an entry of /proc is a child of this test with these words."""
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        words = (process / "cmdline").read_bytes().split(b"\0")[:-1]
    except OSError:
        return False
    return int(fields[1]) == os.getpid() and words == [os.fsencode(word) for word in argv]


Case = Callable[[Bench], None]


@pytest.fixture(params=["local", "simulated"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Case], None]:
    """Play a case on a backend, in the way that its waiting needs."""
    if request.param == "local":
        return lambda case: case(LocalBench(tmp_path))
    bench = SimulatedBench()
    return lambda case: bench.clock.drive(lambda: case(bench))


def everywhere(case: Case) -> Callable[[Callable[[Case], None]], None]:
    """Make a case a test of every backend."""

    def test(play: Callable[[Case], None]) -> None:
        play(case)

    test.__name__, test.__doc__ = case.__name__, case.__doc__
    return test


@pytest.fixture
def local(tmp_path: Path) -> Backend:
    """This machine, for what no other can show."""
    return LocalBench(tmp_path).backend


def until(backend: Backend, holds: Callable[[], object], what: str) -> None:
    deadline = backend.monotonic_ns() + LIMIT_S * 10**9
    while not holds():
        assert backend.monotonic_ns() < deadline, f"not within {LIMIT_S} s: {what}"
        backend.sleep(0.01)


def ended(backend: Backend, pending: Pending) -> Reply:
    """Wait for a command as the runner does, tick by tick."""
    found: list[Reply] = []

    def poll() -> bool:
        reply = pending.poll(0.05)
        found.extend([reply] if reply is not None else [])
        return bool(found)

    until(backend, poll, "the end of the command")
    return found[0]


def run(backend: Backend, *argv: str, stdin: bytes = b"", mark: str | None = None) -> Reply:
    return ended(backend, backend.command(HOST, argv, stdin=stdin, mark=mark))


# ---- commands ---------------------------------------------------------------------------------------------------


@everywhere
def test_a_command_gives_its_exit_status_and_both_outputs_apart(bench: Bench) -> None:
    assert run(bench.backend, "/bin/true") == Reply(exit=0, stdout=b"", stderr=b"")
    assert run(bench.backend, "/bin/false") == Reply(exit=1, stdout=b"", stderr=b"")
    bench.backend.put(HOST, f"{bench.folder}/file", b"out\n")
    reply = run(bench.backend, "/bin/cat", f"{bench.folder}/file", "/none/such")
    assert (reply.exit, reply.stdout) == (1, b"out\n")
    assert b"/none/such" in reply.stderr


@everywhere
def test_words_arrive_as_they_are_whatever_they_hold(bench: Bench) -> None:
    words = ["", "a b", " x ", "'", '"', "$HOME", "`id`", "*", "\\", "a\nb", "--x", "é", ";", "#", "%s"]
    assert run(bench.backend, *PRINTF, *words).stdout == "".join(f"{word}\n" for word in words).encode()


@everywhere
def test_standard_input_arrives_whole_and_ends(bench: Bench) -> None:
    assert run(bench.backend, "/bin/cat", stdin=BYTES) == Reply(exit=0, stdout=BYTES, stderr=b"")
    assert run(bench.backend, "/bin/cat") == Reply(exit=0, stdout=b"", stderr=b"")


@everywhere
def test_a_command_that_reads_no_input_ends_all_the_same(bench: Bench) -> None:
    assert run(bench.backend, "/bin/true", stdin=BYTES).exit == 0


@everywhere
def test_a_program_that_is_not_there_names_host_and_program(bench: Bench) -> None:
    with pytest.raises(StepFailed, match=r"here: /none/such does not start: No such file"):
        bench.backend.command(HOST, ["/none/such"], stdin=b"", mark=None)
    with pytest.raises(StepFailed, match=r"here: /none/such does not start: No such file"):
        bench.backend.channel(HOST, ["/none/such"])


@everywhere
def test_a_poll_waits_no_longer_than_it_may_and_no_shorter(bench: Bench) -> None:
    pending = bench.backend.command(HOST, NAP, stdin=b"", mark=None)
    before = bench.backend.monotonic_ns()
    assert pending.poll(0.05) is None
    assert 0.05e9 <= bench.backend.monotonic_ns() - before < LIMIT_S * 1e9
    assert pending.poll(0) is None
    bench.terminate(NAP)
    assert ended(bench.backend, pending).exit is not None


@everywhere
def test_a_poll_ends_with_its_command(bench: Bench) -> None:
    pending = bench.backend.command(HOST, ["/bin/sleep", "0.1"], stdin=b"", mark=None)
    before = bench.backend.monotonic_ns()
    assert pending.poll(2 * LIMIT_S) == Reply(exit=0, stdout=b"", stderr=b"")
    assert bench.backend.monotonic_ns() - before < LIMIT_S * 1e9


@everywhere
def test_a_command_that_a_signal_ended_has_not_ended_well(bench: Bench) -> None:
    pending = bench.backend.command(HOST, NAP, stdin=b"", mark=None)
    assert pending.poll(0) is None
    bench.terminate(NAP)
    assert ended(bench.backend, pending).exit not in (None, 0)


@everywhere
def test_an_abandoned_command_is_indeterminate_and_runs_on(bench: Bench) -> None:
    pending = bench.backend.command(HOST, NAP, stdin=b"", mark=None)
    pending.poll(0)
    assert pending.abandon() == Reply(exit=None, stdout=b"", stderr=b"")
    bench.terminate(NAP)


@everywhere
def test_only_a_command_with_a_mark_carries_it(bench: Bench) -> None:
    assert f"{MARK}=w-1" in run(bench.backend, "/usr/bin/env", mark="w-1").stdout.decode().splitlines()
    assert MARK.encode() not in run(bench.backend, "/usr/bin/env").stdout


@everywhere
def test_nothing_of_our_own_environment_reaches_a_host(bench: Bench) -> None:
    with pytest.MonkeyPatch.context() as ours:
        ours.setenv("A_SECRET_TOKEN", "x")
        ours.setenv(MARK, "another window")
        shown = run(bench.backend, "/usr/bin/env").stdout.decode()
    names = {line.partition("=")[0] for line in shown.splitlines()}
    assert "PATH" in names
    assert not names & {"A_SECRET_TOKEN", MARK}


@everywhere
def test_the_host_program_is_called_as_the_plan_says(bench: Bench) -> None:
    words = bench.backend.program(HOST)
    assert words[1:3] == ("-S", "-E")
    assert words[-1].endswith("host.pyz")
    assert bench.backend.program(HOST, "/s/host.pyz") == (*words[:-1], "/s/host.pyz")
    reply = run(bench.backend, *words, "look", "--state", f"{bench.folder}/none", "--window", "w", stdin=b"{}\n")
    assert (reply.exit, json.loads(reply.stdout)["state"]["exists"]) == (0, False)
    assert run(bench.backend, *words, "dance").exit == 2


# ---- channels ---------------------------------------------------------------------------------------------------


def heard(bench: Bench, channel: Channel, count: int) -> list[str]:
    found: list[str] = []
    until(bench.backend, lambda: (found.extend(channel.lines()), len(found) >= count)[1], f"{count} lines")
    return found


@everywhere
def test_a_channel_carries_lines_both_ways_in_order(bench: Bench) -> None:
    channel = bench.backend.channel(HOST, ["/bin/cat"])
    assert channel.lines() == []
    lines = [f"line {number} é" for number in range(100)]
    assert all(channel.send(line) for line in lines)
    assert heard(bench, channel, 100) == lines
    assert channel.lines() == []
    assert channel.send("one more")
    assert heard(bench, channel, 1) == ["one more"]
    assert not channel.ended()
    channel.close()
    assert channel.ended()


@everywhere
def test_lines_said_before_the_end_are_not_lost(bench: Bench) -> None:
    channel = bench.backend.channel(HOST, ["/usr/bin/printf", "%s", "a\nb\nno end"])
    until(bench.backend, channel.ended, "the end")
    assert heard(bench, channel, 3) == ["a", "b", "no end"]
    assert channel.lines() == []
    channel.close()


@everywhere
def test_sending_to_a_program_that_is_gone_is_false_and_never_raises(bench: Bench) -> None:
    channel = bench.backend.channel(HOST, ["/bin/true"])
    until(bench.backend, channel.ended, "the end")
    assert not channel.send("x" * 100_000)
    assert not channel.send("y")
    channel.close()
    assert not channel.send("z")


@everywhere
def test_closing_ends_the_input_and_so_the_program(bench: Bench) -> None:
    channel = bench.backend.channel(HOST, ["/bin/cat"])
    assert channel.send("the last line")
    before = bench.backend.monotonic_ns()
    channel.close()
    # at once: it was not ended by force
    assert bench.backend.monotonic_ns() - before < 1.5e9
    assert channel.ended()
    assert channel.lines() == ["the last line"]
    channel.close()
    assert not channel.send("y")


@everywhere
def test_a_program_that_does_not_end_at_the_end_of_its_input_is_ended(bench: Bench) -> None:
    channel = bench.backend.channel(HOST, ["/bin/sleep", "600"])
    before = bench.backend.monotonic_ns()
    channel.close()
    assert channel.ended()
    assert bench.backend.monotonic_ns() - before < LIMIT_S * 1e9


@everywhere
def test_a_channel_carries_no_mark(bench: Bench) -> None:
    with pytest.MonkeyPatch.context() as ours:
        ours.setenv(MARK, "w")
        channel = bench.backend.channel(HOST, ["/usr/bin/env"])
    until(bench.backend, channel.ended, "the end")
    channel.close()
    names = {line.partition("=")[0] for line in channel.lines()}
    assert "PATH" in names
    assert MARK not in names


# ---- files ------------------------------------------------------------------------------------------------------


@everywhere
def test_a_file_reads_back_as_it_was_put_and_only_its_own_name_is_left(bench: Bench) -> None:
    path = f"{bench.folder}/a/b/file"
    for content in (BYTES, b"", b"new"):
        bench.backend.put(HOST, path, content)
        assert bench.backend.get(HOST, path) == content
    assert bench.names(f"{bench.folder}/a/b") == ["file"]


@everywhere
def test_a_file_that_is_not_there_is_none(bench: Bench) -> None:
    assert bench.backend.get(HOST, f"{bench.folder}/absent") is None
    assert bench.backend.get(HOST, f"{bench.folder}/no/folder/absent") is None


@everywhere
def test_what_cannot_be_written_or_read_names_host_and_path(bench: Bench) -> None:
    folder, file = bench.folder, f"{bench.folder}/file"
    bench.backend.put(HOST, file, b"x")
    with pytest.raises(StepFailed, match=rf"here: cannot write {file}/below: "):
        bench.backend.put(HOST, f"{file}/below", b"x")
    with pytest.raises(StepFailed, match=rf"here: cannot write {file}/below/deeper: "):
        bench.backend.put(HOST, f"{file}/below/deeper", b"x")
    with pytest.raises(StepFailed, match=rf"here: cannot write {folder}: Is a directory"):
        bench.backend.put(HOST, folder, b"x")
    with pytest.raises(StepFailed, match=rf"here: cannot read {folder}: Is a directory"):
        bench.backend.get(HOST, folder)
    with pytest.raises(StepFailed, match=rf"here: cannot read {file}/below: Not a directory"):
        bench.backend.get(HOST, f"{file}/below")
    assert bench.backend.get(HOST, file) == b"x"
    assert bench.names(folder) == ["file"]


# ---- requests and clocks ----------------------------------------------------------------------------------------


def asked(bench: Bench, port: int, limit_s: float = LIMIT_S) -> Request:
    base = Endpoint(host="127.0.0.1", port=port)
    return bench.backend.request(Call(base=base, path="/health", method="GET", limit_s=limit_s))


def answered(bench: Bench, request: Request) -> Exchange:
    found: list[Exchange | None] = []
    until(bench.backend, lambda: (found.append(request.poll(0.05)), found[-1])[1], "the end of the request")
    assert found[-1] is not None
    return found[-1]


@everywhere
def test_a_request_runs_by_itself_and_gives_its_exchange(bench: Bench) -> None:
    with bench.serving() as port:
        request = asked(bench, port)
        found = answered(bench, request)
    assert (found.status, found.body, found.fault) == (200, b"ok", None)
    assert found.started_ns is not None
    assert found.started_ns <= found.end_ns <= bench.backend.monotonic_ns()


@everywhere
def test_a_request_under_way_is_not_done_and_knows_its_own_port(bench: Bench) -> None:
    with bench.serving(silent=True) as port:
        request = asked(bench, port)
        assert request.poll(0) is None
        until(bench.backend, lambda: request.local_port, "the port")
        assert request.local_port != port
        before = bench.backend.monotonic_ns()
        assert request.poll(0.05) is None
        assert bench.backend.monotonic_ns() - before >= 0.05e9
        request.close()
        answered(bench, request)


@everywhere
def test_closing_a_request_ends_it_with_the_fault_closed(bench: Bench) -> None:
    with bench.serving(silent=True) as port:
        request = asked(bench, port)
        until(bench.backend, lambda: request.local_port, "the connection")
        before = bench.backend.monotonic_ns()
        request.close()
        found = answered(bench, request)
    assert (found.status, found.fault) == (None, "closed")
    assert found.end_ns - before < LIMIT_S * 1e9 / 2


@everywhere
def test_a_request_that_was_closed_before_it_ran_ends_with_the_fault_closed(bench: Bench) -> None:
    with bench.serving(silent=True) as port:
        request = asked(bench, port)
        before = bench.backend.monotonic_ns()
        request.close()
        assert answered(bench, request).fault == "closed"
        assert bench.backend.monotonic_ns() - before < LIMIT_S * 1e9 / 2


@everywhere
def test_a_request_that_nobody_takes_ends_with_a_fault(bench: Bench) -> None:
    with bench.serving() as port:
        pass
    found = answered(bench, asked(bench, port))
    assert (found.status, found.fault) == (None, "no connection: Connection refused")


@everywhere
def test_a_request_that_nobody_answers_ends_at_its_limit(bench: Bench) -> None:
    with bench.serving(silent=True) as port:
        found = answered(bench, asked(bench, port, 0.1))
    assert (found.status, found.fault) == (None, "no whole answer within 0.1 s")


@everywhere
def test_a_request_whose_server_ends_ends_with_a_fault(bench: Bench) -> None:
    with bench.serving(silent=True) as port:
        request = asked(bench, port)
        until(bench.backend, lambda: request.local_port, "the connection")
        assert request.poll(0.05) is None
    found = answered(bench, request)
    assert found.status is None
    assert found.fault


@everywhere
def test_the_clocks_never_go_back_and_move_while_time_passes(bench: Bench) -> None:
    backend = bench.backend
    times = [backend.monotonic_ns() for _ in range(10_000)]
    assert times == sorted(times)
    utc = backend.utc()
    backend.sleep(0.01)
    assert backend.monotonic_ns() - times[-1] >= 10_000_000
    assert backend.utc() - utc >= 0.0099


# ---- of ``local`` alone -----------------------------------------------------------------------------------------

PYTHON = (sys.executable, "-S", "-E", "-c")


def test_the_exit_status_is_the_programs_own(local: Backend) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(int(sys.argv[1]))"
    for status in (0, 1, 75, 255):
        assert run(local, *PYTHON, code, str(status)) == Reply(exit=status, stdout=b"out\n", stderr=b"err\n")


def test_output_that_is_no_utf_8_is_kept(local: Backend) -> None:
    code = r"import sys; sys.stdout.buffer.write(b'\xff\x00\n'); sys.stderr.buffer.write(b'\xfe\n')"
    assert run(local, *PYTHON, code) == Reply(exit=0, stdout=b"\xff\x00\n", stderr=b"\xfe\n")


def test_much_output_does_not_block(local: Backend) -> None:
    reply = run(local, *PYTHON, "import sys; sys.stdout.write('x' * (1 << 21)); sys.stderr.write('y' * (1 << 21))")
    assert (len(reply.stdout), len(reply.stderr)) == (1 << 21, 1 << 21)


def test_an_abandoned_command_goes_on_whatever_it_says(local: Backend, tmp_path: Path) -> None:
    started, go, done = (tmp_path / name for name in ("started", "go", "done"))
    code = (
        "import pathlib, sys, time\n"
        "started, go, done = map(pathlib.Path, sys.argv[1:])\n"
        "started.touch()\n"
        "while not go.exists(): time.sleep(0.01)\n"
        "print('x' * 1000000, flush=True)\n"
        "done.touch()\n"
    )
    pending = local.command(HOST, [*PYTHON, code, *map(str, (started, go, done))], stdin=b"", mark=None)
    pending.poll(0)
    until(local, started.exists, "the start of the command")
    assert pending.abandon() == Reply(exit=None, stdout=b"", stderr=b"")
    del pending
    gc.collect()
    go.touch()
    until(local, done.exists, "the end of a command that says much")


def test_a_signal_to_our_own_group_does_not_reach_a_command(local: Backend, tmp_path: Path) -> None:
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
    until(local, ready.exists, "the start of the program")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(LIMIT_S) == 0
    until(local, done.exists, "the program's own end")


def test_a_command_leads_a_group_of_its_own(local: Backend) -> None:
    reply = run(local, *PYTHON, "import os; print(os.getpid(), os.getpgrp(), os.getsid(0))")
    pid, group, leader = map(int, reply.stdout.split())
    assert pid == group == leader
    assert group != os.getpgrp()


def test_a_program_may_act_on_after_the_end_of_its_input(local: Backend, tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = "import pathlib, sys, time; sys.stdin.read(); time.sleep(0.1); pathlib.Path(sys.argv[1]).touch()"
    channel = local.channel(HOST, [*PYTHON, code, str(done)])
    channel.close()
    assert done.exists()


def test_the_host_program_is_run_by_this_interpreter_from_its_zip(local: Backend, tmp_path: Path) -> None:
    (tmp_path / "host.pyz").write_text("import sys; print('host program', *sys.argv[1:])")
    words = local.program(HOST)
    assert words == (sys.executable, "-S", "-E", str(tmp_path / "host.pyz"))
    assert run(local, *words, "look", "--state", "/s").stdout == b"host program look --state /s\n"


def test_a_reader_sees_the_old_file_or_the_new_and_nothing_between(local: Backend, tmp_path: Path) -> None:
    path, size = str(tmp_path / "file"), 1 << 20
    local.put(HOST, path, b"0" * size)
    seen: set[bytes] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            content = local.get(HOST, path) or b""
            seen.add(content[:1] + content[-1:] + str(len(content)).encode())

    reader = threading.Thread(target=watch)
    reader.start()
    for digit in b"123456789":
        local.put(HOST, path, bytes([digit]) * size)
    over.set()
    reader.join(LIMIT_S)
    assert seen <= {bytes([digit, digit]) + str(size).encode() for digit in b"0123456789"}


def test_a_full_disk_leaves_the_old_file(local: Backend, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    # The kernel's own answer of a full device: what is written aside goes to one.
    aside = tmp_path / f".file.{os.getpid()}"
    aside.symlink_to("/dev/full")
    with pytest.raises(StepFailed, match="No space left on device"):
        local.put(HOST, str(tmp_path / "file"), b"new")
    assert (tmp_path / "file").read_text() == "old"


def test_the_clock_of_the_day_is_this_machines(local: Backend) -> None:
    before = time.time()
    assert before <= local.utc() <= time.time()
