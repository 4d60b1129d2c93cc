"""The reference model: what it computes, its prefix cache, its tokenizer, and what its probe can judge."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

# One BLAS thread, as the server has; it is read when numpy is loaded.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import numpy.typing as npt
import pytest

import fairtrial
from fairtrial.reference.model import Context, Model, log_softmax
from fairtrial.reference.prefix import CAPACITY_BLOCKS, PrefixCache
from fairtrial.reference.server import load
from fairtrial.reference.shape import BLOCK, Floats
from fairtrial.reference.tokens import END, Detokenizer, decode, encode

ROOT = Path(fairtrial.__file__).parents[1]


def dice(seed: int, tokens: int) -> list[int]:
    """A seeded list of dice throws of an exact token count that ends where a throw is due."""
    draw = random.Random(seed)
    text = "Dice rolls: " + ",".join(str(draw.randint(1, 6)) for _ in range(tokens))
    return encode(text)[: tokens - 1] + encode(",")


def prefill(model: Model, ids: list[int]) -> tuple[Floats, Context]:
    """All hidden states of a prompt, computed in the model's own chunks."""
    context, states = Context(model.shape), []
    while context.tokens < len(ids):
        start = context.tokens
        states.append(model.forward(ids[start : model.chunk_end(start, len(ids))], context))
    return np.concatenate(states), context


def greedy(model: Model, ids: list[int], tokens: int) -> list[int]:
    states, context = prefill(model, ids)
    chosen = [int(model.logits(states[-1:])[0].argmax())]
    while len(chosen) < tokens:
        chosen.append(int(model.logits(model.forward(chosen[-1:], context))[0].argmax()))
    return chosen


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load(model_size="tiny", max_model_len=4096, overlays={})[0]


@pytest.fixture(scope="module")
def demo() -> Model:
    return load(model_size="demo", max_model_len=4096, overlays={})[0]


