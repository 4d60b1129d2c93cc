"""Kill the runner of a window at every step of its ledger; production must come back every time.

``python tests/kill.py`` runs it whole and prints how often each step was tried and how often all was well. The window
is ``fairtrial demo --quick``, with its own state folder and ports. A kill is exact: in the killed process itself the
ledger sends the signal, as soon as the record that begins the step lies on the disk, or so many milliseconds later
(but before the record of the step's end).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairtrial import demo
from fairtrial.ledger import Ledger
from fairtrial.ledger import read as read_ledger
from fairtrial.progress import Lines
from fairtrial.runner import Runner
from fairtrial.switch import procs
from fairtrial.window import steps

HERE = Path(__file__)
PATIENCE_S = 90.0
SEALED, RELEASED = "release.sealed", "release.done"
"""Where ``release`` can be cut, after ``release.begin``: the seal is written; the HOLD is given back."""

STEPS = tuple(step.name for step in steps(demo.experiment(quick=True)))
FORWARD = frozenset(step.name for step in steps(demo.experiment(quick=True)) if not step.undoes)
KILLS = (*STEPS[STEPS.index("hold") : STEPS.index("seal")], "release.begin", SEALED, RELEASED)
"""From ``hold`` to ``release``: where a runner is killed."""

ALONE = STEPS[STEPS.index("idle") : STEPS.index("look") + 1]
"""Where the switch alone brings production back."""


# -- in the killed process -----------------------------------------------------------------------------------------


class Point:
    """Where signals are sent: at the record that begins a step, or at the first of another kind within it."""

    def __init__(self, *, at: str, signals: Sequence[str], after_s: float = 0.0, kind: str = "begin") -> None:
        self.at = at
        self.kind = kind
        self._signals = [signal.Signals[name] for name in signals]
        self._after_s = after_s
        self._due = threading.Lock()

    def reached(self) -> None:
        """Send the signals now, or after the delay."""
        if self._after_s:
            threading.Timer(self._after_s, self.fire).start()
        else:
            self.fire()

    def fire(self) -> None:
        """Send the signals, once."""
        if self._due.acquire(blocking=False):
            for number in self._signals:
                os.kill(os.getpid(), number)


def trap(points: Sequence[Point], words: Sequence[str]) -> int:
    """Run ``fairtrial`` in this process, with signals sent to it at these points."""
    from fairtrial import undo
    from fairtrial.cli import main

    append, seal, run = Ledger.append, undo.seal, Runner.run
    step = [""]

    def reached(at: str, kind: str) -> None:
        for point in points:
            if (point.at, point.kind) == (at, kind):
                point.reached()

    def appending(ledger: Ledger, kind: str, **fields: Any) -> Any:
        if kind == "end":
            for point in points:
                if point.at == fields["step"] and point.kind == "begin":
                    point.fire()
        record = append(ledger, kind, **fields)
        if kind == "begin":
            step[0] = fields["step"]
        reached(kind if kind == "release.begin" else step[0], "begin" if kind == "release.begin" else kind)
        return record

    def sealing(store: Any) -> str:
        sealed = seal(store)
        reached(SEALED, "begin")
        return sealed

    def running(runner: Runner) -> int:
        code = run(runner)
        reached(RELEASED, "begin")
        return code

    Ledger.append, undo.seal, Runner.run = appending, sealing, running
    return main(list(words))


# -- a place of its own for one window after another ---------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What a program printed, and how it ended: negative by a signal."""

    exit: int
    stdout: str
    stderr: str


