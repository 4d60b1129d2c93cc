"""The HTTP face of the engine: routes, field names and error objects as vLLM 0.32 has them."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fairtrial import __version__
from fairtrial.canonical import canonical, sha256
from fairtrial.reference.engine import Counters, Engine, Request, Token
from fairtrial.reference.mount import Mounted
from fairtrial.reference.shape import BLOCK
from fairtrial.reference.tokens import VOCABULARY, Detokenizer, decode, encode, token_text

MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The resolved arguments of a server; ``overlays`` is target -> path."""

    host: str
    port: int
    max_model_len: int
    served_model_name: str
    model_size: str
    overlays: Mapping[str, str]

    def fingerprint(self) -> str:
        """Return a short hash of the arguments that decide the answers; as vLLM's, not of the environment."""
        return sha256(canonical([self.model_size, self.max_model_len]))[:8]


class ApiError(Exception):
    """A request that cannot be served; becomes vLLM's error object."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class _Body(BaseModel):
    # Unknown fields are accepted in silence, as vLLM does.
    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None


class _StreamOptions(_Body):
    include_usage: bool = False


class _Completion(_Body):
    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    max_tokens: int | None = 16
    min_tokens: int = Field(default=0, ge=0)
    temperature: float | None = None
    n: int | None = 1
    echo: bool | None = False
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    logprobs: int | None = Field(default=None, ge=0)
    return_tokens_as_token_ids: bool | None = False
    return_token_ids: bool | None = False
    ignore_eos: bool = False
    cache_salt: object = None


class _Tokenize(_Body):
    prompt: str
    return_token_strs: bool | None = False


class _Detokenize(_Body):
    tokens: list[int]


def _prompt_ids(prompt: str | list[int] | list[str] | list[list[int]] | None) -> list[int]:
    if not prompt:
        raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if isinstance(prompt, str):
        return encode(prompt)
    prompts = [item for item in prompt if not isinstance(item, int)]
    if len(prompts) > 1:
        raise ApiError("This server takes one prompt a request.", param="prompt")
    return _prompt_ids(prompts[0]) if prompts else _known_ids([item for item in prompt if isinstance(item, int)])


def _known_ids(ids: list[int]) -> list[int]:
    for token in ids:
        if not 0 <= token < VOCABULARY:
            raise ApiError(f"Token id {token} is out of vocabulary", param="prompt")
    return ids


def _request(body: _Completion, max_model_len: int) -> Request:
    """Check a completion and return what the engine is asked.

    An output that would run over the context is cut in silence, as vLLM does.
    """
    if body.temperature or (body.n or 1) != 1 or body.echo or body.stop:
        raise ApiError("This server decodes greedily, once: leave out temperature, n, echo and stop.")
    if body.stream_options and not body.stream:
        raise ApiError("Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.cache_salt is not None and not (isinstance(body.cache_salt, str) and body.cache_salt):
        raise ApiError(
            "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
            param="cache_salt",
        )
    if (body.logprobs or 0) > MAX_LOGPROBS:
        raise ApiError(
            f"Requested sample logprobs of {body.logprobs}, which is greater than max allowed: {MAX_LOGPROBS}"
            f" (parameter=logprobs, value={body.logprobs})",
            param="logprobs",
        )
    ids = _prompt_ids(body.prompt)
    if len(ids) >= max_model_len:
        raise ApiError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains"
            f" {len(ids)} input tokens, which leaves no room for output tokens. Please reduce the length of the"
            " input prompt."
            f" (parameter=input_tokens, value={len(ids)})",
            param="input_tokens",
        )
    max_tokens = max_model_len if body.max_tokens is None else body.max_tokens
    if max_tokens < 1:
        raise ApiError(f"max_tokens must be at least 1, got {max_tokens}. (parameter=max_tokens)", param="max_tokens")
    if body.min_tokens > max_tokens:
        raise ApiError(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}.",
            param="min_tokens",
        )
    return Request(
        ids=ids,
        max_tokens=min(max_tokens, max_model_len - len(ids)),
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        salt=body.cache_salt if isinstance(body.cache_salt, str) else None,
        top=body.logprobs,
    )


_BodyType = TypeVar("_BodyType", bound=_Body)


async def _parse(http: HttpRequest, kind: type[_BodyType], served: str) -> _BodyType:
    """Read a JSON body. Messages say where it is wrong and never repeat what it holds."""
    if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError("Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request")
    try:
        content = json.loads(await http.body())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        place = f"body.{getattr(error, 'pos', 0)}"
        raise ApiError(
            f"1 validation error:\n  {{'type': 'json_invalid', 'loc': '{place}', 'msg': 'JSON decode error'}}",
            param=place,
            kind="Bad Request",
        ) from None
    try:
        body = kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ApiError(f"{error.error_count()} validation error: {place}: {first['msg']}", param=place) from None
    if body.model is not None and body.model != served:
        raise ApiError(
            f"The model `{body.model}` does not exist. Valid aliases: {served}.",
            param="model",
            status=404,
            kind="NotFoundError",
        )
    return body


class _Answer:
    """The tokens of one request in the event loop. Who leaves the connection cancels it."""

    def __init__(self, engine: Engine, request: Request, http: HttpRequest) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Token | None] = asyncio.Queue()
        self._ticket = engine.submit(request, self._deliver)
        self._watch = asyncio.create_task(self._cancel_when_gone(http.receive))

    def _deliver(self, token: Token | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, token)
        except RuntimeError:
            # The loop is closed: the server is ending, and nobody waits for this token.
            self._ticket.cancel()

    async def _cancel_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._ticket.cancel()

    async def __aiter__(self) -> AsyncIterator[Token]:
        try:
            while token := await self._arrived.get():
                yield token
                if token.finish:
                    return
        finally:
            self._ticket.cancel()
            self._watch.cancel()


class _Completions:
    """Renders the answers to one completion request."""

    def __init__(self, body: _Completion, request: Request, arguments: Arguments) -> None:
        self._body = body
        self._request = request
        self._fingerprint = f"fairtrial-{__version__}-{arguments.fingerprint()}"
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex[:16]}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": arguments.served_model_name,
        }

    async def whole(self, answer: _Answer) -> dict[str, object] | None:
        """Return the body of an answer that is not streamed; ``None`` if it stays unfinished."""
        tokens = [token async for token in answer]
        if not tokens or not tokens[-1].finish:
            return None
        ids = [token.id for token in tokens]
        choice = {
            "index": 0,
            "text": decode(ids),
            "logprobs": self._logprobs(tokens, 0),
            "finish_reason": tokens[-1].finish,
            "stop_reason": None,
            "token_ids": ids if self._body.return_token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self._request.ids if self._body.return_token_ids else None,
        }
        details = {"created_cache_tokens": None, "multimodal_tokens": None}
        return self._head | {
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": self._usage(len(ids), tokens[-1].cached_tokens, details),
        }

    async def events(self, answer: _Answer) -> AsyncIterator[str]:
        """Yield the payload of each event of a stream; without ``[DONE]`` if it stays unfinished."""
        detokenizer, count, offset = Detokenizer(), 0, 0
        async for token in answer:
            count += 1
            text = detokenizer.add(token.id, last=token.finish is not None)
            choice = {
                "index": 0,
                "text": text,
                "logprobs": self._logprobs([token], offset),
                "finish_reason": token.finish,
                "stop_reason": None,
                "prompt_token_ids": self._request.ids if self._body.return_token_ids and count == 1 else None,
                "token_ids": [token.id] if self._body.return_token_ids else None,
            }
            offset += len(text)
            yield json.dumps(self._head | {"choices": [choice]}, separators=(",", ":"))
            if token.finish:
                if self._body.stream_options and self._body.stream_options.include_usage:
                    usage = self._usage(count, token.cached_tokens, {})
                    last = {"choices": [], "usage": usage, "system_fingerprint": self._fingerprint}
                    yield json.dumps(self._head | last, separators=(",", ":"))
                yield "[DONE]"

    def _usage(self, completion: int, cached: int, details: Mapping[str, None]) -> dict[str, object]:
        prompt = len(self._request.ids)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached, **details},
        }

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, object] | None:
        if self._request.top is None:
            return None
        offsets = [offset]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token_text(token.id)))
        return {
            "text_offset": offsets,
            "token_logprobs": [token.logprob for token in tokens],
            "tokens": [self._name(token.id) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def _top(self, token: Token) -> dict[str, float | None]:
        # With logprobs of 0, vLLM reports the chosen token alone.
        return {self._name(one): value for one, value in token.top} or {self._name(token.id): token.logprob}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._body.return_tokens_as_token_ids else token_text(token)


class _EventStream(Response):
    """Server-sent events; a stream that stays unfinished is cut, so that nobody can take it for a whole one."""

    def __init__(self, payloads: AsyncIterator[str], error: Callable[[], dict[str, object] | None]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._payloads = payloads
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        payload = ""
        async for payload in self._payloads:
            await self._event(send, payload)
        if payload != "[DONE]":
            error = self._error()
            if error is None:
                return
            await self._event(send, json.dumps(error))
            await self._event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b""})

    @staticmethod
    async def _event(send: Send, payload: str) -> None:
        await send({"type": "http.response.body", "body": f"data: {payload}\n\n".encode(), "more_body": True})


_ENGINE_FAILED = ApiError(
    "The engine encountered an issue; see the server's log.", status=500, kind="InternalServerError"
)


def application(engine: Engine, mounted: Mounted, arguments: Arguments) -> Starlette:
    """Return the ASGI application of a server."""
    served, started = arguments.served_model_name, time.time()

    async def health(_: HttpRequest) -> Response:
        return Response(status_code=503 if engine.failed else 200)

    async def version(_: HttpRequest) -> Response:
        return JSONResponse({"version": __version__})

    async def models(_: HttpRequest) -> Response:
        model = {
            "id": served,
            "object": "model",
            "created": int(started),
            "owned_by": "fairtrial",
            "root": arguments.model_size,
            "parent": None,
            "max_model_len": arguments.max_model_len,
            "permission": [],
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def server_info(_: HttpRequest) -> Response:
        added = {
            target: {"imported": True, "report": report() if report else None}
            for target, report in mounted.added.items()
        }
        return JSONResponse({"arguments": asdict(arguments), "sources": dict(mounted.sources), "moe": {"added": added}})

    async def tokenize(http: HttpRequest) -> Response:
        body = await _parse(http, _Tokenize, served)
        ids = encode(body.prompt)
        strings = [token_text(token) for token in ids] if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(ids),
                "max_model_len": arguments.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def detokenize(http: HttpRequest) -> Response:
        body = await _parse(http, _Detokenize, served)
        return JSONResponse({"prompt": decode(_known_ids(body.tokens))})

    async def completions(http: HttpRequest) -> Response:
        body = await _parse(http, _Completion, served)
        request = _request(body, arguments.max_model_len)
        rendered, answer = _Completions(body, request, arguments), _Answer(engine, request, http)
        if body.stream:
            return _EventStream(rendered.events(answer), lambda: dict(_ENGINE_FAILED.body) if engine.failed else None)
        whole = await rendered.whole(answer)
        return JSONResponse(_ENGINE_FAILED.body, 500) if whole is None else JSONResponse(whole)

    async def metrics(_: HttpRequest) -> Response:
        return PlainTextResponse(exposition(engine.counters(), served, started))

    async def refuse(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body, error.status)

    async def detail(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"detail": error.detail}, error.status_code)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/version", version),
            Route("/v1/models", models),
            Route("/server_info", server_info),
            Route("/metrics", metrics),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
        ],
        exception_handlers={ApiError: refuse, HTTPException: detail},
    )


def exposition(counters: Counters, served: str, started_s: float) -> str:
    """Return the counters in the Prometheus text format, under vLLM's names."""
    labels = f'engine="0",model_name="{served}"'
    rows = [
        ("num_requests_running", "gauge", "", counters.running),
        ("num_requests_waiting", "gauge", "", counters.waiting),
        *(
            ("request_success_total", "counter", f',finished_reason="{reason}"', count)
            for reason, count in counters.finished.items()
        ),
        ("prompt_tokens_total", "counter", "", counters.prompt_tokens),
        ("generation_tokens_total", "counter", "", counters.generation_tokens),
        ("prefix_cache_queries_total", "counter", "", counters.prefix_queries),
        ("prefix_cache_hits_total", "counter", "", counters.prefix_hits),
        ("cache_config_info", "gauge", f',block_size="{BLOCK}",enable_prefix_caching="True"', 1),
    ]
    lines = ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started_s}"]
    for name, kind, extra, value in rows:
        head = f"# TYPE vllm:{name} {kind}"
        if head not in lines:
            lines.append(head)
        lines.append(f"vllm:{name}{{{labels}{extra}}} {float(value)}")
    return "\n".join(lines) + "\n"
