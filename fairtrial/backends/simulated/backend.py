"""The simulated hosts behind the seam."""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from fairtrial.backends.base import Reply
from fairtrial.backends.simulated.clock import NS, Clock, Event, Fiber
from fairtrial.backends.simulated.kernel import Connection, Host, Killed, Pipe, Process
from fairtrial.backends.simulated.program import programs
from fairtrial.client.request import Call, Endpoint, Exchange, Request, Stopped
from fairtrial.errors import StepFailed
from fairtrial.identity import MARK

COMMAND_S = 0.02
"""What starting a program on a host takes, virtual seconds."""
PROGRAM = "/run/host.pyz"


class SimulatedPending:
    """A process under way."""

    def __init__(self, process: Process, clock: Clock) -> None:
        self.process, self.clock = process, clock

    def poll(self, timeout_s: float) -> Reply | None:
        if not self.clock.wait(self.process.over, timeout_s):
            return None
        one = self.process
        return Reply(exit=one.exit, stdout=bytes(one.stdout), stderr=bytes(one.stderr))

    def abandon(self) -> Reply:
        return Reply(exit=None, stdout=b"", stderr=b"")


class SimulatedChannel:
    """A process whose lines are kept until they are asked for."""

    def __init__(self, process: Process, clock: Clock) -> None:
        self.process, self.clock = process, clock
        self._rest = b""
        self._lines: list[str] = []
        process.on_line = self._take

    def _take(self, content: bytes) -> None:
        *lines, self._rest = (self._rest + content).split(b"\n")
        self._lines += [line.decode(errors="replace") for line in lines]

    def send(self, line: str) -> bool:
        stdin = self.process.stdin
        if not self.process.alive or stdin is None or stdin.ended:
            return False
        stdin.write(line.encode() + b"\n")
        return True

    def lines(self) -> list[str]:
        if self._rest and self.ended():
            self._take(b"\n")
        found, self._lines = self._lines, []
        return found

    def ended(self) -> bool:
        return not self.process.alive

    def hang_up(self) -> None:
        """Close its input, and wait for nothing: whoever had it open is gone."""
        if self.process.stdin is not None:
            self.process.stdin.end()

    def close(self) -> None:
        self.hang_up()
        if not self.clock.wait(self.process.over, 2):
            self.process.host.exit(self.process, -9)


class SimulatedRequest(Request):
    """The timed request itself, on a simulated connection, stamped by the virtual clock."""

    def __init__(self, call: Call, host: Host | None, clock: Clock) -> None:
        super().__init__(call, SimpleNamespace(monotonic=lambda: clock.now_ns / NS, monotonic_ns=lambda: clock.now_ns))
        self.host, self.clock = host, clock
        self.hangs = self.refused = self.cut = False
        self._over, self._shut = Event(), Event()
        self._connection: Connection | None = None
        self._fiber: Fiber | None = None

    def start(self) -> None:
        self._fiber = self.clock.spawn(self.run)

    def run(self) -> Exchange:
        exchange = super().run()
        self.clock.set(self._over)
        return exchange

    def poll(self, timeout_s: float) -> Exchange | None:
        self.clock.wait(self._over, timeout_s)
        return self._exchange

    def close(self) -> None:
        self._closed = True
        self.clock.set(self._shut)
        self.close_from_afar()

    def close_from_afar(self) -> None:
        """The connection breaks."""
        if self._connection is not None:
            self._connection.reset()

    def end(self) -> None:
        """Whoever asked is gone: so is its end of the connection."""
        self.close_from_afar()
        if self._fiber is not None:
            self.clock.end(self._fiber, Killed())

    def _connected(self, sock: object, address: object) -> str | None:
        raise AssertionError("a simulated request has no socket")

    def _connect(self, seen: Any) -> None:
        if self._closed:
            raise Stopped("closed")
        if self.host is None or not self.host.reachable:
            self.clock.wait(self._shut, self._left_s(5))
            raise Stopped("no connection: no answer from the host")
        assert self.host is not None
        if self.hangs:
            self.clock.wait(self._shut, self._left_s())
            raise Stopped(f"no whole answer within {self.call.limit_s:g} s")
        try:
            if self.refused:
                raise OSError(errno.ECONNREFUSED, "Connection refused")
            self._connection = self.host.connect(self.call.base.port, None)
        except OSError as error:
            raise Stopped(f"no connection: {error.strerror}") from None
        self.local_port = self._connection.local_port
        seen.connect_ns = 0
        self._sock = _Socket(self, self._connection)


