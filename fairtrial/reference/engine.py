"""Serves requests one at a time, in a thread of its own: chunked prefill, then greedy decoding."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fairtrial.reference.model import Context, Model, log_softmax
from fairtrial.reference.prefix import PrefixCache
from fairtrial.reference.shape import BLOCK, Floats
from fairtrial.reference.tokens import END


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to generate: prompt ids, and at least ``min_tokens``, at most ``max_tokens`` after them.

    ``top`` is how many of the likeliest tokens are reported with each token; ``None``: no logprobs.
    """

    ids: list[int]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    salt: str | None = None
    top: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One generated token. ``top`` is (token id, logprob in nats), likeliest first; ``finish`` is set on the last;
    ``cached_tokens`` is how many prompt tokens came from the prefix cache."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    finish: str | None
    cached_tokens: int


Deliver = Callable[[Token | None], None]
"""Takes each token in the engine's thread; ``None`` ends an answer that stays unfinished."""


@dataclass(kw_only=True, slots=True)
class Counters:
    """What ``/metrics`` reports: gauges of requests, totals of requests and tokens."""

    running: int = 0
    waiting: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0})
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


class Ticket:
    """A submitted request."""

    def __init__(self, request: Request, deliver: Deliver) -> None:
        self.request = request
        self.deliver = deliver
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        """Give the request up: it ends with the chunk or token that is being computed."""
        self.cancelled.set()


class Engine:
    """The one that runs the model."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._prefixes = PrefixCache()
        self._counters = Counters()
        self._queue: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.failed = False
        """True once the model raised: the engine serves no more."""
        # A daemon, so that the process can end in the middle of a chunk.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        """Queue a request, whose tokens go to ``deliver``; an engine that is closed delivers ``None``."""
        ticket = Ticket(request, deliver)
        with self._changed:
            self._queue.append(ticket)
            self._counters.waiting += 1
            self._changed.notify()
        return ticket

    def counters(self) -> Counters:
        """Return a copy of the counters, all of one instant."""
        with self._changed:
            now = self._counters
            return Counters(
                running=now.running,
                waiting=now.waiting,
                finished=dict(now.finished),
                prompt_tokens=now.prompt_tokens,
                generation_tokens=now.generation_tokens,
                prefix_queries=now.prefix_queries,
                prefix_hits=now.prefix_hits,
            )

    def close(self) -> None:
        """End every request, the one that runs after its chunk. Takes no lock: a signal handler may call it."""
        self._closed = True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                ticket = self._queue.popleft()
                self._counters.waiting -= 1
                self._counters.running += 1
            finished = False
            try:
                finished = not self.failed and self._serve(ticket)
            except Exception:
                self.failed = True
                traceback.print_exc()
            if not finished:
                with self._changed:
                    self._counters.running -= 1
                ticket.deliver(None)

    def _serve(self, ticket: Ticket) -> bool:
        request = ticket.request
        context, hidden = Context(self._model.shape), None
        keys = self._prefixes.keys(request.ids, request.salt)
        for block in self._prefixes.find(keys, len(request.ids)):
            context.append_block(block)
        cached = context.tokens
        with self._changed:
            self._counters.prefix_queries += len(request.ids)
            self._counters.prefix_hits += cached
        while context.tokens < len(request.ids):
            if self._closed or ticket.cancelled.is_set():
                return False
            start, end = context.tokens, self._model.chunk_end(context.tokens, len(request.ids))
            hidden = self._model.forward(request.ids[start:end], context)
            if end % BLOCK == 0:
                self._prefixes.add(keys[end // BLOCK - 1], context.block(end - BLOCK))
        assert hidden is not None
        with self._changed:
            self._counters.prompt_tokens += len(request.ids)
        for count in range(1, request.max_tokens + 1):
            token = self._choose(self._model.logits(hidden[-1:])[0], request, count, cached)
            with self._changed:
                self._counters.generation_tokens += 1
                if token.finish:
                    # Counted before the client can know, so that who reads the counters next finds them whole.
                    self._counters.running -= 1
                    self._counters.finished[token.finish] += 1
            ticket.deliver(token)
            if token.finish:
                return True
            if self._closed or ticket.cancelled.is_set():
                return False
            hidden = self._model.forward([token.id], context)
        return False

    @staticmethod
    def _choose(logits: Floats, request: Request, count: int, cached: int) -> Token:
        if request.ignore_eos or count <= request.min_tokens:
            logits = logits.copy()
            logits[END] = -np.inf
        chosen = int(logits.argmax())
        finish = "stop" if chosen == END else "length" if count == request.max_tokens else None
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if request.top is not None:
            logprobs = log_softmax(logits)
            order = np.argsort(-logprobs, kind="stable")[: request.top]
            logprob = float(logprobs[chosen])
            top = tuple((int(token), float(logprobs[token])) for token in order)
        return Token(id=chosen, logprob=logprob, top=top, finish=finish, cached_tokens=cached)
