"""The command line of the host program: one mode a call, JSON in, JSON lines out."""

from __future__ import annotations

import json
import os
import re
import signal
import sys

from .state import Failed, Json, Lost, State, Usage

MODES = ("look", "inspect", "hold", "renew", "play", "read", "switch")
WINDOW = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}\Z")


def emit(line: Json) -> None:
    """Write one result line. A reader that has gone away stops nothing: what was begun is finished."""
    try:
        os.write(1, json.dumps(line).encode() + b"\n")
    except OSError:
        pass


def _line() -> str | None:
    line = sys.stdin.buffer.readline()
    return line.decode("utf-8", "surrogatepass").strip() if line else None


def _options(words: list[str]) -> tuple[State, int]:
    options = dict(zip(words[::2], words[1::2], strict=False))
    term = options.get("--term", "0")
    known = set(options) <= {"--state", "--window", "--term"} and len(words) % 2 == 0
    if not known or "--state" not in options or not term.isdigit():
        raise Usage(f"host.pyz {{{'|'.join(MODES)}}} --state DIR --window ID [--term N]")
    if not WINDOW.match(options.get("--window", "")):
        raise Usage("--window is 1 to 80 letters, digits, dots, dashes and underscores")
    return State(options["--state"], options["--window"]), int(term)


def _arguments() -> Json:
    line = _line()
    try:
        args = json.loads(line or "{}")
    except ValueError:
        args = None
    if not isinstance(args, dict):
        raise Usage("the first line of the input must be one JSON object")
    return args


def _run(mode: str, state: State, term: int) -> int:
    if mode == "switch":
        from .daemon import serve

        return serve(state)
    args = _arguments()
    if mode == "play":
        from .play import play

        # a closed terminal or a Ctrl-C must not cut a verb in two
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        emit(play(state, term, args, emit))
    elif mode in ("hold", "renew"):
        from . import opener

        if mode == "hold":
            emit(opener.hold(state, args, emit, _line))
        else:
            emit(opener.renew(state, term, args, emit, _line))
    else:
        from . import looking

        if mode == "read":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return looking.read(state, term, args, emit)
        emit(looking.look(state, args) if mode == "look" else looking.inspect(args))
    return 0


def main(words: list[str]) -> int:
    """Run one mode and return the exit status: 0 done, 1 failed, 2 usage, 75 the fence is lost."""
    try:
        if not words or words[0] not in MODES:
            raise Usage(f"the mode must be one of {', '.join(MODES)}")
        return _run(words[0], *_options(words[1:]))
    except Usage as error:
        emit({"ok": False, "message": f"host.pyz: {error}", "usage": True})
        return 2
    except Lost as error:
        emit({"ok": False, "message": str(error), **error.fields})
        return 75
    except Failed as error:
        emit({"ok": False, "message": str(error), **error.fields})
        return 1
    except Exception as error:
        # the text of an unforeseen error may hold anything, a server's answer too: only its place is told
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f"{os.path.basename(place.tb_frame.f_code.co_filename)}:{place.tb_lineno}" if place else "?"
        missing = f" {error.args[0]!r}" if isinstance(error, KeyError) and error.args else ""
        emit(
            {
                "ok": False,
                "message": f"host.pyz {words[0]}: {type(error).__name__}{missing} at {where}; report this",
            }
        )
        return 1
