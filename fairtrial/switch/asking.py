"""One HTTP exchange with a server on this host, and what of its answer may be told."""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Callable

from .state import Json


class Unanswered(Exception):
    """No whole answer came. The message holds no byte of it."""


def exchange(
    host: str,
    port: int,
    path: str,
    *,
    body: Json | None = None,
    headers: dict[str, str] | None = None,
    limit_s: float = 10.0,
    tick: Callable[[], None] = lambda: None,
) -> tuple[int, bytes]:
    """GET a path, or POST a JSON body to it, and return (status, body). ``tick`` is called while it waits.

    Raises ``Unanswered`` when no whole answer came within ``limit_s``.
    """
    until = time.monotonic() + limit_s
    content = b"" if body is None else json.dumps(body).encode()
    lines = {"Host": f"{host}:{port}", "Connection": "close", "Accept": "application/json, text/plain, */*"}
    if body is not None:
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in (lines | (headers or {})).items()
    )
    try:
        with socket.create_connection((host, port), timeout=min(limit_s, 5.0)) as link:
            link.sendall(head.encode() + b"\r\n" + content)
            link.setblocking(False)
            answer = bytearray()
            while not _whole(answer):
                tick()
                if time.monotonic() > until:
                    raise Unanswered(f"port {port} {path}: no whole answer within {limit_s:.0f} s")
                if not select.select([link], [], [], 0.05)[0]:
                    continue
                part = link.recv(65536)
                if not part:
                    break
                answer += part
        return _parsed(bytes(answer), f"port {port} {path}")
    except OSError as error:
        raise Unanswered(f"port {port} {path}: {error.strerror or type(error).__name__}") from None
    except ValueError:
        raise Unanswered(f"port {port} {path}: the answer is no HTTP") from None


def _split(answer: bytes) -> tuple[int, dict[str, str], bytes] | None:
    head, blank, rest = answer.partition(b"\r\n\r\n")
    match = re.match(rb"HTTP/1\.[01] (\d{3})", head)
    if not blank or not match:
        return None
    fields = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
    return int(match[1]), {name.strip().lower(): value.strip() for name, _, value in fields}, rest


def _whole(answer: bytearray) -> bool:
    parts = _split(bytes(answer))
    if parts is None:
        return False
    _, headers, rest = parts
    if "chunked" in headers.get("transfer-encoding", ""):
        return _chunks(rest) is not None
    return "content-length" in headers and len(rest) >= int(headers["content-length"])


def _chunks(rest: bytes) -> bytes | None:
    content = b""
    while True:
        line, end, rest = rest.partition(b"\r\n")
        if not end:
            return None
        size = int(line.split(b";")[0], 16)
        if size == 0:
            return content
        if len(rest) < size + 2:
            return None
        content, rest = content + rest[:size], rest[size + 2 :]


def _parsed(answer: bytes, where: str) -> tuple[int, bytes]:
    parts = _split(answer)
    if parts is None:
        raise Unanswered(f"{where}: the connection closed without an answer")
    status, headers, rest = parts
    if "chunked" in headers.get("transfer-encoding", ""):
        content = _chunks(rest)
        if content is None:
            raise Unanswered(f"{where}: the answer was cut short")
        return status, content
    length = int(headers.get("content-length", len(rest)))
    if len(rest) < length:
        raise Unanswered(f"{where}: the answer was cut short")
    return status, rest[:length]


def finished(content: bytes) -> bool:
    """Whether a completion's answer carries a finish reason and no error."""
    try:
        value = json.loads(content)
    except ValueError:
        return False
    if not isinstance(value, dict) or value.get("error") or not value.get("choices"):
        return False
    return all(isinstance(one, dict) and one.get("finish_reason") for one in value["choices"])


def demand(content: bytes, names: dict[str, list[str]]) -> dict[str, float | None]:
    """Return the sum of each group's metrics over their labels; null for a group of which none is there."""
    sums: dict[str, float | None] = {}
    for group, wanted in names.items():
        values = [
            float(match[2])
            for match in re.finditer(
                r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)", content.decode("utf-8", "replace"), re.MULTILINE
            )
            if match[1] in wanted
        ]
        sums[group] = sum(values) if values else None
    return sums
