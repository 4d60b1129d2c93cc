"""One timed HTTP request, in a thread of its own, on a socket we own.

The thread only connects, sends, receives and stamps: the clock is read right after ``recv`` returns. Nothing is
retried. A fault is said in words of ours: neither what was asked nor what was answered is ever part of one.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import h11

from fairtrial.errors import EvidenceError, StepFailed
from fairtrial.stream import Answer, Measured, Stream, decode_answer, error_label

CONNECT_LIMIT_S = 10.0
BODY_LIMIT = 64 * 1024 * 1024
"""Bytes of a body that is not a stream."""
_DRAIN_S = 1.0
"""How long the end of the body is waited for once ``[DONE]`` has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a server listens, and the key it asks for (sent as a bearer token)."""

    host: str
    port: int
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What to ask, and how long it may take.

    ``limit_s`` bounds the whole request from connecting to the end; ``silence_limit_s`` the time in which no byte
    arrives (None: ``limit_s`` alone). ``stream`` says that the answer must be an event stream, ``usage_asked``
    that it must hold usage.
    """

    base: Endpoint
    path: str
    limit_s: float
    method: str = "POST"
    body: bytes | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    stream: bool = False
    usage_asked: bool = True
    silence_limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What became of one request.

    ``connect_ns`` is a duration; ``started_ns`` (just before the first byte was written on the open connection),
    ``headers_ns`` and ``end_ns`` are monotonic nanoseconds, None where it never came so far. ``measured`` is there
    once a stream began, whole or not; ``answer`` for a whole completion that did not stream; ``body`` for all
    other responses. ``fault`` is None if and only if the request did what was asked.
    """

    connect_ns: int | None
    started_ns: int | None
    headers_ns: int | None
    end_ns: int
    status: int | None
    measured: Measured | None
    answer: Answer | None
    body: bytes = field(repr=False)
    fault: str | None

    @property
    def ttft_ns(self) -> int | None:
        """From the first byte written to the first content that arrived."""
        if self.measured is None or self.started_ns is None or self.measured.first_content_ns is None:
            return None
        return self.measured.first_content_ns - self.started_ns

    @property
    def tpot_ns(self) -> float | None:
        """(end - first content) / (output tokens - 1), of a stream with two output tokens or more."""
        seen = self.measured
        if seen is None or seen.first_content_ns is None or seen.output_tokens is None or seen.output_tokens < 2:
            return None
        return (seen.end_ns - seen.first_content_ns) / (seen.output_tokens - 1)

    @property
    def itl_ns(self) -> tuple[int, ...]:
        """The gaps between content events, in order."""
        times = self.measured.content_ns if self.measured is not None else ()
        return tuple(later - sooner for sooner, later in itertools.pairwise(times))


class Clock(Protocol):
    """Where a request's times come from: the module ``time``, or a virtual clock."""

    def monotonic(self) -> float: ...

    def monotonic_ns(self) -> int: ...


class Wire(Protocol):
    """What is done with an open connection: a socket, or a simulated one."""

    def settimeout(self, value: float, /) -> None: ...

    def sendall(self, content: bytes, /) -> None: ...

    def recv(self, size: int, /) -> bytes: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class Stopped(Exception):
    """Why a request ends before its answer does; its text is ours alone."""


@dataclass(slots=True)
class _Seen:
    """What has come so far."""

    connect_ns: int | None = None
    started_ns: int | None = None
    headers_ns: int | None = None
    end_ns: int | None = None
    status: int | None = None
    stream: Stream | None = None
    body: bytearray = field(default_factory=bytearray)