class _Socket:
    """What the request does with its socket, on a simulated connection."""

    def __init__(self, request: SimulatedRequest, connection: Connection) -> None:
        self.request, self.connection = request, connection
        self.limit_s: float | None = None

    def settimeout(self, limit_s: float) -> None:
        self.limit_s = limit_s

    def sendall(self, content: bytes) -> None:
        self.connection.send(content)

    def recv(self, size: int) -> bytes:
        answer = self.connection.answer
        if not answer.ready(self.limit_s):
            raise TimeoutError
        if self.connection.broken:
            raise OSError(errno.ECONNRESET, "reset")
        if self.request.cut:
            # half of what has come, and then nothing more
            self.connection.reset()
            size = len(answer.content) // 2
        content = bytes(answer.content[:size])
        del answer.content[:size]
        return content

    def close(self) -> None:
        self.connection.close()

    def shutdown(self, how: int) -> None:
        self.connection.reset()


class Simulated:
    """A world of simulated hosts. ``route`` names the host that an endpoint of the experiment lies on."""

    tick_s = 0.25

    def __init__(
        self, hosts: Mapping[str, Host], clock: Clock, *, route: Callable[[Endpoint], str], lease_s: float = 0
    ) -> None:
        self.hosts, self.clock, self.lease_s = hosts, clock, lease_s
        self._route = route

    def utc(self) -> float:
        return self.clock.utc_s()

    def monotonic_ns(self) -> int:
        return self.clock.now_ns

    def sleep(self, seconds: float) -> None:
        self.clock.sleep(seconds)

    def program(self, host: str, installed: str | None = None) -> tuple[str, ...]:
        return ("/usr/bin/python3", "-S", "-E", installed or PROGRAM)

    def command(self, host: str, argv: Sequence[str], *, stdin: bytes, mark: str | None) -> SimulatedPending:
        process = self._enter(host, argv, Pipe(self.clock, stdin, ended=True), mark)
        return SimulatedPending(process, self.clock)

    def channel(self, host: str, argv: Sequence[str]) -> SimulatedChannel:
        process = self._enter(host, argv, Pipe(self.clock), None)
        return SimulatedChannel(process, self.clock)

    def _enter(self, name: str, argv: Sequence[str], stdin: Pipe, mark: str | None) -> Process:
        host = self.hosts[name]
        program = argv[0]
        if program not in host.inodes and program not in host.commands:
            raise StepFailed(f"{name}: {program} does not start: No such file or directory")
        environ = {"PATH": "/usr/bin", **({MARK: mark} if mark else {})}
        process = host.spawn(tuple(argv), environ, "/", stdin=stdin)
        self.clock.sleep(COMMAND_S)
        programs(host).start(process)
        return process

    def put(self, host: str, path: str, content: bytes) -> None:
        machine = self.hosts[host]
        try:
            _folders(machine, posixpath.dirname(path))
            if path in machine.inodes and machine.inodes[path].kind == 0o040000:
                raise OSError(errno.EISDIR, "Is a directory")
            aside = machine.make(f"{posixpath.dirname(path)}/.{posixpath.basename(path)}.control", 0o100644)
            aside.content[:] = content
            del machine.inodes[f"{posixpath.dirname(path)}/.{posixpath.basename(path)}.control"]
            machine.inodes[path] = aside
        except OSError as error:
            raise StepFailed(f"{host}: cannot write {path}: {error.strerror}") from None

    def get(self, host: str, path: str) -> bytes | None:
        try:
            found = self.hosts[host].inode(path)
            if found.kind == 0o040000:
                raise OSError(errno.EISDIR, "Is a directory")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StepFailed(f"{host}: cannot read {path}: {error.strerror}") from None
        return bytes(found.content)

    def request(self, call: Call) -> SimulatedRequest:
        request = self.asked(call)
        request.start()
        return request

    def asked(self, call: Call) -> SimulatedRequest:
        """A request that has not begun."""
        return SimulatedRequest(call, self.hosts[self._route(call.base)], self.clock)


def _folders(host: Host, path: str) -> None:
    if path not in host.inodes:
        _folders(host, posixpath.dirname(path))
        host.make(path, 0o040755)
