"""What to ask a server for, and what its counters and its probe say: pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fairtrial.errors import EvidenceError

TOP_N = 20
"""How many of the first token's likeliest a probe asks for, and needs."""

_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?")
_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:request_success_total": "finished",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:external_prefix_cache_hits_total": "external_hits",
    "llamacpp:requests_processing": "running",
    "llamacpp:requests_deferred": "waiting",
    "llamacpp:prompt_tokens_total": "prompt_tokens",
    "llamacpp:tokens_predicted_total": "generation_tokens",
    "llamacpp:prompt_tokens_cached_total": "prefix_hits",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """A server's own counters, summed over labels; None where the server does not count it.

    Prefix hits and queries are in tokens. llama.cpp's prompt tokens leave the cached ones out, vLLM's do not.
    """

    running: int | None = None
    waiting: int | None = None
    finished: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    prefix_hits: int | None = None
    prefix_queries: int | None = None
    external_hits: int | None = None


def completion(
    *,
    model: str,
    prompt: Sequence[int] | str,
    max_tokens: int,
    salt: str,
    stream: bool = True,
    ignore_eos: bool = False,
    logprobs: int | None = None,
) -> dict[str, object]:
    """Return the body of a greedy POST /v1/completions in vLLM's dialect; servers of others ignore what is new.

    ``prompt`` is token ids, or text. A stream asks for usage and token ids. ``logprobs`` (a probe: 20) asks for the
    likeliest by token id, and only without a stream: raises ``ValueError`` otherwise.
    """
    if stream and logprobs is not None:
        raise ValueError("logprobs are read from an answer that does not stream: ask with stream=False")
    body: dict[str, object] = {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "seed": 0,
        "cache_salt": salt,
        "stream": stream,
    }
    if stream:
        body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    if ignore_eos:
        body["ignore_eos"] = True
    if logprobs is not None:
        body |= {"logprobs": logprobs, "return_tokens_as_token_ids": True}
    return body


def counters(text: str) -> Counters:
    """Read the text of GET /metrics (Prometheus exposition format; vLLM's and llama.cpp's names, exactly).

    Raises ``EvidenceError`` with the line where one of these counters has no whole value.
    """
    sums: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        sample = _SAMPLE.fullmatch(line.strip())
        if sample is None or (name := _NAMES.get(sample[1])) is None:
            continue
        try:
            value = float(sample[2])
            sums[name] = sums.get(name, 0) + int(value)
        except (ValueError, OverflowError):
            value = math.nan
        if not value.is_integer():
            raise EvidenceError(f"/metrics, line {number}: {sample[1]} is not a whole number; look at the server")
    return Counters(**sums)


def probe_quality(top: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return (mass, entropy in nats) of the 20 likeliest of a probe's first token: sum p, and -sum p ln p.

    Raises ``EvidenceError`` for fewer than 20 entries, a token twice, or a value that is no logprob.
    """
    if len(top) < TOP_N or len({token_id for token_id, _ in top}) < len(top):
        raise EvidenceError(f"probe: {len(top)} entries; it needs {TOP_N} distinct tokens, by token id")
    if any(math.isnan(logprob) or logprob > 0.001 for _, logprob in top):
        raise EvidenceError("probe: a logprob is no natural logarithm of a probability")
    likeliest = sorted((min(logprob, 0.0) for _, logprob in top), reverse=True)[:TOP_N]
    # -9999 is how vLLM writes minus infinity
    kept = [logprob for logprob in likeliest if logprob > -9999]
    return sum(map(math.exp, kept)), -sum(math.exp(logprob) * logprob for logprob in kept)
