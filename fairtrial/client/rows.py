"""What evidence keeps of the answers to a check's requests, and when an answer is whole: pure."""

from __future__ import annotations

from typing import Any

from fairtrial.client.answers import TOP_N
from fairtrial.client.request import Exchange
from fairtrial.errors import StepFailed
from fairtrial.stream import Answer, Measured

Row = dict[str, Any]


def whole(what: str, exchange: Exchange, *, prompt_tokens: int | None, output_tokens: int | None) -> None:
    """Raise ``StepFailed`` unless an answer is whole and of the counts that are due; None: of any count."""
    if exchange.fault is not None:
        raise StepFailed(f"{what}: {exchange.fault}")
    answer = exchange.measured or exchange.answer
    if answer is None:
        raise StepFailed(f"{what}: no completion in the answer (status {exchange.status})")
    if prompt_tokens is not None and answer.prompt_tokens != prompt_tokens:
        raise StepFailed(f"{what}: the server counted {answer.prompt_tokens} prompt tokens, {prompt_tokens} were sent")
    if output_tokens is not None and answer.output_tokens != output_tokens:
        raise StepFailed(
            f"{what}: {answer.output_tokens} output tokens, {output_tokens} were asked for: "
            "the server cuts prompt + output at its context in silence"
        )


def identity(answer: Answer) -> Row:
    """What a server says of itself in one short answer: model, fingerprint, counts."""
    return {
        "kind": "identity",
        "model": answer.model,
        "fingerprint": answer.system_fingerprint,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
    }


def greedy(prompt: str, measured: Measured) -> Row:
    """The answer to the greedy prompt of this id: its hash and its token count."""
    return {
        "kind": "greedy",
        "prompt": prompt,
        "sha256": measured.answer_sha256,
        "completion_tokens": measured.output_tokens,
    }


def logit(what: str, slot: str, prompt_sha256: str, answer: Answer) -> Row:
    """The first token's likeliest of one probe. Raises ``StepFailed`` for fewer than 20."""
    if answer.top is None or len(answer.top) < TOP_N:
        count = 0 if answer.top is None else len(answer.top)
        raise StepFailed(f"{what}: the server gave {count} first-token logprobs by token id, {TOP_N} are needed")
    return {
        "kind": "logit",
        "slot": slot,
        "prompt_sha256": prompt_sha256,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "top": [[token, logprob] for token, logprob in answer.top],
    }
