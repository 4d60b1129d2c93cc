"""The command line: ``fairtrial COMMAND``. Results go to standard output, progress and messages to standard error."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairtrial import __version__, conduct, plan, status
from fairtrial.canonical import canonical
from fairtrial.errors import (
    EvidenceError,
    ExperimentError,
    FairtrialError,
    NotRestored,
    Refused,
    Superseded,
)
from fairtrial.evidence import verify
from fairtrial.experiment import schema
from fairtrial.progress import tell
from fairtrial.store import Directory
from fairtrial.summary import read_again
from fairtrial.verdict import screen

STORIES = ("confirmed", "refuted", "state", "unsafe")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="fairtrial",
        description="One matched window on a self-hosted LLM server: is it faster, are the answers the same, "
        "was it this change, and is production back?",
    )
    top.add_argument("--version", action="version", version=f"fairtrial {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="the whole story on this machine, about a minute")
    demo.add_argument(
        "--story", choices=STORIES, default="confirmed", help="what the arms really do (default: %(default)s)"
    )
    demo.add_argument("--out", type=Path, metavar="DIR", help="where the evidence goes (default: demo-TIME here)")
    demo.add_argument("--port", type=_port, default=8001, help="production's port (default: %(default)s)")
    demo.add_argument("--keep", action="store_true", help="leave the production that the demo brought up")
    demo.add_argument("--quick", action="store_true", help="tiny cells and short waits, about 20 s")

    dry = commands.add_parser("plan", help="dry: no command, no network, writes nothing")
    dry.add_argument("experiment", type=Path, metavar="EXPERIMENT", nargs="?")
    dry.add_argument("--json", action="store_true", help="one JSON document")
    dry.add_argument("--schema", action="store_true", help="print the JSON Schema of experiment files instead")

    register = commands.add_parser("register", help="write the registration: canonical bytes, hash, commit, time")
    register.add_argument("experiment", type=Path, metavar="EXPERIMENT")

    rehearse = commands.add_parser("rehearse", help="the same window on simulated hosts: every stop point, every fault")
    rehearse.add_argument("experiment", type=Path, metavar="EXPERIMENT")
    rehearse.add_argument("--json", action="store_true", help="one JSON document")
    rehearse.add_argument("--at", metavar="STEP/FAULT", help="one run alone, with its ledger")
    rehearse.add_argument("--pairs", action="store_true", help="a second fault in each restore, too (minutes)")

    run = commands.add_parser("run", help="run the window (without --execute: the plan)")
    run.add_argument("experiment", type=Path, metavar="EXPERIMENT")
    run.add_argument("--out", type=Path, metavar="DIR", help="where the evidence goes: new, or an empty folder")
    run.add_argument("--execute", action="store_true", help="really run it")
    run.add_argument("--registration", type=Path, metavar="FILE", help="made earlier by `fairtrial register`")
    run.add_argument(
        "--max-downtime", type=_minutes, metavar="MIN", help="stop and restore so that production is back by then"
    )

    stop = commands.add_parser("stop", help="write the STOP file, wait, say what was restored")
    stop.add_argument("dir", type=Path, metavar="DIR")

    restore = commands.add_parser("restore", help="bring production back from the evidence of a runner that died")
    restore.add_argument("dir", type=Path, metavar="DIR")
    how = restore.add_mutually_exclusive_group()
    how.add_argument("--now", action="store_true", help="take over although another actor's lease may live")
    how.add_argument(
        "--accept", metavar="REASON", help="a person vouches for what serves: end arms, start nothing, release"
    )

    read = commands.add_parser("read", help="the verdict again, from evidence alone")
    read.add_argument("dir", type=Path, metavar="DIR")
    read.add_argument("--json", action="store_true", help="one JSON document")

    check = commands.add_parser("verify", help="every hash again")
    check.add_argument("dir", type=Path, metavar="DIR")
    check.add_argument("--seal", metavar="HASH", help="the seal that the host's last record keeps")

    show = commands.add_parser("status", help="who holds what; how far a running window is")
    show.add_argument("dir", type=Path, metavar="DIR", nargs="?")
    return top


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else 0
    if not 1 <= port <= 65000:
        raise argparse.ArgumentTypeError(f"{text!r} is no port (1 to 65000)")
    return port


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return minutes


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (window.md names them; README has the table)."""
    given = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _dispatch(given)
    except (ExperimentError, Refused) as error:
        print(f"fairtrial: refused: {error}" if isinstance(error, Refused) else f"fairtrial: {error}", file=sys.stderr)
        return 2
    except EvidenceError as error:
        print(f"fairtrial: {error}", file=sys.stderr)
        return 1 if given.command in ("read", "verify") else 2
    except (NotRestored, Superseded) as error:
        print(f"fairtrial: {error}", file=sys.stderr)
        return 4
    except FairtrialError as error:
        print(f"fairtrial: {error}", file=sys.stderr)
        return 4 if given.command in ("run", "demo", "restore") else 2
    except KeyboardInterrupt:
        print("fairtrial: interrupted outside a window: no window runs, nothing is held by it", file=sys.stderr)
        return 3
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _dispatch(given: argparse.Namespace) -> int:
    match given.command:
        case "plan":
            if given.schema:
                _print_json(schema())
                return 0
            if given.experiment is None:
                raise Refused("plan needs an EXPERIMENT file (or --schema)")
            return _plan(given.experiment, given.json, None)
        case "register":
            path = conduct.register(given.experiment)
            print(path)
            tell(f"registered; next: fairtrial run {given.experiment} --execute --out DIR --registration {path}")
            return 0
        case "rehearse":
            return _rehearse(given.experiment, as_json=given.json, at=given.at, pairs=given.pairs)
        case "run":
            if not given.execute:
                return _plan(given.experiment, False, given.max_downtime)
            if given.out is None:
                raise Refused("run --execute needs --out DIR: where the evidence goes")
            return _ended(
                conduct.run(
                    given.experiment,
                    out=given.out,
                    registered_in=given.registration,
                    max_downtime_min=given.max_downtime,
                ),
                given.out,
            )
        case "demo":
            from fairtrial import demo

            out = given.out or demo.default_out()
            code = demo.run(story=given.story, out=out, port=given.port, keep=given.keep, quick=given.quick)
            return _ended(code, out)
        case "stop":
            return conduct.stop(given.dir)
        case "restore":
            return conduct.restore(given.dir, now=given.now, accept=given.accept)
        case "read":
            _refuse_changed(given.dir)
            reading = read_again(Directory.open(given.dir))
            if given.json:
                _print_json(reading)
            else:
                print(screen(given.dir, reading) or f"VERDICT  {reading['verdict'] or 'none due'}\n", end="")
            return 0 if reading["verdict"] is not None or reading.get("speed") is None else 1
        case "verify":
            return _verify(given.dir, given.seal)
        case _:
            print(status.text(given.dir), end="")
            return 0


