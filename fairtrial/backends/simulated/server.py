"""A simulated model server in vLLM's dialect: what a real one would compute, after the time it takes.

Its answers are planted words, and it logs what it is asked: so a rehearsal sees whether any of it is ever kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fairtrial.backends.simulated.clock import NS
from fairtrial.backends.simulated.kernel import GIB, Connection, Host, Process
from fairtrial.errors import Refused
from fairtrial.experiment import Experiment
from fairtrial.identity import option

WORDS = ("quokkaquay", "zebradrupe", "mangrovian", "oxbowlarch", "velvetpike", "tundrafern")
"""The planted words: of these alone every answer is made."""

READY_S = 0.6
"""From a server's start to its first listening socket."""
HELD_B = 12 * GIB
LONGEST_S = 1.0
"""The prefill of the longest prompt on the slowest arm, virtual seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How servers of one experiment behave. ``slowness``: a process's prefill, as a part of the slowest arm's."""

    experiment: Experiment
    slowness: Callable[[Process], float]
    bases: Mapping[str, str]
    """What production itself loads: target -> SHA-256."""

    def prefill_s(self, process: Process, tokens: int) -> float:
        protocol = self.experiment.protocol
        longest = max(cell.prompt_tokens for cell in protocol.cells)
        return 0.002 + min(LONGEST_S, protocol.limit_s / 4) * self.slowness(process) * tokens / longest


class Server:
    """One running server."""

    def __init__(self, process: Process, model: Model) -> None:
        self.process, self.model = process, model
        self.seen: set[tuple[str, str]] = set()
        self.running = 0
        self.extra = 0
        """Requests of others that it counts as running: a rehearsal's stranger."""
        self.finished = self.prompt_tokens = self.generated = self.hits = 0

    def serve(self, connection: Connection) -> Iterator[tuple[float, bytes]]:
        """Answer one request, piece by piece."""
        _, path, body = connection.parsed()
        server = self.model.experiment.server
        if path == server.completions:
            yield from self._complete(json.loads(body))
        elif path == server.tokenize:
            yield 0.001, _json({"tokens": self._tokens(json.loads(body)["prompt"])})
        elif path == server.metrics:
            yield 0.001, _http(200, "text/plain", self._metrics().encode())
        elif path == server.ready:
            yield 0.001, _http(200, "text/plain", b"")
        elif path == server.sources:
            yield 0.001, _json({"sources": self._sources()})
        elif path in server.reported:
            yield 0.001, _json({"version": "simulated", "path": path})
        else:
            yield 0.001, _http(404, "text/plain", b"")

    def _complete(self, asked: Mapping[str, Any]) -> Iterator[tuple[float, bytes]]:
        prompt: list[int] = asked["prompt"]
        count = int(asked["max_tokens"])
        key = hashlib.sha256(repr(prompt).encode()).hexdigest()
        cached = len(prompt) if (key, asked.get("cache_salt", "")) in self.seen else 0
        self.seen.add((key, asked.get("cache_salt", "")))
        # an answer shorter than the runs by which a kept line is known could not be told from any other word
        self._log(
            f"request prompt_token_ids={prompt[:40]} answer={self._answer(key, 0, count) if count > 3 else count}"
        )
        self.running += 1
        try:
            prefill_s = self.model.prefill_s(self.process, len(prompt))
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": cached},
            }
            if asked.get("stream"):
                yield from self._stream(key, count, prefill_s, usage)
            else:
                choice: dict[str, Any] = {"index": 0, "text": self._answer(key, 0, count), "finish_reason": "length"}
                if asked.get("logprobs"):
                    choice["logprobs"] = {"top_logprobs": [self._top(int(asked["logprobs"]))]}
                document = {"model": self.model.experiment.server.model, "choices": [choice], "usage": usage}
                yield prefill_s, b""
                self._count(len(prompt), count, cached)
                yield 0.0, _json(document)
        finally:
            self.running = max(0, self.running - 1)

    def _stream(
        self, key: str, count: int, prefill_s: float, usage: Mapping[str, Any]
    ) -> Iterator[tuple[float, bytes]]:
        yield 0.0, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        pieces = min(count, 4)
        for piece in range(pieces):
            first, last = piece * count // pieces, (piece + 1) * count // pieces
            choice = {
                "index": 0,
                "text": self._answer(key, first, last),
                "token_ids": self._ids(key, first, last),
                "finish_reason": "length" if piece == pieces - 1 else None,
            }
            event = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            yield (prefill_s if piece == 0 else 0.02), event
        self._count(usage["prompt_tokens"], count, usage["prompt_tokens_details"]["cached_tokens"])
        yield 0.0, f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()

    def _count(self, prompt: int, generated: int, cached: int) -> None:
        self.running = max(0, self.running - 1)
        self.finished += 1
        self.prompt_tokens += prompt
        self.generated += generated
        self.hits += cached

    def _answer(self, key: str, first: int, last: int) -> str:
        begin = int(key[:8], 16)
        return "".join(f" {WORDS[(begin + at * at) % len(WORDS)]}" for at in range(first, min(last, first + 40)))

    def _ids(self, key: str, first: int, last: int) -> list[int]:
        low, high = self.model.experiment.protocol.token_ids
        begin = int(key[:8], 16)
        return [low + (begin + 7919 * at * at) % (high - low) for at in range(first, last)]

    def _tokens(self, text: str) -> list[int]:
        low, high = self.model.experiment.protocol.token_ids
        return [low + ord(character) % (high - low) for character in text]

    def _top(self, count: int) -> dict[str, float]:
        low = self.model.experiment.protocol.token_ids[0]
        weights = [0.5**at for at in range(1, count + 1)]
        return {f"token_id:{low + at}": math.log(weight / sum(weights) * 0.9999) for at, weight in enumerate(weights)}

    def _metrics(self) -> str:
        values = {
            "vllm:num_requests_running": self.running + self.extra,
            "vllm:num_requests_waiting": 0,
            "vllm:request_success_total": self.finished,
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:generation_tokens_total": self.generated,
            "vllm:prefix_cache_hits_total": self.hits,
        }
        return "".join(f"{name} {value}\n" for name, value in values.items())

    def _sources(self) -> dict[str, str]:
        found = dict(self.model.bases)
        template = self.model.experiment.server.mount_argument
        if template is not None:
            pattern = re.compile(
                re.escape(template).replace(r"\{target\}", "(?P<target>.+?)").replace(r"\{source\}", "(?P<source>.+)")
            )
            for word in self.process.argv:
                mounted = pattern.fullmatch(word)
                if mounted:
                    content = self.process.host.inode(mounted["source"]).content
                    found[mounted["target"]] = hashlib.sha256(content).hexdigest()
        return found

    def _log(self, line: str) -> None:
        inode = self.process.host.inodes.get(self.process.log or "")
        if inode is not None:
            inode.content += line.encode() + b"\n"


