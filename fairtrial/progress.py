"""What a person sees while a window runs: one line a step, cells as they land, what Ctrl-C does now."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TextIO

from fairtrial.window import Step


class Progress(Protocol):
    """Told of what happens as it happens."""

    def begin(self, step: Step, elapsed_s: float) -> None: ...

    def end(self, step: Step, outcome: str, seconds: float, headroom: str) -> None: ...

    def cell(self, row: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


def clock(seconds: float) -> str:
    """Seconds as a person reads them."""
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print one message to a person (standard error). A terminal that is closed stops nothing, a restore least."""
    try:
        print(text, file=stream or sys.stderr, flush=True)
    except (OSError, ValueError):
        pass


class Lines:
    """Plain lines on a stream (standard error)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._hint = ""

    def begin(self, step: Step, elapsed_s: float) -> None:
        hint = _ctrl_c(step)
        if hint != self._hint:
            self._hint = hint
            self.say(f"  ~ Ctrl-C now: {hint}")

    def end(self, step: Step, outcome: str, seconds: float, headroom: str) -> None:
        mark = "ok" if outcome == "ok" else outcome.upper()
        planned = clock(step.estimate.seconds)
        tail = f"   {headroom}" if headroom else ""
        self.say(f"{step.name:<18} {mark:<8} {clock(seconds):>9}  (planned {planned}){tail}")

    def cell(self, row: dict[str, Any]) -> None:
        self.say(
            f"    {row['arm']} {row['cell']} rep {row['rep']}: TTFT {row['ttft_ns'] / 1e9:.3f} s, "
            f"cold {row['cold']}, alone {row['alone']}"
        )

    def say(self, text: str) -> None:
        tell(text, self._stream)


def _ctrl_c(step: Step) -> str:
    if step.name == "preflight":
        return "ends; nothing has been touched"
    if step.undoes:
        return "is written down; the restore goes on"
    return "stops the window and restores production"
