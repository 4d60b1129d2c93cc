"""A simulated host: processes, files, locks, ports and memory, as values that a rehearsal can look at and break."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent

from fairtrial.backends.simulated.clock import NS, Clock, Event, Fiber

GIB = 1 << 30
TICKS = 100
"""Clock ticks a second, the unit of a process's start time."""

Serve = Callable[["Connection"], Iterator[tuple[float, bytes]]]
"""What a listener does with a request: pieces of its answer, each after so many seconds."""


class Killed(BaseException):
    """The process whose fiber this is has been killed: nothing of it runs on."""


def fault(number: int, path: str | None = None) -> OSError:
    """The error of a system call."""
    return OSError(number, os.strerror(number), path)


@dataclass(slots=True)
class Inode:
    """A file, a folder or a link."""

    kind: int
    mode: int
    number: int
    changed_s: float
    content: bytearray = field(default_factory=bytearray)
    links: int = 1
    target: str = ""


@dataclass(slots=True, eq=False)
class Open:
    """An open file description: what a lock belongs to."""

    inode: Inode
    path: str
    at: int = 0
    append: bool = False


class Pipe:
    """Bytes on their way to a process; ``ended`` once the writer has closed its end."""

    def __init__(self, clock: Clock, content: bytes = b"", *, ended: bool = False) -> None:
        self.clock = clock
        self.content = bytearray(content)
        self.ended = ended
        self.moved = Event()

    def write(self, content: bytes) -> None:
        self.content += content
        self.clock.set(self.moved)

    def end(self) -> None:
        self.ended = True
        self.clock.set(self.moved)

    def ready(self, timeout_s: float | None) -> bool:
        """Wait until there is something to read, or the end."""
        if not self.content and not self.ended:
            self.moved = Event()
            self.clock.wait(self.moved, timeout_s)
        return bool(self.content) or self.ended


@dataclass(eq=False)
class Process:
    """A process of a simulated host."""

    host: Host
    pid: int
    start: int
    argv: tuple[str, ...]
    environ: dict[str, str]
    cwd: str
    exe: str
    ppid: int = 1
    pgid: int = 0
    sid: int = 0
    held_b: int = 0
    alive: bool = True
    frozen: bool = False
    exit: int | None = None
    stdin: Pipe | None = None
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    log: str | None = None
    fds: dict[int, Open] = field(default_factory=dict)
    ports: dict[int, Serve] = field(default_factory=dict)
    handlers: dict[int, Any] = field(default_factory=dict)
    fibers: list[Fiber] = field(default_factory=list)
    over: Event = field(default_factory=Event)
    on_line: Callable[[bytes], None] | None = None
    server: Any = None
    """The model server that it is, if it is one."""

    def check(self) -> None:
        """Raise ``Killed`` where the process is gone: the fiber that called has no right to do anything more."""
        if not self.alive:
            raise Killed

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.start


