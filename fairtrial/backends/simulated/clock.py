"""Virtual time. Whatever waits is a fiber (a greenlet); one runs at a time, the clock jumps to the next that is due.

The same program under the same clock does the same, byte for byte: nothing here asks the real clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

NS = 1_000_000_000
BEGIN_UTC_S = 1_800_000_000.0
"""When every simulated window begins, seconds since the epoch."""


class Fiber(greenlet):
    """One line of execution. ``owner`` is the simulated process that it belongs to, None for the control host."""

    def __init__(self, run: Callable[[], Any], owner: Any = None) -> None:
        super().__init__(run)
        self.owner = owner
        self.ticket = 0


class Event:
    """Something that fibers wait for; once set it stays set."""

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[Fiber] = []


class Stuck(Exception):
    """Every fiber waits for ever: a fault of the simulation."""


class Clock:
    """Virtual time, nanoseconds since the world began, and the fibers that wait for it."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._due: list[tuple[int, int, Fiber, int]] = []
        self._count = 0
        self._hub: greenlet | None = None

    def utc_s(self) -> float:
        """Seconds since the epoch."""
        return BEGIN_UTC_S + self.now_ns / NS

    def spawn(self, run: Callable[[], Any], owner: Any = None) -> Fiber:
        """Begin a fiber; it runs once the current one waits."""
        fiber = Fiber(run, owner)
        self._at(fiber, self.now_ns)
        return fiber

    def drive(self, run: Callable[[], Any]) -> Any:
        """Run to its end in a fiber of its own, everything else beside it, and return what it returned."""
        outcome: list[Any] = []
        fiber = self.spawn(lambda: outcome.append(run()))
        self._hub = getcurrent()
        while not fiber.dead:
            self._next()
        return outcome[0]

    def _next(self) -> None:
        if not self._due:
            raise Stuck
        at_ns, _, fiber, ticket = heapq.heappop(self._due)
        if fiber.dead or ticket != fiber.ticket:
            return
        self.now_ns = max(self.now_ns, at_ns)
        fiber.ticket += 1
        fiber.parent = getcurrent()
        fiber.switch()

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the current fiber."""
        self._at(_current(), self.now_ns + max(0, round(seconds * NS)))
        self._yield()

    def wait(self, event: Event, timeout_s: float | None) -> bool:
        """Wait until an event is set, at most so long; return whether it is."""
        if event.is_set:
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        fiber = _current()
        event.waiting.append(fiber)
        if timeout_s is not None:
            self._at(fiber, self.now_ns + round(timeout_s * NS))
        self._yield()
        if fiber in event.waiting:
            event.waiting.remove(fiber)
        return event.is_set

    def set(self, event: Event) -> None:
        """Set an event and wake whoever waits for it."""
        event.is_set = True
        waiting, event.waiting = event.waiting, []
        for fiber in waiting:
            self._at(fiber, self.now_ns)

    def end(self, fiber: Fiber, error: BaseException) -> None:
        """End another fiber now, by an error raised where it waits."""
        if fiber.dead:
            return
        fiber.ticket += 1
        fiber.parent = getcurrent()
        try:
            fiber.throw(error)
        except type(error):
            pass

    def _at(self, fiber: Fiber, at_ns: int) -> None:
        self._count += 1
        heapq.heappush(self._due, (at_ns, self._count, fiber, fiber.ticket))

    def _yield(self) -> None:
        assert self._hub is not None
        self._hub.switch()


def _current() -> Fiber:
    fiber = getcurrent()
    assert isinstance(fiber, Fiber), "only a fiber can wait for virtual time"
    return fiber


def owner() -> Any:
    """The simulated process whose fiber runs now; None on the control host."""
    return getattr(getcurrent(), "owner", None)
