"""A simulated host against a real one: the same calls of the host program are answered alike; and what its kernel does.

The host program runs unchanged on both. What it answers may differ in numbers and names alone: which keys there are,
what is true, false or null, every message and every exit status must be the same.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest
from test_backend_contract import HOST, Bench, LocalBench, SimulatedBench, ended, until

from fairtrial import demo
from fairtrial.backends.simulated import Clock, Host, Killed, Process
from fairtrial.backends.simulated.backend import SimulatedRequest
from fairtrial.backends.simulated.clock import Event, Stuck
from fairtrial.backends.simulated.kernel import Connection
from fairtrial.backends.simulated.posix import MODULES
from fairtrial.backends.simulated.program import Programs
from fairtrial.canonical import canonical, sha256
from fairtrial.client import Call, Endpoint
from fairtrial.errors import StepFailed
from fairtrial.rehearsal.story import Story, picture
from fairtrial.rehearsal.world import World

Json = dict[str, Any]
WINDOW = f"test-simulated-{os.getpid()}"
ENVIRON = {"PATH": "/usr/bin:/bin", "WHO": "production"}
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


# ---- the host program on both -----------------------------------------------------------------------------------


class Real:
    """This machine, with a server that waits to be production."""

    def __init__(self, folder: Path) -> None:
        self.bench: Bench = LocalBench(folder)
        self.python, self.ports = sys.executable, free_ports(3)
        self.folder = str(folder / "empty")
        (folder / "server.py").write_text(SERVER)
        self.script = str(folder / "server.py")
        with (folder / "production.log").open("ab") as log:
            self.server = subprocess.Popen(
                self.words(0), env=ENVIRON, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def words(self, at: int) -> list[str]:
        return [self.python, "-S", "-E", self.script, str(self.ports[at])]

    def widen(self, path: str) -> None:
        os.mkdir(path)
        os.chmod(path, 0o777)

    def talking(self) -> AbstractContextManager[object]:
        """While a connection to production is open, from a process of this host."""
        return socket.create_connection(("127.0.0.1", self.ports[0]))

    def end(self) -> None:
        self.server.kill()
        self.server.wait()


class Unreal:
    """The same on a simulated host."""

    def __init__(self) -> None:
        self.bench: Bench = (bench := SimulatedBench())
        self.clock, self.host = bench.clock, bench.host
        self.python, self.ports = "/usr/bin/python3", [8000, 8001, 8002]
        self.folder, self.script = bench.folder, "/var/tmp/server.py"
        self.host.programs = Programs(listen)
        self.host.make("/var/tmp/production.log", 0o100644)
        server = self.host.spawn(tuple(self.words(0)), ENVIRON, self.folder, log="/var/tmp/production.log")
        listen(self.host, server)

    words = Real.words

    def widen(self, path: str) -> None:
        self.host.make(path, 0o040777)

    def talking(self) -> AbstractContextManager[object]:
        return closing(self.host.connect(self.ports[0], self.host.spawn(("client",), {}, "/")))


def listen(host: Host, process: Process) -> None:
    """Be the server whose port is the last argument."""

    def serve(connection: Connection) -> Iterator[tuple[float, bytes]]:
        yield 0.0, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

    process.ports[int(process.argv[-1])] = serve


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [int(one.getsockname()[1]) for one in listeners]
    for one in listeners:
        one.close()
    return sorted(found)


class Asked:
    """What the host program of one side answered, by what it was asked for."""

    def __init__(self, side: Real | Unreal) -> None:
        self.side, self.backend = side, side.bench.backend
        self.state = f"{side.folder}/state"
        self.answers: dict[str, Json] = {}

    def call(self, name: str, words: list[str], stdin: bytes) -> list[Json]:
        argv = [*self.backend.program(HOST), *words]
        reply = ended(self.backend, self.backend.command(HOST, argv, stdin=stdin, mark=None))
        lines: list[Json] = [json.loads(line) for line in reply.stdout.splitlines()]
        assert name not in self.answers
        self.answers[name] = {"exit": reply.exit, "stderr": reply.stderr.decode(), "lines": lines}
        return lines

    def ask(self, name: str, mode: str, args: Json, *lines: str, term: int = 0, window: str = WINDOW) -> Json:
        words = [mode, "--state", self.state, "--window", window, "--term", str(term)]
        stdin = "".join(f"{line}\n" for line in (json.dumps(args), *lines))
        return self.call(name, words, stdin.encode())[-1]

    def play(self, name: str, *verbs: Json, term: int = 0) -> Json:
        return self.ask(name, "play", {"verbs": list(verbs)}, term=term)

    def plain(self) -> dict[str, Json]:
        """The answers without what is this side's own: its folders, its names, its numbers."""
        seen = self.answers["look: nothing"]["lines"][0]["host"]
        own = {self.side.folder: "FOLDER", self.side.python: "PYTHON", seen["hostname"]: "HOST", WINDOW: "WINDOW"}

        def text(value: str) -> str:
            for word, name in own.items():
                value = value.replace(word, name)
            return re.sub(r"[0-9]+", "N", re.sub(r"\(python[0-9.]*\)", "(PYTHON)", value))

        return {
            name: {**one, "lines": [said(line, text) for line in one["lines"]]} for name, one in self.answers.items()
        }