def start(model: Model) -> Callable[[Host, Process], None]:
    """What a started server does: load, then listen, until it is told to end."""

    def begin(host: Host, process: Process) -> None:
        server = Server(process, model)
        process.server = server
        port = option(process.argv, model.experiment.server.port_argument)

        def up() -> None:
            # What it logs at its start are the tells of what it runs with.
            for arm in model.experiment.arms:
                for tell in arm.tells:
                    if runs(process, model.experiment, arm.name):
                        server._log(example(tell.log))
            process.held_b = HELD_B
            host.clock.sleep(READY_S)
            process.ports[int(port or 0)] = server.serve

        def asked(number: int, frame: object) -> None:
            def end() -> None:
                host.clock.sleep(0.05)
                host.exit(process, 0)

            host.run(process, end)

        process.handlers[signal.SIGTERM] = asked
        host.run(process, up)

    return begin


def runs(process: Process, experiment: Experiment, arm: str) -> bool:
    """Whether a process is what an arm declares: all its variables and arguments are there."""
    declared = experiment.arm(arm)
    environment = all(
        process.environ.get(name) == value for name, value in declared.environment.items() if isinstance(value, str)
    )
    arguments = all(
        option(process.argv, name) == value for name, value in declared.arguments.items() if isinstance(value, str)
    )
    overlay = declared.overlay is None or any(f"/{declared.overlay}/" in word for word in process.argv)
    return (
        environment and arguments and overlay and bool(declared.environment or declared.arguments or declared.overlay)
    )


def example(pattern: str) -> str:
    """A line that a tell's pattern finds. Raises ``Refused`` for a pattern that none is found for."""
    try:
        parse = import_module("re._parser").parse
        found = "".join(_example(*item) for item in parse(pattern))
    except (ImportError, AttributeError, KeyError, TypeError, ValueError):
        found = ""
    if not re.search(pattern, found, re.MULTILINE):
        raise Refused(f"tells: no line is found here that {pattern} would match: rehearse with a plainer pattern")
    return found


_CLASSES = {"CATEGORY_DIGIT": "0", "CATEGORY_WORD": "a", "CATEGORY_SPACE": " "}
_CLASSES |= {"CATEGORY_NOT_DIGIT": "a", "CATEGORY_NOT_WORD": " ", "CATEGORY_NOT_SPACE": "a"}


def _example(kind: Any, value: Any) -> str:
    """What matches one part of a parsed pattern, the shortest that is simple."""
    name = str(kind)
    if name == "LITERAL":
        return chr(value)
    if name == "ANY":
        return "x"
    if name == "NOT_LITERAL":
        return "x" if value != ord("x") else "y"
    if name in ("AT", "ASSERT_NOT"):
        return ""
    if name == "IN":
        if str(value[0][0]) == "NEGATE":
            taken = {_example(*one) for one in value[1:]}
            return next(letter for letter in "x0 -." if letter not in taken)
        return _example(*value[0])
    if name == "RANGE":
        return chr(value[0])
    if name == "CATEGORY":
        return _CLASSES[str(value)]
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        low, _, part = value
        return "".join(_example(*one) for one in part) * int(low)
    if name == "SUBPATTERN":
        return "".join(_example(*one) for one in value[-1])
    if name == "BRANCH":
        return "".join(_example(*one) for one in value[1][0])
    raise ValueError(name)


def _json(document: object) -> bytes:
    return _http(200, "application/json", json.dumps(document).encode())


def _http(status: int, kind: str, content: bytes) -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    return head.encode() + content


__all__ = ["HELD_B", "NS", "WORDS", "Model", "Server", "runs", "start"]
