"""Prompts and salts from a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.client.prompts import dice, salt, sized_dice, token_ids
from fairtrial.errors import Refused


def test_the_format_of_the_draws_is_registered_and_never_changes() -> None:
    assert token_ids("seed", 12, 100, 49_152) == TOKEN_IDS
    assert salt("seed", "cell-1") == SALT
    assert dice("seed", 8) == DICE


TOKEN_IDS = [41424, 43864, 26769, 42784, 4290, 1839, 19427, 46736, 10033, 20665, 28306, 8566]
SALT = "660ac2079a52fba578f5313898e568ad"
DICE = "Dice rolls: 1,2,1,5,1,3,6,3,"


def test_draws_depend_on_seed_and_name_alone_and_begin_alike() -> None:
    assert token_ids("a", 500, 0, 512)[:100] == token_ids("a", 100, 0, 512)
    assert token_ids("a", 100, 0, 512) != token_ids("b", 100, 0, 512)
    assert len({salt(seed, name) for seed in "ab" for name in ("x", "y")} | {salt("a\0x", "y"), salt("a", "x\0y")}) == 6
    assert dice("a", 100).startswith(dice("a", 50))


@given(count=st.integers(0, 300), low=st.integers(0, 1000), span=st.integers(1, 2**31))
def test_ids_are_as_many_as_asked_and_within_range(count: int, low: int, span: int) -> None:
    drawn = token_ids("s", count, low, low + span)
    assert len(drawn) == count
    assert all(low <= token_id < low + span for token_id in drawn)


def test_draws_are_unbiased_where_the_span_does_not_divide_the_word() -> None:
    span = 3 * 2**30
    drawn = token_ids("s", 6000, 0, span)
    # without rejection the lowest third would hold half of them
    assert 1850 < sum(token_id < 2**30 for token_id in drawn) < 2150
    faces = Counter(dice("s", 6000).removeprefix("Dice rolls: ").split(","))
    assert set(faces) == {*"123456", ""}
    assert all(900 < faces[face] < 1100 for face in "123456")


@pytest.mark.parametrize(("count", "low", "high"), [(1, 5, 5), (1, 6, 5), (-1, 0, 5), (1, -1, 5), (1, 0, 2**32 + 1)])
def test_a_draw_that_cannot_be_is_refused(count: int, low: int, high: int) -> None:
    with pytest.raises(Refused, match="token ids"):
        token_ids("s", count, low, high)


Tokenize = Callable[[str], list[int]]


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


def by_words(text: str) -> list[int]:
    """Digits, commas and words with the space before them are a token each, as in a usual vocabulary."""
    tokens = text.replace(",", " ,").replace(": ", " : ").split()
    return [sum(token.encode()) for token in tokens]


def by_pairs(text: str) -> list[int]:
    """A throw and its comma are one token."""
    words, _, throws = text.partition(": ")
    return [1] * len(words.split()) + [2] + [3] * throws.count(",")


@pytest.mark.parametrize("tokenize", [by_bytes, by_words, by_pairs])
@pytest.mark.parametrize("tokens", [50, 51, 2048, 2049, 8192])
def test_a_probe_has_exactly_the_tokens_asked_for_and_ends_where_a_throw_is_due(
    tokenize: Tokenize, tokens: int
) -> None:
    texts = []

    def recorded(text: str) -> list[int]:
        texts.append(text)
        return tokenize(text)

    ids = sized_dice("seed", tokens, recorded)
    assert len(ids) == tokens
    assert texts[-1].endswith(",")
    assert "Dice rolls: " + dice("seed", 9).removeprefix("Dice rolls: ") in texts[-1]
    assert len(texts) < 20


@pytest.mark.parametrize("tokens", [0, 1, 5, -3])
def test_a_probe_too_short_for_a_throw_is_refused(tokens: int) -> None:
    with pytest.raises(Refused, match="exactly"):
        sized_dice("seed", tokens, by_bytes)


@pytest.mark.parametrize("tokenize", [lambda text: [], lambda text: [7], lambda text: [1, 2, 3] * (len(text) // 3)])
def test_a_tokenizer_that_cannot_give_the_length_is_refused(tokenize: Tokenize) -> None:
    with pytest.raises(Refused, match="pinned probe"):
        sized_dice("seed", 2048, tokenize)