EXACT = ("term", "from", "state", "verb", "what", "nonce", "newest")
"""Keys whose numbers and words are no matter of the side."""


def said(value: Any, text: Any, key: str = "") -> Any:
    """An answer without its numbers; its messages and reasons stay, with the side's own words replaced."""
    if isinstance(value, dict):
        if key in ("environ", "limits"):
            return sorted({json.dumps(said(one, text)) for one in value.values()})
        if key == "ports":
            return [said(one, text) for _, one in sorted(value.items())]
        return {name: said(one, text, name) for name, one in value.items() if name != "window_marked"}
    if isinstance(value, list):
        return [said(one, text, key) for one in value] if value and isinstance(value[0], dict) else bool(value)
    if isinstance(value, str):
        return (
            text(value)
            if key in ("message", "why", "log_why", "startable", "name", *EXACT)
            else "text"
            if value
            else ""
        )
    if isinstance(value, bool) or value is None or key in EXACT:
        return value
    return "number"


def story(side: Real | Unreal) -> dict[str, Json]:
    """A window's life on one host, and what else can be asked."""
    asked = Asked(side)
    production, arm, free = side.ports
    there: list[Json] = []

    def up() -> bool:
        there[:] = asked.ask("look: nothing", "look", {"ports": side.ports})["ports"][str(production)]["listeners"]
        return bool(there) or bool(asked.answers.clear())

    until(asked.backend, up, "the server")
    host = asked.answers["look: nothing"]["lines"][0]["host"]
    server = [there[0]["pid"], there[0]["start"]]
    who = {
        "kind": "restore",
        "pid": server[0],
        "start": server[1],
        "host": host["hostname"],
        "boot_id": host["boot_id"],
    }

    known = asked.ask("inspect: pid", "inspect", {"pid": server[0]})
    asked.ask("inspect: port", "inspect", {"port": production})
    asked.ask("inspect: no pid", "inspect", {"pid": 1 << 30})
    asked.ask("inspect: no port", "inspect", {"port": free})
    asked.ask("inspect: log", "inspect", {"port": production, "log": f"{side.folder}/named.log"})
    asked.ask("inspect: log is a folder", "inspect", {"port": production, "log": side.folder})
    asked.ask("inspect: log in no folder", "inspect", {"port": production, "log": f"{side.folder}/no/named.log"})

    asked.call("usage: mode", ["dance"], b"")
    asked.call("usage: window", ["look", "--state", asked.state, "--window", "a b"], b"")
    asked.call("usage: no JSON", ["look", "--state", asked.state, "--window", WINDOW], b"{]\n")
    asked.ask("usage: no verbs", "play", {})
    asked.play("usage: verb", {"verb": "dance"})
    asked.ask("an error of our own", "look", {"ports": 7})

    asked.play("record: no folder", {"verb": "record", "state": "held"})
    record = {
        "schema": "fairtrial.hold/1",
        "window": WINDOW,
        "purpose": "a test",
        "owner": "the tests",
        "control_host": host["hostname"],
        "pid": server[0],
        "start": server[1],
        "since": "2026-11-29T12:00:00Z",
        "boot_id": "of another machine",
        "out": "/nowhere",
        "hosts": [HOST],
    }
    asked.ask("hold: usage", "hold", {"hold": {}, "lease_s": 60})
    asked.ask("hold", "hold", {"hold": record, "lease_s": 60}, "renew", "renew")
    asked.ask("hold: a line that is none", "renew", {"lease_s": 60}, "again")
    asked.ask("hold: held", "hold", {"hold": record | {"window": "other"}, "lease_s": 60}, window="other")
    asked.ask("look: held", "look", {"ports": [production]})
    with side.talking():
        asked.ask("look: talking", "look", {"ports": [production]})
    asked.play("of another window", {"verb": "record", "state": "held"})
    asked.ask("another window's verb", "play", {"verbs": [{"verb": "lease"}]}, window="other")
    asked.play("policy and record", {"verb": "policy"}, {"verb": "record", "state": "held", "detail": "why"})
    asked.play("record: usage", {"verb": "record", "state": "asleep"})

    take = {"verb": "take", "from": 0, "actor": who}
    asked.play("take: usage", take | {"actor": who | {"kind": "cat"}})
    asked.play("take: live", take)
    asked.play("take: now", take | {"now": True, "lease_s": 50})
    asked.play("take: already", take)
    asked.play("take: another's", take | {"actor": who | {"boot_id": "another"}})
    asked.play("lost: record", {"verb": "record", "state": "served"})
    asked.ask("lost: renew", "renew", {"lease_s": 60}, "renew")
    asked.ask("renew", "renew", {"lease_s": 60}, "renew", term=1)
    asked.play("lease", {"verb": "lease"}, term=1)

    proof = {"verb": "prove", "port": production, "argv": side.words(0), "cwd": side.folder, "ready": "/health"}
    proof |= {"environ_sha256": sha256(canonical(ENVIRON)), "settle_s": 0.2, "limit_s": 5}
    whole = {key: known[key] for key in ("exe", "uid", "process")}
    asked.play("prove", proof | whole, term=1)
    asked.play(
        "prove: another's limits", proof | whole | {"process": whole["process"] | {"nice": 7}, "limit_s": 0}, term=1
    )
    asked.play("prove: another's words", proof | {"argv": ["x"], "cwd": "/", "environ": {}, "limit_s": 0}, term=1)
    asked.play("prove: nothing listens", proof | {"port": free, "limit_s": 0}, term=1)
    asked.play("prove: another answer", proof | {"generation": {"path": "/", "body": {}}, "limit_s": 0}, term=1)

    restore = {"schema": "fairtrial.restore/1", "window": WINDOW, "lease_s": 50, "beat_s": 0.2, "steps": {}}
    asked.play("off switch: none", {"verb": "off", "what": "switch"}, term=1)
    asked.play("install", {"verb": "install", "restore": restore}, term=1)
    asked.play("install: already", {"verb": "ask", "nonce": "1"}, {"verb": "install", "restore": restore}, term=1)
    asked.play("arm", {"verb": "ask", "nonce": "2"}, {"verb": "arm"}, term=1)
    asked.ask("look: armed", "look", {"ports": []})
    asked.play("off hold: armed", {"verb": "off", "what": "hold"}, term=1)
    asked.ask("play: no such step", "play", {"step": "restore.end"}, term=1)
    asked.ask("read", "read", {"watch": {"ports": [production], "processes": {"one": server}, "cadence_s": 60}}, term=1)
    asked.play("off switch", {"verb": "off", "what": "switch"}, term=1)
    asked.play("off: usage", {"verb": "off", "what": "light"}, term=1)

    start = {"verb": "start", "what": "arm", "argv": side.words(1), "environ": ENVIRON, "cwd": side.folder}
    start |= {"log": f"{side.folder}/arm.log", "port": arm, "limit_s": 5}
    asked.play("start: port taken", start | {"port": production}, term=1)
    asked.play("start", start, term=1)
    until(asked.backend, lambda: listens(asked, arm), "the arm")
    asked.play("start: already", start, term=1)
    asked.ask("look: arm", "look", {"ports": [production, arm]})
    asked.play("prove: marked", proof | {"limit_s": 0}, term=1)
    end = {"verb": "end", "what": "window", "grace_s": 5, "limit_s": 10, "port": arm}
    asked.play("end: a port still heard", end | {"port": production}, term=1)
    asked.play("end: again", end, term=1)
    asked.play("end: production", end | {"what": "processes", "of": "production", "processes": [server]}, term=1)
    asked.ask("look: ended", "look", {"ports": [production, arm]})

    asked.play("released", {"verb": "record", "state": "proved"}, {"verb": "off", "what": "hold", "seal": "00"}, term=1)
    asked.play("released: already", {"verb": "off", "what": "hold"}, term=1)
    asked.play("released: take", take)
    asked.ask("look: released", "look", {"ports": [production]})

    asked.state = f"{side.folder}/wide"
    side.widen(asked.state)
    asked.ask("hold: untrusted", "hold", {"hold": record, "lease_s": 60})
    asked.ask("look: untrusted", "look", {})
    return asked.plain()


