"""What the runner asks of the world: five methods on hosts, and a clock.

Whatever takes time is a ``Pending``: the runner polls it and lets its ticks run in between. A command whose end
nobody saw is *indeterminate* (``Reply.exit`` is None), never failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fairtrial.client import Call, Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a command said. ``exit`` None: its end was not seen, so it may have happened."""

    exit: int | None
    stdout: bytes
    stderr: bytes


class Pending(Protocol):
    """A command under way."""

    def poll(self, timeout_s: float) -> Reply | None:
        """Wait at most ``timeout_s`` for the end."""
        ...

    def abandon(self) -> Reply:
        """Stop waiting. The command may go on."""
        ...


class Channel(Protocol):
    """A long-lived program on a host: lines in, lines out."""

    def send(self, line: str) -> bool:
        """Send one line; False: nobody reads any more."""
        ...

    def lines(self) -> list[str]:
        """The lines that arrived since the last call; never waits."""
        ...

    def ended(self) -> bool:
        """Whether the program is gone."""
        ...

    def close(self) -> None:
        """Close its input, and wait briefly for its end."""
        ...


class Asking(Protocol):
    """A request under way; ``local_port`` is our end of its connection, once it has one."""

    @property
    def local_port(self) -> int | None: ...

    def poll(self, timeout_s: float) -> Exchange | None:
        """Wait at most ``timeout_s`` for the end."""
        ...

    def close(self) -> None:
        """End it now: it ends with the fault ``closed``."""
        ...


class Backend(Protocol):
    """A world. ``argv`` is what runs, word by word; quoting is the backend's affair.

    ``tick_s``: how often whatever waits looks around, seconds.
    """

    tick_s: float

    def utc(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic_ns(self) -> int:
        """A clock that never goes back, nanoseconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        ...

    def program(self, host: str, installed: str | None = None) -> tuple[str, ...]:
        """How the host program is called on this host, before its own arguments. ``installed``: its copy there."""
        ...

    def command(self, host: str, argv: Sequence[str], *, stdin: bytes, mark: str | None) -> Pending:
        """Start a command. ``mark``: the window's id, put into its environment."""
        ...

    def channel(self, host: str, argv: Sequence[str]) -> Channel:
        """Start a long-lived program, without the mark."""
        ...

    def put(self, host: str, path: str, content: bytes) -> None:
        """Write a file: aside, read back and compared, then renamed. Raises ``StepFailed``."""
        ...

    def get(self, host: str, path: str) -> bytes | None:
        """The content of a file on the host, or None where there is none. Raises ``StepFailed``."""
        ...

    def request(self, call: Call) -> Asking:
        """Start a timed request from the control host."""
        ...
