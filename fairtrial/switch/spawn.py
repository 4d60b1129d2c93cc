"""Start a process that outlives us: a session of its own, nothing inherited, entered in the records before it runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from . import procs
from .state import Failed


def spawn(
    argv: list[str],
    environ: dict[str, str],
    cwd: str,
    log: str | None,
    entered: Callable[[int, int], None] = lambda pid, start: None,
) -> tuple[int, int, list[str]]:
    """Start ``argv`` and return (pid, start, what went wrong without stopping it).

    The child waits at a gate until ``entered(pid, start)`` has returned; if this process dies before, the child ends
    without having run anything. Standard output and error are appended to ``log`` (0600), or dropped.
    Raises ``Failed`` when the program cannot be run.
    """
    trouble = []
    sink = os.open(os.devnull, os.O_RDWR)
    if log is not None:
        try:
            fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            os.fchmod(fd, 0o600)
            sink = fd
        except OSError as error:
            trouble.append(f"log: {error}")
    gate, opener = os.pipe()
    told, teller = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(argv, environ, cwd, sink, gate, opener, teller)
    os.close(gate)
    os.close(teller)
    child = procs.stat(pid)
    began = child.start if child else 0
    try:
        entered(pid, began)
        os.write(opener, b"g")
        problem = os.read(told, 200)
    finally:
        os.close(opener)
        os.close(told)
        os.close(sink)
    if problem:
        os.waitpid(pid, 0)
        raise Failed(f"cannot run {argv[0]} in {cwd}: {problem.decode()}; see that both exist there")
    return pid, began, trouble


def _become(argv: list[str], environ: dict[str, str], cwd: str, sink: int, gate: int, opener: int, teller: int) -> None:
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
        os.chdir(cwd)
        os.execvpe(argv[0], argv, environ)
    except Exception as error:
        os.write(teller, (getattr(error, "strerror", None) or type(error).__name__).encode())
    finally:
        os._exit(126)
