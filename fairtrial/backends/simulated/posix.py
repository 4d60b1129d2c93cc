"""What a program on a simulated host finds where it imports ``os``, ``time``, ``fcntl``, ``signal`` and the like.

Each name does what the real one does, as far as the host program uses it, on the host and for the process whose fiber
runs; ``tests/test_simulated_posix.py`` holds them against the real ones.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import signal
import stat
import time
from types import SimpleNamespace
from typing import Any

from fairtrial.backends.simulated import files, proc
from fairtrial.backends.simulated.clock import NS
from fairtrial.backends.simulated.files import absolute, opened
from fairtrial.backends.simulated.kernel import Connection, Inode, Killed, Open, fault
from fairtrial.backends.simulated.proc import process

KEPT: tuple[str, ...] = (
    "O_APPEND",
    "O_CREAT",
    "O_DIRECTORY",
    "O_EXCL",
    "O_NOCTTY",
    "O_NOFOLLOW",
    "O_RDONLY",
    "O_RDWR",
    "O_TRUNC",
)
KEPT += ("O_WRONLY", "PRIO_PROCESS", "WNOHANG", "W_OK", "X_OK", "defpath", "devnull", "fsdecode", "pathsep")


def waitpid(pid: int, flags: int) -> tuple[int, int]:
    raise ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))


def pidfd_open(pid: int) -> int:
    me = process()
    if pid not in me.host.processes:
        raise fault(errno.ESRCH)
    fd = next(number for number in range(3, 1 << 16) if number not in me.fds)
    me.fds[fd] = Open(Inode(0, 0, pid, 0.0), f"pidfd:{pid}")
    return fd


def pidfd_send_signal(fd: int, number: int) -> None:
    me = process()
    target = me.host.processes.get(opened(fd).inode.number)
    if target is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    me.host.signal(target, number)
    me.check()


def flock(fd: int, operation: int) -> None:
    me, file = process(), opened(fd)
    held = me.host.locks.get(file.inode.number)
    if operation & fcntl.LOCK_UN:
        if held is not None and held[0] is file:
            del me.host.locks[file.inode.number]
        return
    if held is not None and held[0] is not file:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    me.host.locks[file.inode.number] = (file, me)


def builtin_open(path: str, mode: str = "r", **how: Any) -> Any:
    """``open`` for reading."""
    if path.startswith("/proc/"):
        content = proc.content(path)
    else:
        inode = process().host.inode(absolute(path))
        if stat.S_ISDIR(inode.kind):
            raise fault(errno.EISDIR, path)
        content = bytes(inode.content)
    return io.BytesIO(content) if "b" in mode else io.StringIO(content.decode("utf-8", "replace"))


def select(
    readers: list[Any], writers: list[Any], errors: list[Any], timeout_s: float
) -> tuple[list[Any], list[Any], list[Any]]:
    me = process()
    source = me.stdin if readers[0] == 0 else readers[0].connection.answer
    assert source is not None
    ready = source.ready(max(timeout_s, 0))
    me.check()
    return (readers if ready else []), [], []


def sleep(seconds: float) -> None:
    me = process()
    me.host.clock.sleep(seconds)
    me.check()


class Socket:
    """The client's end of a connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def sendall(self, content: bytes) -> None:
        self.connection.send(content)

    def setblocking(self, blocking: bool) -> None:
        """It is asked for whenever it is read."""

    def recv(self, size: int) -> bytes:
        if self.connection.broken:
            raise fault(errno.ECONNRESET)
        answer = self.connection.answer
        content = bytes(answer.content[:size])
        del answer.content[:size]
        return content


def create_connection(address: tuple[str, int], timeout: float) -> Socket:
    me = process()
    return Socket(me.host.connect(address[1], me))


def readline() -> bytes:
    """One line of standard input; empty at its end."""
    me = process()
    pipe = me.stdin
    assert pipe is not None
    while b"\n" not in pipe.content and not pipe.ended:
        held = len(pipe.content)
        pipe.moved = type(pipe.moved)()
        me.host.clock.wait(pipe.moved, None)
        me.check()
        assert pipe.ended or len(pipe.content) > held
    line, newline, rest = bytes(pipe.content).partition(b"\n")
    pipe.content[:] = rest
    return line + newline


def set_handler(number: int, handler: Any) -> None:
    process().handlers[int(number)] = handler


def _clock() -> Any:
    return process().host.clock


MODULES: dict[str, Any] = {
    "os": SimpleNamespace(
        **{name: getattr(os, name) for name in KEPT},
        path=files.Path,
        environ={"PATH": os.defpath},
        getpid=lambda: process().pid,
        geteuid=lambda: 0,
        uname=lambda: SimpleNamespace(nodename=process().host.name, release="simulated"),
        sysconf=lambda name: 4096,
        getpriority=lambda which, pid: 0,
        sched_getaffinity=lambda pid: {0, 1},
        dup2=lambda source, target: None,
        listdir=files.listdir,
        readlink=files.readlink,
        stat=files.os_stat,
        lstat=files.os_stat,
        fstat=lambda fd: files.stat_of(opened(fd).inode),
        open=files.os_open,
        close=files.close,
        read=files.read,
        write=files.write,
        pwrite=files.pwrite,
        fsync=files.fsync,
        fchmod=files.fchmod,
        chmod=files.chmod,
        rename=files.rename,
        link=files.link,
        unlink=files.unlink,
        mkdir=files.mkdir,
        makedirs=files.makedirs,
        access=files.access,
        waitpid=waitpid,
        pidfd_open=pidfd_open,
    ),
    "time": SimpleNamespace(
        CLOCK_BOOTTIME=time.CLOCK_BOOTTIME,
        monotonic=lambda: 1000 + _clock().now_ns / NS,
        clock_gettime_ns=lambda which: 1000 * NS + _clock().now_ns,
        time=lambda: _clock().utc_s(),
        gmtime=lambda: time.gmtime(_clock().utc_s()),
        strftime=lambda form, moment=None: time.strftime(form, moment or time.gmtime(_clock().utc_s())),
        sleep=sleep,
    ),
    "fcntl": SimpleNamespace(LOCK_EX=fcntl.LOCK_EX, LOCK_NB=fcntl.LOCK_NB, flock=flock),
    "signal": SimpleNamespace(
        **{name: getattr(signal, name) for name in dir(signal) if name.startswith("SIG") and name.isupper()},
        signal=set_handler,
        pidfd_send_signal=pidfd_send_signal,
    ),
    "select": SimpleNamespace(select=select),
    "socket": SimpleNamespace(create_connection=create_connection),
    "resource": SimpleNamespace(RLIMIT_CORE=4, RLIMIT_NOFILE=7, prlimit=lambda pid, number: (-1, -1)),
    "sys": SimpleNamespace(
        argv=[],
        executable="/usr/bin/python3",
        version="3.11 (simulated)",
        stdin=SimpleNamespace(buffer=SimpleNamespace(readline=readline)),
    ),
}
"""Module name -> what stands for it."""

__all__ = ["MODULES", "Killed", "builtin_open", "process"]