class Request:
    """One request; runs once. ``done`` is set when it has ended, however it ended.

    ``local_port`` is our end of the connection, known before the server can see it.
    """

    def __init__(self, call: Call, clock: Clock = time) -> None:
        self.call = call
        self._clock = clock
        self.done = threading.Event()
        self.local_port: int | None = None
        self._deadline = 0.0
        self._lock = threading.Lock()
        self._sock: Wire | None = None
        self._closed = False
        self._exchange: Exchange | None = None
        self._thread = threading.Thread(target=self.run, name="fairtrial-request", daemon=True)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def poll(self, timeout_s: float) -> Exchange | None:
        """Wait at most ``timeout_s`` for the end; return the exchange, or None while it is under way."""
        self.done.wait(timeout_s)
        return self._exchange

    def close(self) -> None:
        """End the request now, from any thread; a request under way ends with the fault ``closed``."""
        with self._lock:
            self._closed = True
            if self._sock is not None:
                try:
                    # wakes the thread that connects, sends or receives; the thread itself closes
                    self._sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def run(self) -> Exchange:
        """Send the request and read the answer in this thread, and return what became of it. Raises nothing."""
        seen = _Seen()
        self._deadline = self._clock.monotonic() + self.call.limit_s
        fault: str | None = None
        try:
            self._connect(seen)
            self._converse(seen)
        except Stopped as stopped:
            fault = str(stopped)
        except Exception as error:  # a thread that died in silence would be waited for until the limit
            fault = f"internal error: {type(error).__name__}"
        finally:
            with self._lock:
                if self._sock is not None:
                    self._sock.close()
                    self._sock = None
        self._exchange = self._conclude(seen, fault)
        self.done.set()
        return self._exchange

    def _left_s(self, limit_s: float | None = None) -> float:
        left_s = self._deadline - self._clock.monotonic()
        if left_s <= 0:
            raise Stopped(f"no whole answer within {self.call.limit_s:g} s")
        return left_s if limit_s is None else min(left_s, limit_s)

    def _connect(self, seen: _Seen) -> None:
        base = self.call.base
        try:
            found = socket.getaddrinfo(base.host, base.port, type=socket.SOCK_STREAM)
        except OSError:
            raise Stopped("the host's name has no address") from None
        fault = None
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            began_ns = self._clock.monotonic_ns()
            fault = self._connected(sock, address)
            if fault is None:
                seen.connect_ns = self._clock.monotonic_ns() - began_ns
                return
        raise Stopped(f"no connection: {fault}")

    def _connected(self, sock: socket.socket, address: tuple[object, ...]) -> str | None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        with self._lock:
            if self._sock is not None:
                self._sock.close()
            self._sock = sock
            if self._closed:
                raise Stopped("closed")
            # bound before it connects, so that a guard never sees a connection of ours that it cannot know
            sock.bind(("", 0))
            self.local_port = sock.getsockname()[1]
            # begun under the lock: from here on, close() can shut the socket down
            code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            waiter = select.poll()
            waiter.register(sock, select.POLLOUT)
            if not waiter.poll(self._left_s(CONNECT_LIMIT_S) * 1000):
                return "no answer from the host"
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return os.strerror(code) if code else None

    def _converse(self, seen: _Seen) -> None:
        assert self._sock is not None
        sock = self._sock
        connection = h11.Connection(h11.CLIENT)
        content = self._request_bytes(connection)
        sock.settimeout(self._left_s())
        seen.started_ns = self._clock.monotonic_ns()
        try:
            sock.sendall(content)
        except TimeoutError:
            raise Stopped(f"the server did not take the request within {self.call.limit_s:g} s") from None
        except OSError:
            raise Stopped("the connection closed while the request was written") from None
        while seen.end_ns is None:
            content = self._receive(sock, seen)
            at_ns = self._clock.monotonic_ns()
            if self._read(connection, content, at_ns, seen):
                seen.end_ns = at_ns

    def _request_bytes(self, connection: h11.Connection) -> bytes:
        call = self.call
        host = f"[{call.base.host}]" if ":" in call.base.host else call.base.host
        headers = {
            "Host": f"{host}:{call.base.port}",
            "User-Agent": "fairtrial",
            "Accept": "text/event-stream" if call.stream else "*/*",
            "Connection": "close",
        }
        if call.body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(call.body))}
        if call.base.api_key is not None:
            headers["Authorization"] = f"Bearer {call.base.api_key}"
        headers |= call.headers
        request = h11.Request(method=call.method, target=call.path, headers=list(headers.items()))
        parts = [
            connection.send(request),
            connection.send(h11.Data(data=call.body or b"")),
            connection.send(h11.EndOfMessage()),
        ]
        return b"".join(part for part in parts if part)

    def _receive(self, sock: Wire, seen: _Seen) -> bytes:
        done = seen.stream is not None and seen.stream.done
        silence_limit_s = _DRAIN_S if done else self.call.silence_limit_s
        sock.settimeout(self._left_s(silence_limit_s))
        try:
            return sock.recv(65536)
        except TimeoutError:
            self._left_s()
            raise Stopped(f"the server sent nothing for {silence_limit_s:g} s") from None
        except OSError:
            raise Stopped("the connection broke before the end of the answer") from None

    def _read(self, connection: h11.Connection, content: bytes, at_ns: int, seen: _Seen) -> bool:
        """Take what arrived at ``at_ns``; return whether that was the end."""
        try:
            connection.receive_data(content)
            while True:
                event = connection.next_event()
                if isinstance(event, h11.Response):
                    self._begin(event, at_ns, seen)
                elif isinstance(event, h11.Data):
                    if self._take(bytes(event.data), at_ns, seen):
                        return True
                elif isinstance(event, h11.EndOfMessage):
                    return True
                elif not isinstance(event, h11.InformationalResponse):
                    return False
        except h11.RemoteProtocolError:
            # its message may quote the body
            pass
        if content:
            raise Stopped("what the server sent is not HTTP/1.1")
        raise Stopped(f"the connection closed before the {'end' if seen.status else 'start'} of the answer")

    def _begin(self, response: h11.Response, at_ns: int, seen: _Seen) -> None:
        seen.headers_ns, seen.status = at_ns, response.status_code
        if self.call.stream and seen.status == 200:
            kind = dict(response.headers).get(b"content-type", b"")
            if kind.partition(b";")[0].strip().lower() != b"text/event-stream":
                raise Stopped("the answer is not an event stream (its content type is another)")
            seen.stream = Stream(usage_asked=self.call.usage_asked)

    def _take(self, content: bytes, at_ns: int, seen: _Seen) -> bool:
        if seen.stream is not None:
            seen.stream.feed(content, at_ns)
            return seen.stream.broken is not None
        seen.body += content
        if len(seen.body) > BODY_LIMIT:
            raise Stopped(f"the body is longer than {BODY_LIMIT} bytes")
        return False

    def _conclude(self, seen: _Seen, fault: str | None) -> Exchange:
        end_ns = self._clock.monotonic_ns() if seen.end_ns is None else seen.end_ns
        measured = None if seen.stream is None else seen.stream.end(end_ns)
        answer, body = None, bytes(seen.body)
        if measured is not None:
            whole = measured.fault is None
            fault = None if whole else "; ".join(filter(None, (fault, measured.fault)))
        elif fault is None and seen.status != 200:
            label = error_label(body)
            fault = f"HTTP status {seen.status}" + (f": {label}" if label else "")
        elif fault is None and self.call.path.endswith("/completions"):
            try:
                answer, body = decode_answer(body), b""
            except EvidenceError as error:
                fault = str(error)
        if fault is not None and self._closed:
            fault = "closed"
        return Exchange(
            connect_ns=seen.connect_ns,
            started_ns=seen.started_ns,
            headers_ns=seen.headers_ns,
            end_ns=end_ns,
            status=seen.status,
            measured=measured,
            answer=answer,
            body=body,
            fault=fault,
        )


def fetch(base: Endpoint, path: str, limit_s: float) -> tuple[int, bytes]:
    """GET a path in this thread, and return the status (200 or not) and the body.

    Raises ``StepFailed`` where no whole response came within ``limit_s``.
    """
    exchange = Request(Call(base=base, method="GET", path=path, limit_s=limit_s)).run()
    if exchange.status is None or (exchange.status == 200 and exchange.fault is not None):
        raise StepFailed(f"GET {path} on {base.host}:{base.port}: {exchange.fault}")
    return exchange.status, exchange.body