class Connection:
    """One TCP connection between a client (a process, or the control host) and a listener."""

    def __init__(self, host: Host, server: Process, port: int, client: Process | None, local_port: int) -> None:
        self.host, self.server, self.client = host, server, client
        self.port, self.local_port = port, local_port
        self.request = bytearray()
        self.answer = Pipe(host.clock)
        self.broken = False

    def send(self, content: bytes) -> None:
        """Take bytes of the request; a whole one is served."""
        if self.broken or not self.server.alive:
            raise fault(errno.ECONNRESET)
        self.request += content
        head, blank, rest = bytes(self.request).partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        if blank and len(rest) >= length:
            self.host.run(self.server, self._serve)

    def _serve(self) -> None:
        for pause_s, content in self.server.ports[self.port](self):
            if pause_s:
                self.host.clock.sleep(pause_s)
            if self.broken or not self.server.alive:
                break
            self.answer.write(content)
        self.close()

    def parsed(self) -> tuple[str, str, bytes]:
        """Method, path and body of the request."""
        head, _, body = bytes(self.request).partition(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
        return method, path, body

    def close(self) -> None:
        """End it, from either side."""
        if self in self.host.connections:
            self.host.connections.remove(self)
        self.answer.end()

    def reset(self) -> None:
        """Break it off: what has not arrived never will."""
        self.broken = True
        self.close()


class Host:
    """One machine."""

    def __init__(self, name: str, clock: Clock, *, memory_b: int = 128 * GIB) -> None:
        self.name, self.clock = name, clock
        self.boot_id = f"00000000-0000-4000-8000-{sum(name.encode()):012d}"
        self.memory_b = memory_b
        self.taken_b = 0
        self.swap_used_b = 0
        self.reachable = True
        self.full = False
        self.inodes: dict[str, Inode] = {}
        self.locks: dict[int, tuple[Open, Process]] = {}
        self.connections: list[Connection] = []
        self.processes: dict[int, Process] = {}
        self.programs: Any = None
        self.commands: dict[str, Callable[[Process], int]] = {}
        """Plain programs, and the site's own, by path; the host program is not among them."""
        self.happened: list[tuple[str, Any]] = []
        """What changed on this host that a rehearsal judges: starts and ends of processes, in order."""
        self._number = 0
        self._pid = 1
        self._port = 40000
        for path in ("/", "/var", "/var/tmp", "/usr", "/usr/bin", "/proc", "/dev"):
            self.make(path, stat.S_IFDIR | 0o755)
        for path in ("/usr/bin/python3", "/dev/null"):
            self.make(path, stat.S_IFREG | 0o755)
        self.spawn(("init",), {}, "/", ppid=0)

    # ---- files

    def make(self, path: str, mode: int) -> Inode:
        """Make a file or a folder. Raises what the system call would."""
        if self.full and stat.S_ISREG(mode) and path != "/dev/null":
            raise fault(errno.ENOSPC, path)
        parent = path.rpartition("/")[0] or "/"
        if path != "/" and (parent not in self.inodes or not stat.S_ISDIR(self.inodes[parent].kind)):
            raise self.absent(path)
        self._number += 1
        inode = Inode(stat.S_IFMT(mode), stat.S_IMODE(mode), self._number, self.clock.utc_s())
        self.inodes[path] = inode
        return inode

    def inode(self, path: str) -> Inode:
        """The file of a path. Raises ``FileNotFoundError``, or ``NotADirectoryError`` below a file."""
        found = self.inodes.get(path)
        if found is None:
            raise self.absent(path)
        return found

    def absent(self, path: str) -> OSError:
        """Why a path names nothing: it is not there, or a file stands where one of its folders should."""
        parent = path.rpartition("/")[0] or "/"
        while parent not in self.inodes:
            parent = parent.rpartition("/")[0] or "/"
        return fault(errno.ENOENT if stat.S_ISDIR(self.inodes[parent].kind) else errno.ENOTDIR, path)

    def names(self, folder: str) -> list[str]:
        """The names in a folder."""
        if not stat.S_ISDIR(self.inode(folder).kind):
            raise fault(errno.ENOTDIR, folder)
        prefix = folder.rstrip("/") + "/"
        return sorted(
            path[len(prefix) :]
            for path in self.inodes
            if path.startswith(prefix) and path != "/" and "/" not in path[len(prefix) :]
        )

    # ---- processes

    def spawn(
        self,
        argv: tuple[str, ...],
        environ: dict[str, str],
        cwd: str,
        *,
        ppid: int = 1,
        log: str | None = None,
        stdin: Pipe | None = None,
    ) -> Process:
        """Enter a process, the leader of a session of its own; it runs nothing by itself."""
        pid = self._pid
        self._pid += 1
        process = Process(
            host=self,
            pid=pid,
            start=1000 + self.clock.now_ns * TICKS // NS,
            argv=argv,
            environ=environ,
            cwd=cwd,
            exe="/usr/bin/python3",
            ppid=ppid,
            pgid=pid,
            sid=pid,
            log=log,
            stdin=stdin,
        )
        self.processes[pid] = process
        return process

    def run(self, process: Process, what: Callable[[], Any]) -> Fiber:
        """Begin a fiber of a process."""

        def guarded() -> None:
            try:
                what()
            except Killed:
                pass

        fiber = self.clock.spawn(guarded, process)
        process.fibers = [*(one for one in process.fibers if not one.dead), fiber]
        return fiber

    def exit(self, process: Process, status: int) -> None:
        """A process has ended: its files, locks, ports and connections end with it, and its children are init's."""
        if not process.alive:
            return
        process.alive, process.exit = False, status
        if "server" in process.argv:
            self.happened.append(("exit", process.pid))
        del self.processes[process.pid]
        for fd in list(process.fds):
            self.close(process, fd)
        for connection in list(self.connections):
            if process in (connection.server, connection.client):
                connection.reset()
        for child in self.processes.values():
            if child.ppid == process.pid:
                child.ppid = 1
        self.clock.set(process.over)
        for fiber in process.fibers:
            if fiber is not getcurrent():
                self.clock.end(fiber, Killed())

    def signal(self, process: Process, number: int) -> None:
        """Deliver a signal: a handler is called, an ignored one does nothing, any other ends the process."""
        if not process.alive:
            return
        handler = process.handlers.get(number, signal.SIG_DFL)
        if number in (signal.SIGKILL,) or (
            handler == signal.SIG_DFL and number not in (signal.SIGCONT, signal.SIGCHLD)
        ):
            self.exit(process, -number)
        elif callable(handler):
            handler(number, None)

    def close(self, process: Process, fd: int) -> None:
        """Close a descriptor; its lock is free then."""
        file = process.fds.pop(fd, None)
        if file is None:
            raise fault(errno.EBADF)
        held = self.locks.get(file.inode.number)
        if held is not None and held[0] is file:
            del self.locks[file.inode.number]

    # ---- ports

    def listener(self, port: int) -> Process | None:
        """The process that listens on a port."""
        return next((one for _, one in sorted(self.processes.items()) if port in one.ports), None)

    def connect(self, port: int, client: Process | None) -> Connection:
        """Connect to a port of this host. Raises ``ConnectionRefusedError``."""
        server = self.listener(port)
        if server is None:
            raise fault(errno.ECONNREFUSED)
        self._port += 1
        connection = Connection(self, server, port, client, self._port)
        self.connections.append(connection)
        return connection

    @property
    def available_b(self) -> int:
        """MemAvailable."""
        return max(0, self.memory_b - 8 * GIB - self.taken_b - sum(one.held_b for one in self.processes.values()))
