"""Backend ``local``: the host is this machine, and everything on it is real."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fairtrial.backends.base import Reply
from fairtrial.client import Call, Request
from fairtrial.errors import StepFailed
from fairtrial.identity import MARK


def _environ(mark: str | None) -> dict[str, str]:
    environ = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    return environ if mark is None else {**environ, MARK: mark}


class LocalPending:
    """A child in a session of its own: a Ctrl-C at the terminal does not reach it."""

    def __init__(self, argv: Sequence[str], stdin: bytes, mark: str | None) -> None:
        self._stdin: bytes | None = stdin
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environ(mark),
            cwd="/",
            start_new_session=True,
        )

    def poll(self, timeout_s: float) -> Reply | None:
        stdin, self._stdin = self._stdin, None
        try:
            stdout, stderr = self._process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return Reply(exit=self._process.returncode, stdout=stdout, stderr=stderr)

    def abandon(self) -> Reply:
        # Somebody reads on and waits for its end: a command whose output nobody reads would fail half-way.
        stdin, self._stdin = self._stdin, None
        threading.Thread(target=self._process.communicate, args=(stdin,), name="abandoned", daemon=True).start()
        return Reply(exit=None, stdout=b"", stderr=b"")


class LocalChannel:
    """A child whose lines a thread puts into a queue."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environ(None),
            cwd="/",
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="channel", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.decode(errors="replace").rstrip("\n"))

    def send(self, line: str) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return False
        return True

    def lines(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self._lines.get_nowait())
            except queue.Empty:
                return found

    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(1)
        if self._process.stdout is not None:
            self._process.stdout.close()


class Local:
    """This machine. ``program_file`` is the host program's zip."""

    tick_s = 0.05

    def __init__(self, program_file: Path) -> None:
        self._program_file = program_file

    def utc(self) -> float:
        return time.time()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def program(self, host: str, installed: str | None = None) -> tuple[str, ...]:
        return (sys.executable, "-S", "-E", installed or str(self._program_file))

    def command(self, host: str, argv: Sequence[str], *, stdin: bytes, mark: str | None) -> LocalPending:
        try:
            return LocalPending(argv, stdin, mark)
        except OSError as error:
            raise StepFailed(f"{host}: {argv[0]} does not start: {error.strerror}") from None

    def channel(self, host: str, argv: Sequence[str]) -> LocalChannel:
        try:
            return LocalChannel(argv)
        except OSError as error:
            raise StepFailed(f"{host}: {argv[0]} does not start: {error.strerror}") from None

    def put(self, host: str, path: str, content: bytes) -> None:
        target = Path(path)
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with aside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if aside.read_bytes() != content:
                aside.unlink()
                raise StepFailed(f"{host}: {path} does not read back as it was written: look at that disk")
            aside.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise StepFailed(f"{host}: cannot write {path}: {error.strerror}") from None

    def get(self, host: str, path: str) -> bytes | None:
        try:
            return Path(path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StepFailed(f"{host}: cannot read {path}: {error.strerror}") from None

    def request(self, call: Call) -> Request:
        request = Request(call)
        request.start()
        return request
