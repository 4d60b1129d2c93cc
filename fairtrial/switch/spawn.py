"""Start a process that outlives us: a session of its own, nothing inherited, entered in the records before it runs."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Callable

from . import procs
from .setting import settle
from .state import Failed, Json

UNTRIED = "its limits, processors and priority (the trial ended without a result)"


def spawn(
    argv: list[str],
    environ: dict[str, str],
    cwd: str,
    log: str | None,
    entered: Callable[[int, int], None] = lambda pid, start: None,
    setting: Json | None = None,
) -> tuple[int, int, list[str]]:
    """Start ``argv`` and return (pid, start, what went wrong without stopping it).

    The child waits at a gate until ``entered(pid, start)`` has returned; if this process dies before, the child ends
    without having run anything. Standard output and error are appended to ``log``, or dropped; a log that is not there
    is made, 0600, and one that is keeps its mode and owner. ``setting`` (of ``setting.of``): what it runs under.
    Raises ``Failed`` when the program cannot be run.
    """
    trouble = []
    sink = None
    if log is not None:
        try:
            sink = _appending(log)
        except OSError as error:
            trouble.append(f"log: {error}")
    if sink is None:
        sink = os.open(os.devnull, os.O_RDWR)
    gate, opener = os.pipe()
    told, teller = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(argv, environ, cwd, sink, gate, opener, teller, setting)
    os.close(gate)
    os.close(teller)
    child = procs.stat(pid)
    began = child.start if child else 0
    try:
        entered(pid, began)
        os.write(opener, b"g")
        problem = os.read(told, 2000)
    finally:
        os.close(opener)
        os.close(told)
        os.close(sink)
    if problem:
        os.waitpid(pid, 0)
        raise Failed(f"cannot run {argv[0]} in {cwd}: {problem.decode()}; see that it can be run there")
    return pid, began, trouble


def _appending(log: str) -> int:
    """Open a log for appending. Nothing that could block or be shared with others is opened."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NOCTTY
    try:
        return os.open(log, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if log != os.devnull and not stat.S_ISREG(os.stat(log, follow_symlinks=False).st_mode):
            raise OSError(errno.EINVAL, "is no file", log) from None
        return os.open(log, flags)


def ungivable(setting: Json) -> list[str]:
    """Return what of a setting a child of this process cannot be given: found out by a child that tries."""
    heard, teller = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(teller, "\n".join(settle(setting)).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(teller)
    told = b""
    while part := os.read(heard, 4096):
        told += part
    os.close(heard)
    os.waitpid(pid, 0)
    return told.decode().split("\n")[:-1] if told.strip() else ([] if told else [UNTRIED])


def _become(
    argv: list[str],
    environ: dict[str, str],
    cwd: str,
    sink: int,
    gate: int,
    opener: int,
    teller: int,
    setting: Json | None,
) -> None:
    try:
        os.close(opener)
        os.setsid()
        if os.read(gate, 1) != b"g":
            os._exit(75)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                try:
                    os.set_inheritable(int(name), False)
                except OSError:
                    pass
        failed = settle(setting) if setting is not None else []
        if failed:
            raise OSError(errno.EPERM, f"it cannot be given {', '.join(failed)}")
        os.chdir(cwd)
        os.execvpe(argv[0], argv, environ)
    except Exception as error:
        os.write(teller, (getattr(error, "strerror", None) or type(error).__name__).encode())
    finally:
        os._exit(126)
