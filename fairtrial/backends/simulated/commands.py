"""The few plain programs of a simulated host: what the contract of every backend is tested with, and a site's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fairtrial.backends.simulated import files, posix
from fairtrial.backends.simulated.kernel import Process

Command = Callable[[Process], int]


def cat(process: Process) -> int:
    """Files, or where none is named standard input, to standard output."""
    status, paths = 0, process.argv[1:]
    for path in paths:
        try:
            files.write(1, posix.builtin_open(path, "rb").read())
        except OSError as error:
            files.write(2, f"cat: {path}: {error.strerror}\n".encode())
            status = 1
    while not paths and (content := files.read(0, 1 << 16)):
        files.write(1, content)
    return status


def sleep(process: Process) -> int:
    """Wait so many seconds."""
    posix.sleep(float(process.argv[1]))
    return 0


def env(process: Process) -> int:
    """The environment, a variable a line."""
    files.write(1, "".join(f"{name}={value}\n" for name, value in process.environ.items()).encode())
    return 0


def printf(process: Process) -> int:
    """``printf '%s\\n' WORD...``: every word in the form that the first gives."""
    form = process.argv[1].replace("\\n", "\n")
    files.write(1, "".join(form.replace("%s", word) for word in process.argv[2:]).encode())
    return 0


def fail(process: Process) -> int:
    """Exit 1."""
    return 1


def succeed(process: Process) -> int:
    """Exit 0: also what a site's own command does, as far as a rehearsal knows."""
    return 0


PLAIN: Mapping[str, Command] = {
    "/bin/cat": cat,
    "/bin/sleep": sleep,
    "/usr/bin/env": env,
    "/usr/bin/printf": printf,
    "/bin/false": fail,
    "/bin/true": succeed,
}
"""Path -> program."""