def listens(asked: Asked, port: int) -> bool:
    listening = asked.ask("listens", "look", {"ports": [port]})["ports"][str(port)]["listening"]
    del asked.answers["listens"]
    return bool(listening)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Json], dict[str, Json]]:
    """What was answered on this machine, and on a simulated one."""
    real, unreal = Real(tmp_path_factory.mktemp("host")), Unreal()
    try:
        return story(real), unreal.clock.drive(lambda: story(unreal))
    finally:
        real.end()


def differences(one: Any, other: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            found
            for key in sorted(one.keys() | other.keys())
            for found in differences(one.get(key, "no such key"), other.get(key, "no such key"), f"{where}/{key}")
        ]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            found
            for at, pair in enumerate(zip(one, other, strict=True))
            for found in differences(*pair, f"{where}/{at}")
        ]
    return [] if one == other else [(where, one, other)]


def test_every_call_is_answered_on_a_simulated_host_as_on_a_real_one(
    answers: tuple[dict[str, Json], dict[str, Json]],
) -> None:
    assert differences(*answers) == []


def test_the_calls_end_in_every_way_that_the_program_knows(answers: tuple[dict[str, Json], dict[str, Json]]) -> None:
    """Else the comparison would prove little."""
    real, _ = answers
    assert real["look: talking"]["lines"][0]["ports"][0]["peers"]
    assert {one["exit"] for one in real.values()} == {0, 1, 2, 75}
    assert {key for one in real.values() for line in one["lines"] for key in line} >= {
        *("refused", "lost", "live", "gone", "already", "untrusted", "waiting_for", "listeners", "switch", "usage"),
    }


