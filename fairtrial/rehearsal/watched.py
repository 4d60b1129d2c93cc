"""Backend and store as one actor sees them: every use is an effect, and where a fault is due it fires there instead."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairtrial.backends.base import Channel, Pending, Reply
from fairtrial.backends.simulated import Killed, Memory, Simulated
from fairtrial.backends.simulated.backend import SimulatedChannel, SimulatedRequest
from fairtrial.client import Call, Exchange
from fairtrial.errors import StepFailed
from fairtrial.rehearsal.effects import CHANGING, Effects


def described(argv: Sequence[str], stdin: bytes) -> tuple[str, str, list[str]]:
    """A command as kind, name and verbs."""
    at = next((number for number, word in enumerate(argv) if word.endswith("host.pyz")), None)
    if at is None:
        return "command", argv[0], []
    mode = argv[at + 1]
    payload = json.loads(stdin) if stdin.strip() else {}
    verbs = [str(verb["verb"]) for verb in payload.get("verbs", [])]
    shown = " ".join([mode, *verbs, *([str(payload["step"])] if "step" in payload else [])])
    return "verb" if any(verb in CHANGING for verb in verbs) else "command", shown, verbs


class Answered:
    """A command that has ended before it began."""

    def __init__(self, reply: Reply | None, world: Simulated) -> None:
        self.reply, self.world = reply, world

    def poll(self, timeout_s: float) -> Reply | None:
        self.world.sleep(timeout_s if self.reply is None else 0.01)
        return self.reply

    def abandon(self) -> Reply:
        return Reply(exit=None, stdout=b"", stderr=b"")


class Waited:
    """A command under way, whose waits are effects too. ``lost``: its reply never arrives."""

    def __init__(self, pending: Pending, effects: Effects, world: Simulated, *, lost: bool = False) -> None:
        self.pending, self.effects, self.world, self.lost = pending, effects, world, lost

    def poll(self, timeout_s: float) -> Reply | None:
        stall(self.effects.meet("wait", "for a command"), self.world)
        reply = self.pending.poll(timeout_s)
        return Reply(exit=None, stdout=b"", stderr=b"") if reply is not None and self.lost else reply

    def abandon(self) -> Reply:
        return self.pending.abandon()


STALL_S = 100.0


def stall(fault: str | None, world: Simulated) -> None:
    """The control host stood still (asleep, or the runner stopped) for longer than a lease lives."""
    if fault == "stall":
        world.sleep(max(3 * world.lease_s, STALL_S))


class Lines:
    """A channel whose lines and renewals are effects."""

    def __init__(self, channel: Channel, mode: str, name: str, effects: Effects, *, mute: bool = False) -> None:
        self.channel, self.mode, self.name, self.effects, self.mute = channel, mode, name, effects, mute

    def send(self, line: str) -> bool:
        if line == "renew":
            fault = self.effects.meet("renewal", self.name)
            if fault == "error":
                return False
            if fault == "lost":
                return True
        return self.channel.send(line)

    def lines(self) -> list[str]:
        if self.effects.dead:
            raise Killed
        found = self.channel.lines()
        if found and not self.mute:
            fault = self.effects.meet("sample" if self.mode == "read" else "answer", self.name)
            self.mute = self.mute or fault == "hang"
            if fault == "lie":
                found = [line.replace('"available_b": ', '"available_b": "x", "was": ') for line in found]
        return [] if self.mute else found

    def ended(self) -> bool:
        return self.channel.ended()

    def close(self) -> None:
        if not self.effects.dead:
            self.channel.close()


class Asked:
    """A request whose waits are effects; ``altered`` changes what comes back."""

    def __init__(self, request: SimulatedRequest, effects: Effects, world: Simulated, fault: str | None) -> None:
        self.request, self.effects, self.world, self.fault = request, effects, world, fault
        self.done = request.done

    @property
    def local_port(self) -> int | None:
        return self.request.local_port

    def poll(self, timeout_s: float) -> Exchange | None:
        if timeout_s > 0:
            stall(self.effects.meet("wait", "for an answer"), self.world)
        exchange = self.request.poll(timeout_s)
        return lied(exchange) if self.fault == "lie" and exchange is not None else exchange

    def close(self) -> None:
        self.request.close()


def lied(exchange: Exchange) -> Exchange:
    """An answer that is whole and is not what was asked for."""
    if exchange.measured is not None:
        return replace(exchange, measured=replace(exchange.measured, prompt_tokens=1))
    if exchange.answer is not None:
        return replace(exchange, answer=replace(exchange.answer, prompt_tokens=1))
    return replace(exchange, body=b"{}")


class Watched:
    """A simulated world as one actor sees it: a ``Backend`` whose every use is an effect."""

    def __init__(self, world: Simulated, effects: Effects, ready: str) -> None:
        self.world, self.effects = world, effects
        self.ready = ready
        """The path of readiness: only whether it answers counts, so what it says cannot lie or be lost."""
        self.tick_s = world.tick_s
        self.channels: list[SimulatedChannel] = []
        self.requests: list[SimulatedRequest] = []

    def utc(self) -> float:
        return self.world.utc()

    def monotonic_ns(self) -> int:
        return self.world.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        stall(self.effects.meet("wait", "a pause"), self.world)
        self.world.sleep(seconds)

    def program(self, host: str, installed: str | None = None) -> tuple[str, ...]:
        return self.world.program(host, installed)

    def command(self, host: str, argv: Sequence[str], *, stdin: bytes, mark: str | None) -> Pending:
        kind, what, verbs = described(argv, stdin)
        what = self._on(host, what)
        fault = self.effects.meet(kind, what)
        if fault == "error":
            told = b'{"ok": false, "message": "rehearsed: an input/output error"}\n'
            return Answered(Reply(exit=1, stdout=told, stderr=b""), self.world)
        if fault == "hang":
            return Answered(None, self.world)
        if fault == "lie":
            rows = [*({"verb": verb, "ok": True, **CLAIMS.get(verb, {})} for verb in verbs), {"ok": True}]
            return Answered(Reply(exit=0, stdout="\n".join(map(json.dumps, rows)).encode(), stderr=b""), self.world)
        if kind == "verb":
            self.effects.write_ahead(what)
        pending = self.world.command(host, argv, stdin=stdin, mark=mark)
        if fault == "kill during":
            self.world.sleep(0.01)
            self.effects.kill()
        if fault == "kill after":
            while pending.poll(1.0) is None:
                pass
            self.effects.kill()
        return Waited(pending, self.effects, self.world, lost=fault == "lost reply")

    def channel(self, host: str, argv: Sequence[str]) -> Channel:
        mode = described(argv, b"")[1]
        what = self._on(host, mode)
        fault = self.effects.meet("channel", what)
        channel = self.world.channel(host, argv)
        self.channels.append(channel)
        if fault == "error":
            channel.close()
        if fault == "kill after":
            self.world.sleep(0.1)
            self.effects.kill()
        return Lines(channel, mode, what, self.effects, mute=fault == "hang")

    def _on(self, host: str, what: str) -> str:
        return f"{what} @{host}" if len(self.world.hosts) > 1 else what

    def put(self, host: str, path: str, content: bytes) -> None:
        fault = self.effects.meet("put", self._on(host, _short(path)))
        if fault == "error":
            raise StepFailed(f"{host}: cannot write {path}: Input/output error")
        if fault == "torn write":
            self.world.put(host, path + ".torn", content[: len(content) // 2])
            raise StepFailed(f"{host}: cannot write {path}: its end was not seen")
        if fault != "lie":
            self.world.put(host, path, content)
        if fault == "kill after":
            self.effects.kill()

    def get(self, host: str, path: str) -> bytes | None:
        fault = self.effects.meet("read", self._on(host, _short(path)))
        if fault == "error":
            raise StepFailed(f"{host}: cannot read {path}: Input/output error")
        found = self.world.get(host, path)
        if fault == "kill after":
            self.effects.kill()
        return b"not what is there" if fault == "lie" else found

    def request(self, call: Call) -> Asked:
        fault = self.effects.meet("request" if call.path != self.ready else "knock", f"{call.method} {call.path}")
        request = self.world.asked(call)
        self.requests.append(request)
        if fault == "hang":
            request.hangs = True
        elif fault == "error":
            request.refused = True
        elif fault == "lost reply":
            request.cut = True
        request.start()
        if fault == "kill during":
            self.world.sleep(0.002)
            self.effects.kill()
        return Asked(request, self.effects, self.world, fault)

    def end(self) -> None:
        """The actor is gone: what it had open is closed, and what it had begun on the hosts goes on."""
        for channel in self.channels:
            channel.hang_up()
        for request in self.requests:
            request.end()


CLAIMS: Mapping[str, dict[str, Any]] = {
    "end": {"ended": [], "took_s": 0.1, "held_b": 0},
    "start": {"started": True, "pid": 4242, "start": 4242},
    "install": {"restore_sha256": "0" * 64},
    "arm": {"armed": True},
    "off": {"released": True},
    "record": {},
}
"""What a verb that lies says."""


class Kept:
    """A store as one actor sees it: every change is an effect."""

    def __init__(self, memory: Memory, effects: Effects) -> None:
        self.memory, self.effects = memory, effects

    @property
    def low(self) -> bool:
        return self.memory.low

    def _change(
        self, what: str, name: str, content: bytes, torn: Callable[[], None], change: Callable[[], None]
    ) -> None:
        fault = self.effects.meet("write", what)
        self.effects.unwritable = self.effects.unwritable or fault in ("error", "full disk")
        if fault == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        if fault == "full disk":
            self.memory.full = True
        if fault == "torn write":
            torn()
            self.effects.kill()
        change()
        if fault == "kill after":
            self.effects.kill()

    def write(self, name: str, content: bytes) -> None:
        def torn() -> None:
            self.memory.files[f"{name}.partial"] = bytearray(content[: len(content) // 2])

        self._change(f"write {name}", name, content, torn, lambda: self.memory.write(name, content))

    def append(self, name: str, content: bytes) -> None:
        shown = f"append {name}"
        if name == "ledger.jsonl":
            record = json.loads(content)
            if record["kind"] in ("begin", "restorer"):
                # The step begins with this record: a fault in writing it is the step's own.
                self.effects.step = str(record.get("step", "restorer"))
            shown += f" {record['kind']}"

        def torn() -> None:
            self.memory.append(name, content[: len(content) // 2])

        self._change(shown, name, content, torn, lambda: self.memory.append(name, content))

    def remove(self, name: str) -> None:
        self._change(f"remove {name}", name, b"", lambda: None, lambda: self.memory.remove(name))

    def truncate(self, name: str, size_bytes: int) -> None:
        self._change(f"cut {name}", name, b"", lambda: None, lambda: self.memory.truncate(name, size_bytes))

    def read(self, name: str) -> bytes:
        return self.memory.read(name)

    def digest(self, name: str) -> str:
        return self.memory.digest(name)

    def names(self) -> list[str]:
        return self.memory.names()

    def exists(self, name: str) -> bool:
        return self.memory.exists(name)

    def anchor(self, name: str) -> None:
        self.memory.anchor(name)

    def release_reserve(self) -> None:
        self.memory.release_reserve()

    def close(self) -> None:
        self.memory.close()


def _short(path: str) -> str:
    return "/".join(path.split("/")[-2:])
