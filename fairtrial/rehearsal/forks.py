"""Processes that are forked off one another, and what they tell: one line a run, through a pipe."""

from __future__ import annotations

import gc
import json
import os
import pickle
import selectors
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fairtrial.canonical import canonical
from fairtrial.errors import Refused

LIMIT_S = 60
"""Real seconds that one run may take: one that goes on and on is broken."""

Result = TypeVar("Result")
Row = dict[str, Any]
Tell = Callable[[Row], None]


def child() -> str | None:
    """Fork. In the child None; in its parent, once the child has ended, what was wrong with that (empty: nothing)."""
    pid = os.fork()
    if pid == 0:
        gc.disable()
        signal.alarm(LIMIT_S)
        return None
    _, status = os.waitpid(pid, 0)
    number = os.waitstatus_to_exitcode(status)
    if number == -signal.SIGALRM:
        return f"did not end within {LIMIT_S} s"
    return f"a fault of the rehearsal itself (exit {number})" if number else ""


def unlimited() -> None:
    """Take the limit from a child whose own work is to wait for many others."""
    signal.alarm(0)


def forked(what: Callable[[], Result]) -> Result:
    """Do something in a process of its own, and return its result; what it raises is raised here."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            content = pickle.dumps((what(), None))
        except Refused as error:
            content = pickle.dumps((None, str(error)))
        os.close(reader)
        with os.fdopen(writer, "wb") as file:
            file.write(content)
        os._exit(0)
    os.close(writer)
    content = read_all(reader)
    os.waitpid(pid, 0)
    result, refused = pickle.loads(content)
    if refused is not None:
        raise Refused(refused)
    found: Result = result
    return found


def read_all(reader: int) -> bytes:
    with os.fdopen(reader, "rb") as file:
        return file.read()


def spread(jobs: int, work: Callable[[int, Tell], None]) -> Iterator[Row]:
    """Do a work in ``jobs`` processes; each tells rows, one JSON line a row."""
    workers: dict[int, tuple[int, bytearray]] = {}
    for number in range(jobs):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _work(work, number, writer)
        os.close(writer)
        workers[reader] = pid, bytearray()
    with selectors.DefaultSelector() as selector:
        for reader in workers:
            selector.register(reader, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                pid, held = workers[key.fd]
                part = os.read(key.fd, 1 << 20)
                held += part
                *lines, rest = bytes(held).split(b"\n")
                held[:] = rest
                yield from map(json.loads, lines)
                if not part:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    if status:
                        raise RuntimeError(f"a worker of the rehearsal ended with {os.waitstatus_to_exitcode(status)}")


def _work(work: Callable[[int, Tell], None], number: int, writer: int) -> None:
    """The whole life of a worker, or of a child that was forked off it."""

    def tell(row: Row) -> None:
        # one write of less than a pipe's atom: the lines of all children stay whole
        os.write(writer, canonical(row) + b"\n")

    gc.collect()
    gc.freeze()
    try:
        work(number, tell)
    except (KeyboardInterrupt, BrokenPipeError):
        # nobody listens any more
        os._exit(1)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(1)
    os._exit(0)
