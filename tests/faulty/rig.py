"""One window against the scripted server, from the command line, on real processes: run it, look at what is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faulty.faulty import ANSWER_WORD, ASKED_WORD, ERROR_WORD, PROMPT_WORD

from fairtrial.evidence import verify
from fairtrial.switch import procs

Json = dict[str, Any]
SERVER = Path(__file__).with_name("faulty.py")
PLANTED = (ANSWER_WORD, ERROR_WORD, PROMPT_WORD, ASKED_WORD)
PATIENCE_S = 60.0

_ports = iter(range(20000 + os.getpid() * 16 % 10000, 32700))


def free_port() -> int:
    """A port that nothing listens on, below those that the kernel gives to clients."""
    for port in _ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def wait_for(look: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Poll until ``look`` returns something true, and return it."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {patience_s:g} s")


def toml(value: Any) -> str:
    """A value in TOML's inline form."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return json.dumps(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that ended: its status, what it said, and the folder it wrote."""

    code: int
    stdout: str
    stderr: str
    out: Path

    @property
    def summary(self) -> Json:
        found: Json = json.loads((self.out / "summary.json").read_bytes())
        return found

    @property
    def ledger(self) -> list[Json]:
        return records(self.out)

    def of(self, kind: str) -> list[Json]:
        return [record for record in self.ledger if record["kind"] == kind]