# ---- what its kernel does ---------------------------------------------------------------------------------------

simulation, passing = MODULES["os"], MODULES["time"]


@pytest.fixture
def bench() -> SimulatedBench:
    return SimulatedBench()


def test_a_killed_process_does_nothing_more(bench: SimulatedBench) -> None:
    host, clock = bench.host, bench.clock
    victim = host.spawn(("victim",), {}, "/")
    done: list[str] = []

    def work() -> None:
        fd = simulation.open("/var/tmp/file", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            simulation.write(fd, b"one")
            passing.sleep(1)
            simulation.write(fd, b"two")
        except Exception:
            # what a program catches is not this
            done.append("caught")
        finally:
            simulation.close(fd)
            done.append("closed")
            # and what it does on its way out it does no more
            simulation.unlink("/var/tmp/file")

    def kill() -> None:
        host.run(victim, work)
        clock.sleep(0.5)
        host.exit(victim, -9)
        # at once, not when its nap is over
        assert done == ["closed"]
        clock.sleep(5)

    clock.drive(kill)
    assert bytes(host.inode("/var/tmp/file").content) == b"one"
    assert done == ["closed"]
    assert (victim.alive, victim.exit) == (False, -9)
    assert victim.pid not in host.processes


def test_a_killed_process_leaves_no_lock_no_port_no_connection_and_no_children(bench: SimulatedBench) -> None:
    host, clock = bench.host, bench.clock
    victim = host.spawn(("victim",), {}, "/")
    child = host.spawn(("child",), {}, "/", ppid=victim.pid)
    grandchild = host.spawn(("grandchild",), {}, "/", ppid=child.pid)
    other = host.spawn(("other",), {}, "/")
    victim.ports[8000] = lambda connection: iter([(60.0, b"")])
    connection = host.connect(8000, other)
    told: list[str] = []

    def lock() -> int:
        fd: int = simulation.open("/var/tmp/lock", os.O_RDWR | os.O_CREAT, 0o644)
        MODULES["fcntl"].flock(fd, MODULES["fcntl"].LOCK_EX | MODULES["fcntl"].LOCK_NB)
        return fd

    def hold() -> None:
        lock()
        passing.sleep(60)

    def attempt() -> None:
        for _ in range(2):
            try:
                lock()
                told.append("locked")
            except BlockingIOError:
                told.append("blocked")
            passing.sleep(1)

    def kill() -> None:
        host.run(victim, hold)
        host.run(other, attempt)
        clock.sleep(0.5)
        assert (child.ppid, len(host.connections)) == (victim.pid, 1)
        host.exit(victim, -9)
        clock.sleep(5)

    clock.drive(kill)
    assert told == ["blocked", "locked"]
    assert (child.ppid, grandchild.ppid) == (1, child.pid)
    assert connection.broken
    assert host.connections == []
    with pytest.raises(ConnectionRefusedError):
        host.connect(8000, other)


def test_a_host_program_that_is_killed_half_way_leaves_its_lock_free_and_its_deed_written_down(
    bench: SimulatedBench,
) -> None:
    """It is killed while it waits for what it ends: what it wrote before stays, and nothing comes after."""
    host, backend = bench.host, bench.backend
    deaf = host.spawn(("deaf",), {}, "/")
    deaf.handlers[signal.SIGTERM] = lambda number, frame: None

    def call(mode: str, args: Json, *lines: str) -> list[str]:
        stdin = "".join(f"{line}\n" for line in (json.dumps(args), *lines)).encode()
        argv = [*backend.program(HOST), mode, "--state", f"{bench.folder}/state", "--window", "w"]
        pending = backend.command(HOST, argv, stdin=stdin, mark=None)
        if mode != "play":
            return ended(backend, pending).stdout.decode().splitlines()
        bench.clock.sleep(2)
        return [str(pending.process.pid)]

    def stand() -> Json:
        found: Json = json.loads(call("look", {})[-1])["state"]
        return found

    def kill() -> tuple[Json, Json]:
        record = dict.fromkeys("schema purpose owner control_host since boot_id out hosts".split(), "x")
        record |= {"window": "w", "pid": 1, "start": 1}
        call("hold", {"hold": record, "lease_s": 60})
        end = {"verb": "end", "what": "processes", "of": "arm", "processes": [deaf.key], "grace_s": 10, "limit_s": 20}
        [pid] = call("play", {"verbs": [end]})
        before = stand()
        host.exit(host.processes[int(pid)], -9)
        bench.clock.sleep(60)
        return before, stand()

    before, after = bench.clock.drive(kill)
    assert (before["locked"], after["locked"]) == (True, False)
    assert before["start"]["ending"] == after["start"]["ending"] == [list(deaf.key)]
    assert deaf.alive


def test_a_command_whose_host_kills_it_is_over_for_who_waits(bench: SimulatedBench) -> None:
    def kill() -> int | None:
        pending = bench.backend.command(HOST, ["/bin/sleep", "60"], stdin=b"", mark=None)
        bench.clock.spawn(lambda: bench.host.exit(pending.process, -9))
        reply = pending.poll(50)
        assert reply is not None
        return reply.exit

    assert bench.clock.drive(kill) == -9
    assert bench.clock.now_ns < 10**9


def test_an_abandoned_command_runs_to_its_end(bench: SimulatedBench) -> None:
    def leave() -> None:
        pending = bench.backend.command(HOST, ["/bin/sleep", "1"], stdin=b"", mark=None)
        pending.abandon()
        assert pending.process.alive
        bench.clock.sleep(2)
        assert pending.process.exit == 0

    bench.clock.drive(leave)


def test_a_full_disk_leaves_the_old_file(bench: SimulatedBench) -> None:
    path = f"{bench.folder}/file"

    def fill() -> None:
        bench.backend.put(HOST, path, b"old")
        bench.host.full = True
        with pytest.raises(StepFailed, match="No space left on device"):
            bench.backend.put(HOST, path, b"new")
        assert bench.backend.get(HOST, path) == b"old"
        assert bench.names(bench.folder) == ["file"]

    bench.clock.drive(fill)


def asked_for(bench: SimulatedBench, port: int) -> SimulatedRequest:
    base = Endpoint(host="127.0.0.1", port=port)
    return bench.backend.request(Call(base=base, path="/health", method="GET", limit_s=100))


@pytest.mark.parametrize("fault", ["hangs", "unreachable"])
def test_a_request_that_gets_nowhere_is_closed_at_once(bench: SimulatedBench, fault: str) -> None:
    def close() -> None:
        with bench.serving() as port:
            request = asked_for(bench, port)
            request.hangs, bench.host.reachable = fault == "hangs", fault != "unreachable"
            bench.clock.sleep(1)
            request.close()
            found = request.poll(1)
            assert found is not None
            assert (found.fault, bench.clock.now_ns) == ("closed", 10**9)

    bench.clock.drive(close)


# ---- its clock --------------------------------------------------------------------------------------------------


def test_fibers_run_in_order_of_due_time_and_those_of_one_moment_in_the_order_in_which_they_waited() -> None:
    clock = Clock()
    ran: list[tuple[str, float]] = []

    def fiber(name: str, *naps: float) -> None:
        for nap_s in naps:
            clock.sleep(nap_s)
            ran.append((name, clock.now_ns / 1e9))

    def begin() -> None:
        clock.spawn(lambda: fiber("slow", 3, 0))
        clock.spawn(lambda: fiber("quick", 1, 1, 1))
        clock.spawn(lambda: fiber("other", 2))
        clock.sleep(10)

    clock.drive(begin)
    assert ran == [("quick", 1), ("other", 2), ("quick", 2), ("slow", 3), ("quick", 3), ("slow", 3)]


def test_an_event_wakes_all_who_wait_for_it_then_and_at_once() -> None:
    clock, event = Clock(), Event()
    woken: list[tuple[str, bool, float]] = []

    def wait(name: str, timeout_s: float | None) -> None:
        woken.append((name, clock.wait(event, timeout_s), clock.now_ns / 1e9))

    def begin() -> None:
        clock.spawn(lambda: wait("patient", None))
        clock.spawn(lambda: wait("limited", 5))
        clock.spawn(lambda: wait("short", 1))
        clock.spawn(lambda: wait("never", 0))
        clock.sleep(2)
        clock.set(event)
        wait("late", None)
        clock.sleep(10)

    clock.drive(begin)
    assert woken == [
        ("never", False, 0),
        ("short", False, 1),
        ("late", True, 2),
        ("patient", True, 2),
        ("limited", True, 2),
    ]


def test_who_was_woken_is_not_woken_again_by_the_limit_of_that_wait() -> None:
    clock, event = Clock(), Event()
    times: list[float] = []

    def wait() -> None:
        clock.wait(event, 1)
        clock.sleep(5)
        times.append(clock.now_ns / 1e9)

    def begin() -> None:
        clock.spawn(wait)
        clock.sleep(0.5)
        clock.set(event)
        clock.sleep(10)

    clock.drive(begin)
    assert times == [5.5]


def test_what_waits_for_ever_is_a_fault_of_the_simulation_and_so_is_an_error_that_nobody_catches() -> None:
    with pytest.raises(Stuck):
        (clock := Clock()).drive(lambda: clock.wait(Event(), None))

    def begin() -> None:
        other.spawn(lambda: [][0])
        other.sleep(1)

    other = Clock()
    with pytest.raises(IndexError):
        other.drive(begin)


def test_a_fiber_that_is_ended_never_runs_on_whether_it_waits_or_has_not_begun() -> None:
    clock = Clock()
    ran: list[str] = []

    def wait() -> None:
        clock.sleep(1)
        ran.append("waited")

    def begin() -> None:
        waiting, unborn = clock.spawn(wait), clock.spawn(lambda: ran.append("begun"))
        clock.end(unborn, Killed())
        clock.sleep(0.5)
        clock.end(waiting, Killed())
        clock.sleep(10)
        clock.end(waiting, Killed())

    clock.drive(begin)
    assert ran == []


def test_the_same_world_twice_does_the_same_byte_for_byte() -> None:
    """Every file of the evidence, and every file of the hosts, times and numbers and all."""
    worlds = []
    for _ in range(2):
        told = Story(world := World(demo.experiment(), demo.PACKAGE)).play(lambda effect: None)
        assert told.exits[0] == 0
        worlds.append((world.clock.now_ns, picture(world)))
    assert worlds[0] == worlds[1]
    assert "evidence ledger.jsonl" in worlds[0][1]
