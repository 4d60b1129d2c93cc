"""What a server's answer measured, as a pure function of (bytes, time): no socket, no clock.

``Stream`` decodes server-sent events (WHATWG HTML, section 9.2) that carry OpenAI completion or chat chunks;
``decode_answer`` decodes the one JSON document of a request that did not stream. Faults and errors name what
is missing, and hold nothing of what the server wrote but an error's type and code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fairtrial.canonical import sha256
from fairtrial.errors import EvidenceError

EVENT_LIMIT = 16 * 1024 * 1024
"""Bytes of one event; a first chunk may carry all ids of a prompt of half a million tokens (about 4 MB)."""

_LINE_END = re.compile(rb"\r\n|\r|\n")
_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,47}(?: [A-Za-z][A-Za-z0-9_.-]{0,15})?")
_TOKEN_KEY = re.compile(r"token_id:(\d{1,9})")


class _Broken(Exception):
    """What makes an answer unreadable; its text is ours alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts as the server reports them; ``cached_tokens`` is None where it says nothing of caching."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One streamed answer. Times are monotonic nanoseconds; None means that it never came.

    ``content_ns`` holds the arrival of every event with generated content (text, reasoning, a tool call, a
    token id). ``end_ns`` is the arrival of ``[DONE]``, or else the end of the body. ``fault`` says why the
    stream is not whole, or is None. ``answer_sha256`` is ``answer_hash`` of the text and, where the stream
    carries them, the token ids.
    """

    first_event_ns: int | None
    first_content_ns: int | None
    content_ns: tuple[int, ...] = field(repr=False)
    end_ns: int
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None
    done: bool
    fault: str | None
    answer_sha256: str
    token_ids: tuple[int, ...] | None = field(repr=False)
    text: str = field(repr=False)
    unread: str = field(repr=False, default="")
    """The event that broke the stream, as it came: no part of the answer, and never kept."""

    @property
    def content_events(self) -> int:
        """How many events carried content."""
        return len(self.content_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer that was not streamed.

    ``top`` is (token id, logprob in nats) of the first token's likeliest, in the server's order; None: none
    came.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    finish_reason: str
    answer_sha256: str
    model: str | None
    system_fingerprint: str | None
    top: tuple[tuple[int, float], ...] | None = field(repr=False)
    token_ids: tuple[int, ...] | None = field(repr=False)
    text: str = field(repr=False)


def answer_hash(text: str, token_ids: tuple[int, ...] | None) -> str:
    """SHA-256 of the text in UTF-8; where ids were carried, a NUL and the ids, comma-separated, follow it."""
    content = text.encode("utf-8", "surrogatepass")
    if token_ids is not None:
        content += b"\0" + ",".join(map(str, token_ids)).encode()
    return sha256(content)


class Stream:
    """Decodes the body of one streamed response, already without chunk framing, however it was split.

    An event counts at the time of the ``feed`` that completed it.
    """

    def __init__(self, *, usage_asked: bool = True) -> None:
        self._usage_asked = usage_asked
        self._line = bytearray()
        self._payload: list[bytes] = []
        self._held = 0
        self._at_start = True
        self._after_cr = False
        self._fed_ns = 0
        self._first_event_ns: int | None = None
        self._content_ns: list[int] = []
        self._texts: list[str] = []
        self._token_ids: list[int] | None = None
        self._usage: Usage | None = None
        self._finish_reason: str | None = None
        self._done_ns: int | None = None
        self._broken: str | None = None
        self._event = b""

    @property
    def broken(self) -> str | None:
        """The fault that nothing later can mend, or None; all that is fed after it is ignored."""
        return self._broken

    @property
    def done(self) -> bool:
        """True once ``[DONE]`` has come."""
        return self._done_ns is not None

    def feed(self, content: bytes, at_ns: int) -> None:
        """Take the next bytes of the body, which arrived at ``at_ns``. Raises nothing."""
        if self._broken is not None or not content:
            return
        self._fed_ns = at_ns
        if self._after_cr:
            content = content.removeprefix(b"\n")
        self._after_cr = content.endswith(b"\r")
        *lines, rest = _LINE_END.split(content)
        try:
            for line in lines:
                self._line += line
                whole, self._line = bytes(self._line), bytearray()
                self._read(whole, at_ns)
            self._line += rest
            if self._held + len(self._line) > EVENT_LIMIT:
                raise _Broken(f"one event is longer than {EVENT_LIMIT} bytes")
        except _Broken as broken:
            self._broken = str(broken)

    def end(self, at_ns: int) -> Measured:
        """Say that the body ended at ``at_ns``, and return what it measured. Raises nothing."""
        if self._broken is None:
            try:
                self._read(bytes(self._line), self._fed_ns)
                self._dispatch(self._fed_ns, cut="the stream was cut off inside an event")
            except _Broken as broken:
                self._broken = str(broken)
        token_ids = None if self._token_ids is None else tuple(self._token_ids)
        text = "".join(self._texts)
        return Measured(
            first_event_ns=self._first_event_ns,
            first_content_ns=self._content_ns[0] if self._content_ns else None,
            content_ns=tuple(self._content_ns),
            end_ns=at_ns if self._done_ns is None else self._done_ns,
            prompt_tokens=self._usage.prompt_tokens if self._usage else None,
            output_tokens=self._usage.output_tokens if self._usage else None,
            cached_tokens=self._usage.cached_tokens if self._usage else None,
            finish_reason=self._finish_reason,
            done=self.done,
            fault=self._broken or self._missing(),
            answer_sha256=answer_hash(text, token_ids),
            token_ids=token_ids,
            text=text,
            unread=self._event.decode(errors="replace") if self._broken else "",
        )

    def _missing(self) -> str | None:
        lacks = {
            "finish reason": self._finish_reason is None,
            "[DONE]": not self.done,
            "usage (asked for with stream_options.include_usage)": self._usage_asked and self._usage is None,
        }
        missing = [name for name, absent in lacks.items() if absent]
        return "the stream ended without " + ", ".join(missing) if missing else None

    def _read(self, line: bytes, at_ns: int) -> None:
        if self._at_start:
            line = line.removeprefix(b"\xef\xbb\xbf")
            self._at_start = False
        if not line:
            self._dispatch(at_ns)
        name, _, value = line.partition(b":")
        if name == b"data":
            self._payload.append(value.removeprefix(b" "))
            self._held += len(line)

    def _dispatch(self, at_ns: int, *, cut: str | None = None) -> None:
        content = self._event = b"\n".join(self._payload).strip()
        self._payload, self._held = [], 0
        if not content:
            return
        if self.done:
            raise _Broken("an event came after [DONE]")
        if self._first_event_ns is None:
            self._first_event_ns = at_ns
        if content == b"[DONE]":
            self._done_ns = at_ns
        else:
            self._take(_json(content, cut or "an event is not JSON"), at_ns)

    def _take(self, chunk: Mapping[str, object], at_ns: int) -> None:
        self._usage = _usage(chunk) or self._usage
        for choice in _objects(chunk, "choices"):
            piece = _piece(choice, "delta")
            self._texts.append(piece.text)
            if piece.token_ids is not None:
                self._token_ids = self._token_ids or []
                self._token_ids.extend(piece.token_ids)
            if piece.is_content:
                self._content_ns.append(at_ns)
            self._finish_reason = piece.finish_reason or self._finish_reason


def decode_answer(body: bytes) -> Answer:
    """Decode the body of a completion or chat completion that was not streamed.

    Raises ``EvidenceError`` where it is not whole (no finish reason, no usage, not JSON), holds an error
    object or more than one choice, or has logprobs that are not keyed by token id.
    """
    try:
        return _answer(body)
    except _Broken as broken:
        fault = str(broken)
    raise EvidenceError(fault)


def _answer(body: bytes) -> Answer:
    document = _json(body, "the answer is not JSON")
    choices = _objects(document, "choices")
    usage = _usage(document)
    if len(choices) != 1:
        raise _Broken(f"the answer has {len(choices)} choices: ask for one")
    piece = _piece(choices[0], "message")
    if piece.finish_reason is None:
        raise _Broken("the answer has no finish reason")
    if usage is None:
        raise _Broken("the answer has no usage")
    return Answer(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        finish_reason=piece.finish_reason,
        answer_sha256=answer_hash(piece.text, piece.token_ids),
        model=_string(document, "model") or None,
        system_fingerprint=_string(document, "system_fingerprint") or None,
        top=_top(choices[0]),
        token_ids=piece.token_ids,
        text=piece.text,
    )


def error_label(body: bytes) -> str | None:
    """Name the error object of a response body by its type and code, or return None where there is none."""
    try:
        _json(body, "")
    except _Broken as broken:
        return str(broken) or None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    text: str
    token_ids: tuple[int, ...] | None
    is_content: bool
    finish_reason: str | None


def _json(content: bytes, fault: str) -> Mapping[str, object]:
    try:
        document = json.loads(content.decode())
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _Broken(fault)
    error = document if document.get("object") == "error" else document.get("error")
    if error:
        raise _Broken("the server sent an error object" + _error_words(error))
    return document


def _error_words(error: object) -> str:
    if not isinstance(error, dict):
        return ""
    kind, code = _label(error.get("type")), error.get("code")
    words = [f"type {kind}"] if kind else []
    if isinstance(code, int) or (code := _label(code)):
        words.append(f"code {code}")
    return f" ({', '.join(words)})" if words else ""


def _label(value: object) -> str | None:
    return value if isinstance(value, str) and _LABEL.fullmatch(value) else None


def _piece(choice: Mapping[str, object], part_name: str) -> _Piece:
    if choice.get("index", 0) != 0:
        raise _Broken("the answer has more than one choice: ask for one")
    part = choice.get(part_name)
    if not isinstance(part, dict):
        part = {}
    calls = _objects(part, "tool_calls")
    # the call's own id is drawn at random: it is no part of the answer
    functions = [function for call in calls if isinstance(function := call.get("function"), dict)]
    called = [_string(function, name) for function in functions for name in ("name", "arguments")]
    # vLLM sends reasoning under both names
    reasoning = _string(part, "reasoning") or _string(part, "reasoning_content")
    text = "".join([_string(choice, "text"), reasoning, _string(part, "content"), *called])
    token_ids = _ids(choice.get("token_ids"))
    reason = _string(choice, "finish_reason")
    if reason in ("abort", "error"):
        raise _Broken(f"the server gave the answer up (finish reason {reason})")
    if reason and _label(reason) is None:
        raise _Broken("the finish reason is not a word")
    return _Piece(
        text=text,
        token_ids=token_ids,
        is_content=bool(text or calls or token_ids),
        finish_reason=reason or None,
    )


def _string(holder: Mapping[str, object], name: str) -> str:
    value = holder.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _Broken(f"{name} is not a string")
    return value


def _objects(holder: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    values = holder.get(name)
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise _Broken(f"{name} is not a list of objects")
    return values


def _count(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _Broken(f"{name} is not a whole number")
    return value


def _ids(values: object) -> tuple[int, ...] | None:
    if values is None:
        return None
    if not isinstance(values, list):
        raise _Broken("token_ids is not a list")
    return tuple(_count(value, "a token id") for value in values)


def _usage(document: Mapping[str, object]) -> Usage | None:
    usage = document.get("usage")
    if usage is None:
        return None
    if not isinstance(usage, dict):
        raise _Broken("usage is not an object")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        prompt_tokens=_count(usage.get("prompt_tokens"), "usage.prompt_tokens"),
        output_tokens=_count(usage.get("completion_tokens"), "usage.completion_tokens"),
        cached_tokens=None if cached is None else _count(cached, "cached_tokens"),
    )


def _top(choice: Mapping[str, object]) -> tuple[tuple[int, float], ...] | None:
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return None
    if not isinstance(logprobs, dict):
        raise _Broken("logprobs is not an object")
    legacy, content = _objects(logprobs, "top_logprobs"), _objects(logprobs, "content")
    if legacy:
        pairs = list(legacy[0].items())
    elif content:
        pairs = [(_key(entry), entry.get("logprob")) for entry in _objects(content[0], "top_logprobs")]
    else:
        raise _Broken("logprobs has no top_logprobs: ask for logprobs of the first token")
    return tuple((_token_id(key), _logprob(value)) for key, value in pairs)


def _key(entry: Mapping[str, object]) -> str:
    token_id = entry.get("id")
    return _string(entry, "token") if token_id is None else f"token_id:{_count(token_id, 'a token id')}"


def _token_id(key: str) -> int:
    match = _TOKEN_KEY.fullmatch(key)
    if match is None:
        raise _Broken(
            "logprobs are keyed by text, where distinct tokens collide: ask for token ids (return_tokens_as_token_ids)"
        )
    return int(match[1])


def _logprob(value: object) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 1_000_000:
        raise _Broken("a logprob is not a number")
    return float(value)