def records(out: Path) -> list[Json]:
    """The whole lines of a window's ledger; empty while there is none."""
    try:
        content = (out / "ledger.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith("\n")]


class Rig:
    """A production, an experiment, and the windows that are run on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.port, self.arm_port = free_port(), free_port()
        self.argv: list[str] = []
        self.pid = 0
        self._started: list[subprocess.Popen[Any]] = []

    # ---- what is there before a window ------------------------------------------------------------------------

    def spawn(self, argv: Sequence[str], **environ: str) -> subprocess.Popen[bytes]:
        """Start a process in a session of its own; it is ended with the rig."""
        log = (self.folder / "spawned.log").open("ab")
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath), **environ},
            start_new_session=True,
        )
        log.close()
        self._started.append(process)
        return process

    def serve(self, fault: str = "", *, port: int | None = None, **environ: str) -> subprocess.Popen[bytes]:
        """Start a scripted server, production if no port is named, and wait until it listens."""
        argv = [sys.executable, str(SERVER), "--port", str(port or self.port), "--max-model-len", "4096"]
        argv += ["--fault", fault] if fault else []
        process = self.spawn(argv, **environ)
        wait_for(lambda: procs.listens(port or self.port), "the server listens")
        if port is None:
            self.argv, self.pid = argv, process.pid
        return process

    def experiment(self, **changes: Any) -> Json:
        """A small experiment: one arm, one cell twice, reading ``none``. Names in ``changes`` replace parts of it."""
        return {
            "schema": "fairtrial.experiment/1",
            "name": "faulty",
            "question": "Does it stop, and is production back?",
            "purpose": "a test of bad input",
            "hosts": {"here": {"state": str(self.state)}},
            "server": {"model": "faulty"},
            "production": {
                "host": "here",
                "port": self.port,
                "start_limit_s": 8,
                "stop_limit_s": 10,
                "grace_s": 2,
            },
            "arms": [{"name": "off", "port": self.arm_port}],
            "protocol": {
                "seed": "faulty 1",
                "token_ids": [0, 256],
                "limit_s": 20,
                "cells": [{"name": "long", "prompt_tokens": 64, "output_tokens": 4, "reps": 2}],
            },
            "waits": {
                "idle_s": 0.3,
                "idle_limit_s": 3,
                "still_s": 0.3,
                "settle_s": 0.5,
                "lease_s": 4,
                "retry_s": 1,
            },
            "guards": {"memory_min_gib": 0.05, "memory_floor_gib": 0.1, "cadence_s": 0.5},
            "reading": {"rule": "none", "cell": "long"},
        } | changes

    def arm(self, name: str = "off", fault: str = "", **more: Any) -> Json:
        """An arm, with a fault of its own."""
        arm: Json = {"name": name, "port": self.arm_port, **more}
        if fault:
            arm["arguments"] = {"--fault": fault, **more.get("arguments", {})}
        return arm

    def matched(self, *, fix: str = "") -> Json:
        """Arms, checks and reading of a matched window, whose limits let any timing through."""
        return {
            "arms": [
                self.arm("off", checks=["a", "aa"]),
                self.arm("cause", environment={"TRACE": "1"}),
                self.arm("fix", fix, environment={"FENCE": "1"}, checks=["b"]),
            ],
            "checks": {"greedy": {"prompts": 3, "prompt_tokens": 16, "output_tokens": 4}, "probe": {"tokens": 64}},
            "reading": {"rule": "match", "cell": "long", "off": "off", "cause": "cause", "fix": "fix"},
        }

    def write(self, experiment: Json) -> Path:
        path = self.folder / "experiment.toml"
        path.write_text("".join(f"{name} = {toml(value)}\n" for name, value in experiment.items()))
        return path

    # ---- the window -------------------------------------------------------------------------------------------

    def run(self, experiment: Json | None = None, *options: str, out: Path | None = None) -> Ended:
        """Run a window to its end."""
        with self.running(experiment, *options, out=out) as window:
            return window.ended()

    @contextmanager
    def running(
        self, experiment: Json | None = None, *options: str, out: Path | None = None, prefix: Sequence[str] = ()
    ) -> Iterator[Running]:
        """Run a window, and have it under way in the block."""
        path = self.write(experiment or self.experiment())
        out = out or self.folder / "out"
        words = ["run", str(path), "--execute", "--out", str(out), *options]
        window = Running(self, words, out, prefix)
        try:
            yield window
        finally:
            window.kill()

    def command(self, *words: str) -> Ended:
        """Run another command on the window's folder."""
        window = Running(self, list(words), self.folder / "out")
        try:
            return window.ended()
        finally:
            window.kill()

    # ---- what is left after it --------------------------------------------------------------------------------

    def serving(self) -> int | None:
        """The pid that listens on production's port, with production's own arguments."""
        found = procs.listeners(self.port)
        return found[0].pid if found and procs.argv(found[0].pid) == self.argv else None

    def assert_untouched(self) -> None:
        """Production is the process that was started, and nothing holds the host."""
        assert self.serving() == self.pid
        self.assert_free()

    def assert_back(self) -> None:
        """Production serves again as it was started, unmarked; nothing of a window runs or holds the host."""
        pid = self.serving()
        assert pid is not None
        assert procs.MARK not in (procs.environ(pid) or {})
        assert not procs.listens(self.arm_port)
        self.assert_free()
        last = json.loads((self.state / "last.json").read_bytes())
        assert last["state"] == "released"

    def assert_free(self) -> None:
        if self.state.exists():
            assert sorted(path.name for path in self.state.iterdir()) in ([], ["last.json", "lock"])
        assert list(procs.steps(str(self.state))) == []

    def assert_silent(self, ended: Ended) -> None:
        """No traceback, and none of the planted words anywhere.

        While a HOLD stays, the arm's own log lies in the host's folder, and goes when it is released.
        """
        held = any(self.state.glob("hold.json")) or any(self.state.glob("term-*.json"))
        for said in (ended.stdout, ended.stderr):
            assert "Traceback" not in said
            assert not [word for word in PLANTED if word in said]
        for path in [*ended.out.rglob("*"), *self.state.rglob("*")]:
            if path.is_file() and not (held and path.name.startswith(".log-")):
                content = path.read_bytes()
                found = [word for word in PLANTED if word.encode() in content]
                assert not found, f"{path}: {found}"

    def assert_sealed(self, ended: Ended) -> None:
        assert verify(ended.out).problems == ()

    def close(self) -> None:
        """End what was started here, and what windows left of it."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for step in procs.steps(str(self.state)):
            procs.send(step["pid"], step["start"], signal.SIGKILL)
        for port in (self.port, self.arm_port):
            for one in procs.listeners(port):
                if str(SERVER) in procs.argv(one.pid):
                    procs.send(one.pid, one.start, signal.SIGKILL)
        wait_for(lambda: not procs.listens(self.port) and not procs.listens(self.arm_port), "the servers are gone")


class Running:
    """A command under way."""

    def __init__(self, rig: Rig, words: list[str], out: Path, prefix: Sequence[str] = ()) -> None:
        self.rig = rig
        self.out = out
        self._said = (rig.folder / f"{words[0]}.stdout", rig.folder / f"{words[0]}.stderr")
        stdout, stderr = (path.open("wb") for path in self._said)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "fairtrial", *words],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, "FAIRTRIAL_STATE": str(rig.state), "NO_COLOR": "1"},
        )
        stdout.close()
        stderr.close()

    def seen(self, kind: str, **fields: Any) -> Json:
        """Wait for a record in the ledger, and return it."""

        def look() -> Json | None:
            matching = (
                record
                for record in records(self.out)
                if record["kind"] == kind and all(record.get(name) == value for name, value in fields.items())
            )
            found = next(matching, None)
            if found is None and self.process.poll() is not None:
                raise AssertionError(f"it ended before {kind} {fields}: {self._said[1].read_text()[-2000:]}")
            return found

        return wait_for(look, f"{kind} {fields}")

    def ended(self) -> Ended:
        """Wait for the end; what every command must hold is checked."""
        code = self.process.wait(PATIENCE_S)
        stdout, stderr = (path.read_text() for path in self._said)
        ended = Ended(code=code, stdout=stdout, stderr=stderr, out=self.out)
        self.rig.assert_silent(ended)
        return ended

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
