"""An HTTP server on a raw socket that plays a script: what real servers do when they break, and worse.

    with serve(head(), event(chunk("a")), CUT) as server:
        ...  # each connection: the request is read whole, then the script is played, then the connection closes

A script's steps: bytes are written; an ``Event`` is waited for; ``Drip`` writes byte by byte; ``HOLD`` waits until
the client has gone (and sets ``server.left``); ``FLOOD`` writes keep-alives until then; ``RESET`` breaks the
connection; ``READ`` reads the request now, where the server was told ``read=False``.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

from fairtrial.client.request import Endpoint

PATIENCE_S = 20.0


class Act(Enum):
    HOLD = auto()
    RESET = auto()
    FLOOD = auto()
    READ = auto()


HOLD, RESET, FLOOD, READ = Act.HOLD, Act.RESET, Act.FLOOD, Act.READ


@dataclass(frozen=True)
class Drip:
    content: bytes


Step = bytes | threading.Event | Act | Drip


def head(status: str = "200 OK", kind: str = "text/event-stream", length: int | None = None) -> bytes:
    """A response's head; without a length the body is chunked."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\n{framing}\r\n\r\n".encode()


def framed(content: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(content), content)


def event(value: object) -> bytes:
    """One HTTP chunk that holds one server-sent event: JSON of a value, or a string as it is."""
    text = value if isinstance(value, str) else json.dumps(value)
    return framed(f"data: {text}\n\n".encode())


def text_chunk(text: str, finish_reason: str | None = None, **more: object) -> dict[str, object]:
    """A completion chunk as vLLM writes it."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason, **more}]}


def usage_chunk(prompt: int, output: int, cached: int | None = 0) -> dict[str, object]:
    """vLLM's last chunk before the end mark; ``cached`` None leaves the details out."""
    usage: dict[str, object] = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"choices": [], "usage": usage}


DONE = event("[DONE]")
END = b"0\r\n\r\n"


def whole(*texts: str, prompt: int = 5, cached: int | None = 0) -> tuple[bytes, ...]:
    """The script of a stream that is whole: one event for each text."""
    events = [event(text_chunk(text)) for text in texts[:-1]]
    last = event(text_chunk(texts[-1], "length"))
    return (head(), *events, last, event(usage_chunk(prompt, len(texts), cached)), DONE, END)


class Server:
    """The other side of the script: ``requests`` as raw bytes; ``left`` is set once a client went during HOLD."""

    def __init__(self, script: tuple[Step, ...], *, read: bool) -> None:
        self.script = script
        self.read = read
        self.requests: list[bytes] = []
        self.peers: list[int] = []
        self.left = threading.Event()
        self.over = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint(host="127.0.0.1", port=self.listener.getsockname()[1])
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def stop(self) -> None:
        self.over.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(PATIENCE_S)
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self.listener.accept()
            except OSError:
                return
            self.peers.append(peer[1])
            thread = threading.Thread(target=self._play, args=(connection,), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _play(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(PATIENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                if self.read:
                    self.requests.append(_request(connection))
                for step in self.script:
                    self._do(connection, step)
            except OSError:
                return  # the client went first: its side of the story is what a test looks at

    def _do(self, connection: socket.socket, step: Step) -> None:
        if isinstance(step, bytes):
            connection.sendall(step)
        elif isinstance(step, Drip):
            for at in range(len(step.content)):
                connection.sendall(step.content[at : at + 1])
        elif isinstance(step, threading.Event):
            step.wait(PATIENCE_S)
        elif step is HOLD:
            while not self.over.is_set():
                if select.select([connection], [], [], 0.05)[0] and _is_gone(connection):
                    self.left.set()
                    return
        elif step is READ:
            self.requests.append(_request(connection))
        elif step is FLOOD:
            while not self.over.wait(0.005):
                connection.sendall(framed(b": keep-alive\n\n"))
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()


def _is_gone(connection: socket.socket) -> bool:
    try:
        return connection.recv(65536) == b""
    except OSError:
        return True


def _request(connection: socket.socket) -> bytes:
    content = b""
    while b"\r\n\r\n" not in content:
        content += _some(connection)
    top, _, body = content.partition(b"\r\n\r\n")
    lengths = [line for line in top.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    expected = int(lengths[0].partition(b":")[2]) if lengths else 0
    while len(body) < expected:
        body += _some(connection)
    return top + b"\r\n\r\n" + body


def _some(connection: socket.socket) -> bytes:
    content = connection.recv(65536)
    if not content:
        raise ConnectionResetError
    return content


@contextmanager
def serve(*script: Step, read: bool = True) -> Iterator[Server]:
    """Serve a script on a free port of the loopback. ``read=False``: it is played before any request is read."""
    server = Server(script, read=read)
    try:
        yield server
    finally:
        server.stop()