def _refuse_changed(path: Path) -> None:
    """No verdict is read from evidence that is not what its seal says. An unsealed folder is read as it is."""
    changed = [problem for problem in verify(path).problems if problem.kind != "unsealed"]
    if changed:
        raise EvidenceError(f"{path}: {changed[0]} (fairtrial verify {path} lists all): no verdict is read from it")


def _plan(path: Path, as_json: bool, max_downtime_min: float | None) -> int:
    experiment, _ = conduct.open_experiment(path)
    if as_json:
        _print_json(plan.plan(experiment, max_downtime_min))
    else:
        print(plan.text(experiment, max_downtime_min), end="")
    return 0


def _rehearse(path: Path, *, as_json: bool, at: str | None, pairs: bool) -> int:
    from fairtrial import rehearsal

    experiment, _ = conduct.open_experiment(path)
    base = path.parent.absolute()

    def told(text: str) -> None:
        tell(f"fairtrial: {text}")

    if at is not None:
        story, run = rehearsal.replay(experiment, base, at, told)
        if as_json:
            _print_json({"run": dataclasses.asdict(run), "ledger": rehearsal.ledger(story.world)})
        else:
            print(rehearsal.run_text(run, rehearsal.ledger(story.world), story.told.output), end="")
        return 1 if run.broken else 0
    found = rehearsal.rehearse(experiment, base, pairs=pairs, told=told)
    if as_json:
        _print_json(found.dump())
    else:
        print(rehearsal.text(experiment.name, found), end="")
    return 1 if any(run.broken for run in found.all_runs) else 0


def _ended(code: int, out: Path) -> int:
    try:
        if out.exists():
            print(screen(out), end="", flush=True)
    except OSError:
        # Nobody reads any more; how the window ended must still be told by the exit status.
        sys.stdout = sys.stderr
    return code


def _verify(path: Path, seal: str | None) -> int:
    found = verify(path, seal)
    for problem in found.problems:
        print(f"{path}: {problem}")
    if found.problems:
        return 1
    print(f"{path}: sealed, and every hash holds; seal {found.seal}")
    return 0


def _print_json(value: dict[str, Any]) -> None:
    canonical(value)
    json.dump(value, sys.stdout, indent=1, sort_keys=True, ensure_ascii=False)
    print()


if __name__ == "__main__":
    sys.exit(main())