class Program:
    """``fairtrial`` with some words, running."""

    def __init__(self, lane: Lane, words: Sequence[object], points: Sequence[dict[str, Any]] = ()) -> None:
        self.words = [str(word) for word in words]
        lane.started += 1
        lane.programs.append(self)
        self._out = [lane.folder / f"{lane.started}.{name}" for name in ("stdout", "stderr")]
        argv = [sys.executable, str(HERE), "--trap", json.dumps(list(points)), *self.words]
        if not points:
            argv = [sys.executable, "-m", "fairtrial", *self.words]
        with self._out[0].open("w") as stdout, self._out[1].open("w") as stderr:
            self.process = subprocess.Popen(
                argv, env=lane.environ, cwd=lane.folder, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )

    def stopped(self) -> None:
        """Wait until SIGSTOP has stopped it."""
        looks = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT
        found = until(lambda: os.waitid(os.P_PID, self.process.pid, looks), "stopped, or ended")
        if found.si_code != os.CLD_STOPPED:
            raise AssertionError(f"it was to be stopped, and ended: {self.end()}")

    def send(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def end(self) -> Ran:
        """Wait for its end."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = -999
        return Ran(code, *(path.read_text() for path in self._out))


class Lane:
    """A folder, a state folder and two ports; one window at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.port = _two_free_ports()
        self.environ = {**os.environ, demo.STATE: str(self.state), "PYTHONDONTWRITEBYTECODE": "1"}
        self.count = self.started = 0
        self.programs: list[Program] = []

    def out(self) -> Path:
        """A new evidence folder."""
        self.count += 1
        return self.folder / f"out-{self.count}"

    def demo(self, out: Path, points: Sequence[dict[str, Any]] = (), *more: str) -> Program:
        """A quick demo that meets signals at points; the production of the one before serves again."""
        return Program(self, ["demo", "--quick", "--keep", "--port", self.port, "--out", out, *more], points)

    def run(self, *words: object) -> Ran:
        """Run ``fairtrial`` to its end."""
        return Program(self, words).end()

    def last(self) -> dict[str, Any]:
        """The host's last record."""
        try:
            found: dict[str, Any] = json.loads((self.state / "last.json").read_bytes())
        except FileNotFoundError:
            return {}
        return found

    def production(self) -> procs.Stat | None:
        """The process that listens on production's port."""
        return next(iter(procs.listeners(self.port)), None)

    def served(self) -> procs.Key | None:
        """Which very process production is."""
        stat = self.production()
        return stat.key if stat else None

    def close(self) -> None:
        """End what this lane started."""
        for program in self.programs:
            if program.process.poll() is None:
                program.process.kill()
                program.process.wait()
        for one in procs.steps(str(self.state)):
            procs.send(one["pid"], one["start"], signal.SIGKILL)
        for port in (self.port + 1, self.port):
            for stat in procs.listeners(port):
                if (procs.environ(stat.pid) or {}).get(demo.LABEL) == "production":
                    procs.send(*stat.key, signal.SIGKILL)


@contextlib.contextmanager
def lane(folder: Path) -> Iterator[Lane]:
    """A lane that ends what it started."""
    one = Lane(folder)
    try:
        yield one
    finally:
        one.close()


def _two_free_ports() -> int:
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError):
                second.bind(("127.0.0.1", port + 1))
                if port < 64000:
                    return port


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Wait until a condition holds, and return what it returned."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {patience_s:.0f} s: {what}")
        time.sleep(0.02)
    return found


# -- what must hold ------------------------------------------------------------------------------------------------


def records(out: Path) -> list[dict[str, Any]]:
    """The ledger of a folder."""
    return read_ledger((out / "ledger.jsonl").read_bytes())