def plainly(model: Model, ids: list[int]) -> npt.NDArray[np.float64]:
    """All logits of a prompt by the plainest arithmetic: float64, no cache, no chunks, an expert at a time."""
    tokens, width, heads = len(ids), model.shape.width, model.shape.heads
    half = width // heads // 2
    angle = np.outer(np.arange(tokens), 10_000.0 ** (-np.arange(half) / half))
    turn = np.exp(1j * angle)

    def normal(hidden: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True) + 1e-6))

    def turned(head: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        complexes = (head[:, :half] + 1j * head[:, half:]) * turn
        return np.concatenate([complexes.real, complexes.imag], axis=1)

    hidden = model._embedding[ids].astype(np.float64)
    for layer in model._layers:
        queries, keys, values = np.split(normal(hidden) @ layer.qkv.astype(np.float64), 3, axis=1)
        mixed = np.zeros_like(hidden)
        for head in range(heads):
            one = slice(head * 2 * half, (head + 1) * 2 * half)
            scores = turned(queries[:, one]) @ turned(keys[:, one]).T / np.sqrt(2 * half)
            weights = np.tril(np.exp(scores - scores.max()))
            mixed[:, one] = weights / weights.sum(axis=1, keepdims=True) @ values[:, one]
        hidden = hidden + mixed @ layer.out
        inputs = normal(hidden)
        for token, scores in enumerate(inputs @ layer.experts.gate):
            first, second = np.argsort(-scores)[:2]
            share = 1 / (1 + np.exp(scores[second] - scores[first]))
            for expert, weight in ((first, share), (second, 1 - share)):
                gate, value = np.split(inputs[token] @ layer.experts.up[expert], 2)
                hidden[token] += weight * ((gate / (1 + np.exp(-gate)) * value) @ layer.experts.down[expert])
    return np.asarray(normal(hidden) @ model._head + model._bias)


def test_the_model_computes_what_the_plainest_arithmetic_does(tiny: Model) -> None:
    ids = dice(4, 300)
    assert np.abs(tiny.logits(prefill(tiny, ids)[0]) - plainly(tiny, ids)).max() < 5e-3


def test_a_token_at_a_time_equals_whole_chunks(tiny: Model) -> None:
    ids = dice(1, 330)
    together, _ = prefill(tiny, ids)
    context = Context(tiny.shape)
    alone = np.concatenate([tiny.forward([token], context) for token in ids])
    assert np.abs(tiny.logits(together) - tiny.logits(alone)).max() < 5e-3


def test_a_token_changes_nothing_before_it_and_much_after_it(tiny: Model) -> None:
    ids = dice(2, 200)
    other = [*ids[:150], ids[150] ^ 1, *ids[151:]]
    a, b = (tiny.logits(prefill(tiny, one)[0]) for one in (ids, other))
    change = np.abs(a - b).max(axis=1)
    assert change[:150].max() < 5e-3
    assert np.median(change[150:]) > 5e-2


def test_the_place_of_a_token_matters(tiny: Model) -> None:
    a, b = (tiny.logits(prefill(tiny, encode(text))[0])[-1] for text in ("abcabd,", "abdabc,"))
    assert np.abs(a - b).max() > 5e-2


def test_chunks_begin_at_fixed_places_and_are_halved_in_a_long_context(tiny: Model) -> None:
    starts, start = [], 0
    while start < 500:
        starts.append(start)
        start = tiny.chunk_end(start, 500)
    assert starts == [*range(0, 256, 64), *range(256, 500, 32)]
    assert start == 500


def test_a_model_loaded_again_computes_the_same_bits(tiny: Model) -> None:
    again = load(model_size="tiny", max_model_len=512, overlays={})[0]
    ids = dice(3, 300)
    assert np.array_equal(prefill(tiny, ids)[0], prefill(again, ids)[0])


@pytest.mark.parametrize("size", ["tiny", "demo"])
def test_the_probe_can_judge_under_every_seed(size: str, request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(size)
    for seed in range(4):
        logprobs = log_softmax(model.logits(prefill(model, dice(seed, 512))[0][-1:])[0])
        probabilities = np.exp(logprobs)
        assert np.sort(probabilities)[-20:].sum() >= 0.995
        assert -(probabilities * logprobs).sum() >= 0.3


@pytest.mark.parametrize("size", ["tiny", "demo"])
def test_different_prompts_get_different_answers_and_none_is_one_token_over_and_over(
    size: str, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(size)
    prompts = ["Hello", "List three colours.", "Explain rain.", "1, 2, 3,", "The capital of France is", "Dice"]
    answers = [tuple(greedy(model, encode(prompt), 48)) for prompt in prompts]
    assert len(set(answers)) == len(prompts)
    assert all(len(set(answer)) >= 5 for answer in answers)
    assert all(END not in answer for answer in answers)


def test_blocks_are_found_by_salt_and_every_token_before_their_end() -> None:
    cache, block = PrefixCache(), np.zeros(1, np.float32)
    ids = list(range(100)) + list(range(92))
    keys = cache.keys(ids, "salt")
    assert len(keys) == 3
    for key in keys:
        cache.add(key, block)
    assert len(cache.find(cache.keys(ids, "salt"), len(ids))) == 2, "a token is left to compute"
    assert len(cache.find(cache.keys([*ids, 1], "salt"), len(ids) + 1)) == 3
    assert cache.find(cache.keys(ids, "other"), len(ids)) == []
    assert cache.find(cache.keys(ids, None), len(ids)) == []
    assert cache.find(cache.keys([1, *ids[1:]], "salt"), len(ids)) == []
    assert len(cache.find(cache.keys([*ids[:BLOCK], 0, *ids[BLOCK + 1 :]], "salt"), len(ids))) == 1


def test_the_least_recently_used_blocks_leave_first() -> None:
    cache, block = PrefixCache(), np.zeros(1, np.float32)
    for number in range(CAPACITY_BLOCKS):
        cache.add(str(number).encode(), block)
    cache.find([b"0"], BLOCK + 1)
    cache.add(b"new", block)
    assert cache.find([b"0"], BLOCK + 1)
    assert not cache.find([b"1"], BLOCK + 1)


def test_text_survives_its_tokens_and_whole_characters_are_held_back_until_they_are_whole() -> None:
    text = "dice: 3,1 — 木"
    ids = encode(text)
    assert decode([*ids, END]) == text
    detokenizer = Detokenizer()
    pieces = [detokenizer.add(token, last=False) for token in ids]
    assert "".join(pieces) == text
    assert pieces[-3:] == ["", "", "木"]
    assert Detokenizer().add(0xE6, last=True) == "\ufffd"


def test_fairtrial_itself_needs_no_numpy() -> None:
    code = "import sys, fairtrial; sys.exit('numpy' in sys.modules or 'starlette' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