def rows(out: Path) -> list[dict[str, Any]]:
    """Every cell that landed, of every arm."""
    found = []
    for arm in demo.experiment(quick=True).arms:
        path = out / "arms" / arm.name / "cells.jsonl"
        if path.exists():
            found += [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    return found


def serving(one: Lane) -> list[str]:
    """What is wrong with the production that serves; nothing, if it is as its owner started it and answers."""
    stat = one.production()
    if stat is None:
        return [f"production is down: nothing listens on port {one.port}"]
    wrong = []
    if procs.argv(stat.pid) != demo.command(one.port, True):
        wrong.append(f"production's arguments are {procs.argv(stat.pid)}")
    environ = procs.environ(stat.pid) or {}
    if set(environ) != {"PATH", "PYTHONPATH", demo.LABEL} or environ[demo.LABEL] != "production":
        wrong.append(f"production's environment is {environ}")
    connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=20)
    try:
        body = json.dumps({"model": "reference", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200 or not json.loads(content).get("choices"):
            wrong.append(f"production answered a generation with {answer.status}: {content[:200]!r}")
    except OSError as error:
        wrong.append(f"production does not answer: {error}")
    finally:
        connection.close()
    return wrong


def restored(one: Lane, out: Path) -> list[str]:
    """What is wrong after a window was restored and released."""
    wrong = serving(one)
    ledger = records(out)
    window = ledger[0]["window"]
    if marked := procs.marked(window):
        wrong.append(f"still marked: {[procs.argv(pid) for pid in marked]}")
    if procs.listeners(one.port + 1):
        wrong.append("an arm still listens")
    verified = one.run("verify", out)
    if verified.exit != 0:
        wrong.append(f"verify: exit {verified.exit}: {verified.stdout}{verified.stderr}")
    status = one.run("status", out)
    if status.exit != 0 or "no HOLD" not in status.stdout:
        wrong.append(f"status: exit {status.exit}: {status.stdout}{status.stderr}")
    last = one.last()
    if last.get("window") != window:
        # killed before the host made the HOLD: the host knows nothing of this window
        if any(record["kind"] == "end" and record["step"] == "hold" for record in ledger):
            wrong.append(f"last.json says {last}")
    elif last["state"] != "released" or last["seal"] not in verified.stdout:
        wrong.append(f"last.json says {last}, verify {verified.stdout}")
    left = {path.name for path in one.state.iterdir()} if one.state.exists() else set()
    if not left <= {"last.json", "lock"}:
        wrong.append(f"the state folder holds {sorted(left)}")
    wrong += stayed_down(ledger)
    summary = json.loads((out / "summary.json").read_bytes())
    if summary["restored"] is not True:
        wrong.append(f"summary.json: restored is {summary['restored']}")
    kept, whole = [_cell(row) for row in summary["cells"]], [_cell(row) for row in rows(out)]
    if kept != whole:
        wrong.append(f"summary.json has the cells {kept}, landed are {whole}")
    landed = [_cell(record) for record in ledger if record["kind"] == "cell"]
    if not set(landed) <= set(kept):
        wrong.append(f"cells are lost: the ledger has {landed}, the summary {kept}")
    snapshot = out / "snapshot" / "here.json"
    stat = one.production()
    if snapshot.exists() and stat is not None:
        before = json.loads(snapshot.read_bytes())
        begun = any(record["kind"] == "begin" and record["step"].endswith(".start") for record in ledger)
        if not begun and before["pid"] != stat.pid:
            wrong.append(f"production was restarted, although no arm was begun: {before['pid']} is now {stat.pid}")
        if (before["argv"], before["environ"]) != (procs.argv(stat.pid), procs.environ(stat.pid)):
            wrong.append("production is not what the snapshot saw")
    return wrong


def _cell(row: dict[str, Any]) -> tuple[str, str, int, int]:
    return row["arm"], row["cell"], row["rep"], row["ttft_ns"]


def stayed_down(ledger: Iterable[dict[str, Any]]) -> list[str]:
    """What a restore did that none may do: measure, or go on with the window."""
    wrong, stopped = [], False
    for record in ledger:
        stopped = stopped or record["kind"] in ("stop", "restorer", "complete")
        measures = record["kind"] in ("cell", "check")
        goes_on = record["kind"] == "begin" and record["step"] in FORWARD
        if stopped and (measures or goes_on):
            wrong.append(f"after the stop: {record['kind']} {record.get('step', '')}")
    return wrong


# -- the cases -----------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One kill, and what came of it."""

    name: str
    step: str
    way: str
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    ran: list[Ran] = field(default_factory=list)
    out: Path | None = None

    def told(self) -> str:
        """What went wrong, with what there is to look at."""
        lines = [f"{self.name}:", *(f"  - {one}" for one in self.wrong)]
        if self.out is not None and (self.out / "ledger.jsonl").exists():
            tail = (self.out / "ledger.jsonl").read_text(errors="replace").splitlines()[-12:]
            lines += ["  the ledger's end:", *(f"    {line[:300]}" for line in tail)]
        for ran in self.ran:
            lines += [f"  exit {ran.exit}, standard error:", *(f"    {line}" for line in ran.stderr.splitlines()[-12:])]
        return "\n".join(lines)


def _case(name: str, step: str, way: str, one: Lane, do: Callable[[Case], None]) -> Case:
    case = Case(name=name, step=step, way=way, out=one.out())
    began = time.monotonic()
    try:
        do(case)
    except Exception as error:
        case.wrong.append("".join(traceback.format_exception(error)))
    case.seconds = time.monotonic() - began
    return case


def _kill(one: Lane, case: Case, after_s: float) -> None:
    assert case.out is not None
    killed = one.demo(case.out, [{"at": case.step, "signals": ["SIGKILL"], "after_s": after_s}]).end()
    case.ran.append(killed)
    if killed.exit != -signal.SIGKILL:
        case.wrong.append(f"the runner was to be killed in {case.step}, and ended with exit {killed.exit}")
    begun = [record for record in records(case.out) if record["kind"] in ("begin", "release.begin")][-1]
    reached = begun.get("step", "release.begin")
    if reached != case.step and not (case.step in (SEALED, RELEASED) and reached == "release.begin"):
        case.wrong.append(f"killed in {reached}, not in {case.step}")


def _restore(one: Lane, case: Case) -> None:
    ran = one.run("restore", case.out)
    case.ran.append(ran)
    if ran.exit != 0:
        case.wrong.append(f"restore: exit {ran.exit}")
    assert case.out is not None
    case.wrong += restored(one, case.out)


def killed(one: Lane, step: str, after_s: float = 0.0) -> Case:
    """SIGKILL in a step, then ``fairtrial restore``."""

    def do(case: Case) -> None:
        _kill(one, case, after_s)
        _restore(one, case)

    return _case(f"killed {after_s * 1000:.0f} ms into {step}, restored", step, "killed, then restore", one, do)


def alone(one: Lane, step: str, after_s: float = 0.0) -> Case:
    """SIGKILL in a step; the switch alone brings production back; then ``fairtrial restore``."""

    def do(case: Case) -> None:
        _kill(one, case, after_s)
        assert case.out is not None
        before = records(case.out)
        window = before[0]["window"]
        until(lambda: one.last().get("state") == "served" and one.last().get("window") == window, "last.json: served")
        case.wrong += serving(one)
        case.wrong += [] if one.last()["actor"]["kind"] == "switch" else [f"served by {one.last()['actor']}"]
        case.wrong += ["an arm still listens"] if procs.listeners(one.port + 1) else []
        case.wrong += ["the evidence changed without a runner"] if records(case.out) != before else []
        verified = one.run("verify", case.out)
        problems = verified.stdout.splitlines()
        if verified.exit != 1 or len(problems) != 1 or "unsealed" not in problems[0]:
            case.wrong.append(f"verify before the restore: exit {verified.exit}: {verified.stdout}")
        status = one.run("status", case.out).stdout
        case.wrong += [] if "HELD by window" in status else [f"the HOLD did not stay: {status}"]
        _restore(one, case)

    return _case(
        f"killed {after_s * 1000:.0f} ms into {step}, served by the switch", step, "killed, switch alone", one, do
    )


def signalled(one: Lane, step: str, name: str, times: int) -> Case:
    """A signal in a step, or two in a row: the runner restores by itself."""

    def do(case: Case) -> None:
        assert case.out is not None
        points = [{"at": step, "signals": [name], "after_s": 0.05 * number} for number in range(times)]
        ran = one.demo(case.out, points).end()
        case.ran.append(ran)
        # one that comes while production is restored is written down, and the window stays complete
        wanted = 0 if step.startswith("restore.") else 3
        if ran.exit != wanted:
            case.wrong.append(f"exit {ran.exit}, not {wanted}")
        told = [record for record in records(case.out) if name in str(record.get("reason"))]
        if not told:
            case.wrong.append(f"no record of {name}")
        if wanted and "production is proved to be back" not in ran.stderr:
            case.wrong.append("it does not say that production is back")
        case.wrong += restored(one, case.out)

    return _case(f"{name} x {times} in {step}", step, "signalled", one, do)


OFTEN_S = (0.0, 0.05, 0.15, 0.4, 0.9)
"""When a step that changes much is killed, in seconds from its beginning; at the latest before its end is written."""


def cases(times: int) -> list[Callable[[Lane], Case]]:
    """Every case of the whole run."""
    found: list[Callable[[Lane], Case]] = []
    for step in KILLS:
        often = step.endswith(".start") or step.startswith("restore.")
        for number in range(times if often else 1):
            after_s = OFTEN_S[number % len(OFTEN_S)]
            found.append(functools.partial(killed, step=step, after_s=after_s))
    found += [functools.partial(alone, step=step) for step in ALONE]
    for step in ("off.start", "off.requests", "restore.prove"):
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            found += [functools.partial(signalled, step=step, name=name, times=count) for count in (1, 2)]
    return found


def play(todo: Sequence[Callable[[Lane], Case]], folder: Path, lanes: int, say: Callable[[Case], None]) -> list[Case]:
    """Play cases, ``lanes`` of them at a time; each lane has its own host state and production."""
    left = iter(todo)
    turn = threading.Lock()
    done: list[Case] = []

    def travel(number: int) -> None:
        place = folder / f"lane-{number}"
        place.mkdir(parents=True)
        with lane(place) as one:
            while True:
                with turn:
                    case = next(left, None)
                if case is None:
                    return
                found = case(one)
                with turn:
                    done.append(found)
                    say(found)

    with ThreadPoolExecutor(lanes) as pool:
        for travelled in [pool.submit(travel, number) for number in range(lanes)]:
            travelled.result()
    return done


def main() -> int:
    """Run every case and print the table."""
    options = argparse.ArgumentParser(description="Kill the runner at every step; production must come back.")
    options.add_argument(
        "--times", type=int, default=5, help="how often `start` and `restore.*` (default: %(default)s)"
    )
    options.add_argument("--lanes", type=int, default=2, help="windows at a time (default: %(default)s)")
    options.add_argument("--step", help="only the cases of this step")
    given = options.parse_args()
    lines = Lines()

    def say(case: Case) -> None:
        lines.say(f"{'ok ' if not case.wrong else 'BAD'} {case.seconds:5.1f} s  {case.name}")
        if case.wrong:
            lines.say(case.told())

    todo = [one for one in cases(given.times) if given.step in (None, one.keywords["step"])]
    with tempfile.TemporaryDirectory(prefix="fairtrial-kill-") as folder:
        done = play(todo, Path(folder), given.lanes, say)
    ways = ("killed, then restore", "killed, switch alone", "signalled")
    count = Counter((case.step, case.way) for case in done)
    well = Counter((case.step, case.way) for case in done if not case.wrong)
    print(f"{'step':18}" + "".join(f"{way:>22}" for way in ways))
    for step in KILLS:
        shown = [f"{well[step, way]} of {count[step, way]} ok" if count[step, way] else "" for way in ways]
        print(f"{step:18}" + "".join(f"{one:>22}" for one in shown))
    bad = sum(bool(case.wrong) for case in done)
    print(f"{len(done)} cases, {len(done) - bad} ok, {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trap"]:
        sys.exit(trap([Point(**point) for point in json.loads(sys.argv[2])], sys.argv[3:]))
    sys.exit(main())
