"""The decoder of event streams and answers, on streams made here."""

from __future__ import annotations

import hashlib
import itertools
import json
import traceback

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import EvidenceError
from fairtrial.stream import EVENT_LIMIT, Measured, Stream, answer_hash, decode_answer, error_label

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}


def chunk(text: str = "", finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]}


def delta(finish: str | None = None, **part: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": part, "finish_reason": finish}]}


def body(*events: object, end: str = "\n\n") -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events]
    return "".join(f"data: {text}{end}" for text in texts).encode()


def whole(*events: object) -> bytes:
    return body(*events, chunk(finish="length"), {"choices": [], "usage": USAGE}, "[DONE]")


def measure(*pieces: bytes, usage_asked: bool = True) -> Measured:
    """Feed each piece at 100, 200, ... ns; the end is at 9,999."""
    stream = Stream(usage_asked=usage_asked)
    for number, piece in enumerate(pieces, start=1):
        stream.feed(piece, number * 100)
    return stream.end(9_999)


def test_a_whole_stream_has_no_fault_and_all_its_figures() -> None:
    seen = measure(body(chunk("a")), body(chunk("b", "length")), body({"choices": [], "usage": USAGE}), body("[DONE]"))
    assert seen.fault is None
    assert (seen.first_event_ns, seen.first_content_ns, seen.content_ns, seen.end_ns) == (
        100,
        100,
        (100, 200),
        400,
    )
    assert (seen.prompt_tokens, seen.output_tokens, seen.cached_tokens) == (5, 2, 0)
    assert (seen.finish_reason, seen.done, seen.content_events, seen.text) == ("length", True, 2, "ab")
    assert seen.answer_sha256 == hashlib.sha256(b"ab").hexdigest()


@pytest.mark.parametrize(
    "first",
    [
        delta(role="assistant", content=""),
        delta(role="assistant", content=None),
        delta(),
        chunk(""),
        chunk("", token_ids=[]),
        chunk("", prompt_progress={"total": 9, "processed": 4}),
        {"choices": []},
        {"choices": [], "usage": USAGE},
    ],
)
def test_what_carries_no_content_is_an_event_but_not_the_first_token(first: object) -> None:
    seen = measure(body(first), whole(chunk("a")))
    assert (seen.first_event_ns, seen.first_content_ns, seen.content_events) == (100, 200, 1)
    assert seen.fault is None


@pytest.mark.parametrize(
    "first",
    [
        chunk("a"),
        chunk("", token_ids=[7]),
        delta(content="a"),
        delta(reasoning="a"),
        delta(reasoning_content="a"),
        delta(tool_calls=[{"index": 0, "id": "call-1"}]),
    ],
)
def test_text_ids_reasoning_and_tool_calls_are_content(first: object) -> None:
    assert measure(body(first), whole(chunk("b"))).content_ns == (100, 200)


def test_a_keep_alive_is_no_event() -> None:
    assert measure(b": keep-alive\n\n", b"event: ping\n\n", b"data:\n\n", whole(chunk("a"))).first_event_ns == 400


def test_reasoning_sent_under_both_names_is_taken_once() -> None:
    assert measure(whole(delta(reasoning="ab", reasoning_content="ab"))).text == "ab"


def test_a_tool_calls_random_id_does_not_change_the_answer() -> None:
    first, second = (
        measure(whole(delta(tool_calls=[{"id": name, "function": {"name": "f", "arguments": "{}"}}])))
        for name in ("call-1", "call-2")
    )
    assert first.text == "f{}"
    assert first.answer_sha256 == second.answer_sha256


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r", "\r\n\n", "\n\r"])
def test_every_line_end_decodes(end: str) -> None:
    events = [chunk("a"), chunk("b", "stop"), {"choices": [], "usage": USAGE}, "[DONE]"]
    assert measure(body(*events, end=end)).fault is None


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r"])
def test_every_line_end_decodes_byte_by_byte_at_the_time_of_the_byte_that_ends_the_event(end: str) -> None:
    first = body(chunk("a"), end=end)
    content = first + body(chunk("b", "stop"), {"choices": [], "usage": USAGE}, "[DONE]", end=end)
    seen = measure(*(content[at : at + 1] for at in range(len(content))))
    assert seen.fault is None
    # a bare CR ends its line already: the LF of a CRLF is not waited for
    assert seen.first_content_ns == 100 * (len(first) - end.endswith("\r\n"))


def test_a_byte_order_mark_a_missing_space_and_an_event_over_several_lines_decode() -> None:
    split = b'data:{"choices":\ndata:  [{"text": "a"}]}\n\n'
    assert measure(b"\xef\xbb\xbf" + split, whole(chunk("b"))).text == "ab"
    assert measure(b"\xef", b"\xbb", b"\xbf" + split, whole(chunk("b"))).text == "ab"


def test_a_last_event_without_its_blank_line_counts_when_its_last_byte_came() -> None:
    content = whole(chunk("a"))
    for cut in (1, 2):
        seen = measure(content[:-cut])
        assert (seen.fault, seen.done, seen.end_ns) == (None, True, 100)


def test_usage_in_the_last_content_chunk_counts() -> None:
    seen = measure(body(chunk("a"), chunk("", "stop") | {"usage": USAGE}, "[DONE]"))
    assert (seen.fault, seen.output_tokens) == (None, 2)


def test_the_last_of_several_usages_counts() -> None:
    sooner = {"prompt_tokens": 5, "completion_tokens": 1}
    seen = measure(whole(chunk("a") | {"usage": sooner}))
    assert (seen.output_tokens, seen.cached_tokens) == (2, 0)


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {}}])
def test_cached_tokens_that_are_absent_are_not_zero(details: dict[str, object]) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 1, **details}
    seen = measure(body(chunk("a", "stop"), {"choices": [], "usage": usage}, "[DONE]"))
    assert (seen.fault, seen.cached_tokens) == (None, None)


def test_usage_that_was_not_asked_for_is_not_missed() -> None:
    content = body(chunk("a", "stop"), "[DONE]")
    assert measure(content, usage_asked=False).fault is None
    assert "usage" in (measure(content).fault or "")


END = {"choices": [], "usage": USAGE}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (body(chunk("a"), END, "[DONE]"), "without finish reason"),
        (body(chunk("a", "stop"), END), "without [DONE]"),
        (body(chunk("a", "stop"), "[DONE]"), "without usage"),
        (b"", "without finish reason, [DONE], usage"),
        (body({"error": {"message": "m", "type": "InternalServerError", "code": 500}}, "[DONE]"), "error object"),
        (body({"error": "m"}, "[DONE]"), "error object"),
        (
            body({"object": "error", "message": "m", "type": "BadRequestError", "code": 400}),
            "type BadRequestError",
        ),
        (whole(chunk("a")) + body({"error": {"type": "T"}}), "after [DONE]"),
        (body(chunk("a", "abort"), END, "[DONE]"), "finish reason abort"),
        (body(chunk("a"), "{nonsense"), "not JSON"),
        (body("[" * 100_000), "not JSON"),
        (body("[1]"), "not JSON"),
        (b'data: {"choices": [{"text": "\xff"}]}\n\n', "not JSON"),
        (body(chunk("a"))[:-9], "cut off inside an event"),
        (body({"choices": [{"index": 1, "text": "a"}]}), "more than one choice"),
        (body({"choices": [{"text": 5}]}), "text is not a string"),
        (body({"choices": 5}), "choices is not a list"),
        (body(chunk("a", token_ids=["7"])), "token id is not a whole number"),
        (body({"choices": [], "usage": {"prompt_tokens": True, "completion_tokens": 1}}), "prompt_tokens"),
        (body({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": -1}}), "completion_tokens"),
        (b"data: " + b"x" * EVENT_LIMIT, "longer than"),
        ((b"data: " + b"x" * (EVENT_LIMIT // 2) + b"\n") * 2, "longer than"),
    ],
)
def test_a_stream_that_is_not_whole_says_why(content: bytes, fault: str) -> None:
    assert fault in (measure(content).fault or "")


def test_a_fault_is_known_at_once_and_what_follows_is_ignored() -> None:
    stream = Stream()
    stream.feed(body({"error": {"type": "T", "code": "c1"}}), 1)
    assert stream.broken == "the server sent an error object (type T, code c1)"
    stream.feed(whole(chunk("a")), 2)
    assert stream.end(3).fault == stream.broken


def test_ids_are_part_of_the_answers_hash() -> None:
    plain = measure(whole(chunk("a")))
    with_ids = measure(whole(chunk("a", token_ids=[7, 8]), chunk("", token_ids=[9])))
    other_ids = measure(whole(chunk("a", token_ids=[7, 8]), chunk("", token_ids=[10])))
    assert with_ids.token_ids == (7, 8, 9)
    assert plain.token_ids is None
    assert len({plain.answer_sha256, with_ids.answer_sha256, other_ids.answer_sha256}) == 3
    assert with_ids.answer_sha256 == hashlib.sha256(b"a\x007,8,9").hexdigest() == answer_hash("a", (7, 8, 9))


def test_half_a_surrogate_pair_can_be_hashed() -> None:
    escaped = b'data: {"choices": [{"text": "\\ud83d"}]}\n\n'
    assert len(measure(escaped, whole(chunk("a"))).answer_sha256) == 64


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(max_size=8), min_size=1, max_size=6),
    end=st.sampled_from(["\n\n", "\r\n\r\n", "\r\r"]),
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_no_split_changes_anything_but_arrival_times(texts: list[str], end: str, cuts: list[int]) -> None:
    events = [*map(chunk, texts), chunk("🙂é", "stop"), {"choices": [], "usage": USAGE}, "[DONE]"]
    content = body(*events, end=end)
    edges = [0, *sorted(cut % len(content) for cut in cuts), len(content)]
    pieces = [content[start:stop] for start, stop in itertools.pairwise(edges)]
    split, one = measure(*pieces), measure(content)
    assert _timeless(split) == _timeless(one)
    assert split.text == "".join(texts) + "🙂é"
    assert split.fault is None


def _timeless(seen: Measured) -> tuple[object, ...]:
    return (
        seen.fault,
        seen.text,
        seen.answer_sha256,
        seen.content_events,
        seen.output_tokens,
        seen.finish_reason,
        seen.done,
    )


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.binary(max_size=40), max_size=8))
def test_no_bytes_at_all_make_it_raise(pieces: list[bytes]) -> None:
    assert measure(*pieces).fault is not None


SECRET = "swordfish"
IDS = [918273, 645546, 271828, 314159, 161803]


@pytest.mark.parametrize(
    "content",
    [
        whole(chunk(SECRET, token_ids=IDS)),
        body(chunk(SECRET), {"error": {"message": SECRET, "type": f"{SECRET}: {SECRET}", "code": f"<{SECRET}>"}}),
        body(f"{{{SECRET}"),
        body(chunk("a", f"{SECRET}?")),
        body(chunk(SECRET))[:-9],
    ],
)
def test_no_text_and_no_ids_are_in_what_a_stream_measured(content: bytes) -> None:
    seen = measure(content)
    for shown in (repr(seen), str(seen), seen.fault or ""):
        assert SECRET not in shown
        assert not any(str(number) in shown for number in IDS)


def answer(**choice: object) -> bytes:
    first = {"index": 0, "text": SECRET, "finish_reason": "stop", **choice}
    return json.dumps({"model": "m", "system_fingerprint": "f", "choices": [first], "usage": USAGE}).encode()


def test_an_answer_that_did_not_stream_gives_its_figures() -> None:
    seen = decode_answer(answer(token_ids=IDS))
    assert (seen.prompt_tokens, seen.output_tokens, seen.cached_tokens, seen.finish_reason) == (5, 2, 0, "stop")
    assert (seen.model, seen.system_fingerprint, seen.top, seen.token_ids) == ("m", "f", None, tuple(IDS))
    assert seen.answer_sha256 == answer_hash(SECRET, tuple(IDS))
    assert SECRET not in repr(seen) + str(seen)
    assert "918273" not in repr(seen)


@pytest.mark.parametrize(
    "logprobs",
    [
        {"top_logprobs": [{"token_id:7": -0.5, "token_id:3": -1}, {"token_id:9": 0.0}]},
        {
            "content": [
                {"top_logprobs": [{"id": 7, "logprob": -0.5}, {"id": 3, "logprob": -1}]},
                {"top_logprobs": []},
            ]
        },
        {"content": [{"top_logprobs": [{"token": "token_id:7", "logprob": -0.5}, {"id": 3, "logprob": -1}]}]},
    ],
)
def test_the_first_tokens_top_is_read_by_id_from_every_form(logprobs: object) -> None:
    assert decode_answer(answer(logprobs=logprobs)).top == ((7, -0.5), (3, -1.0))


def test_a_probability_of_zero_is_kept_for_the_reading() -> None:
    top = decode_answer(answer(logprobs={"top_logprobs": [{"token_id:7": float("-inf"), "token_id:8": -9999}]})).top
    assert top == ((7, float("-inf")), (8, -9999.0))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (answer(logprobs={"top_logprobs": [{SECRET: -0.5}]}), "return_tokens_as_token_ids"),
        (
            answer(logprobs={"content": [{"top_logprobs": [{"token": SECRET, "logprob": -1}]}]}),
            "ask for token ids",
        ),
        (answer(logprobs={"top_logprobs": [{"token_id:7": None}]}), "not a number"),
        (answer(logprobs={"top_logprobs": [{"token_id:7": 10**400}]}), "not a number"),
        (answer(logprobs={"top_logprobs": []}), "no top_logprobs"),
        (answer(finish_reason=None), "no finish reason"),
        (answer().replace(b'"usage"', b'"uses"'), "no usage"),
        (b'{"choices": [], "usage": null}', "0 choices"),
        (answer()[:-3], "not JSON"),
        (json.dumps({"error": {"message": SECRET, "type": "Bad Request", "code": 400}}).encode(), "code 400"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused_without_its_text(content: bytes, fault: str) -> None:
    with pytest.raises(EvidenceError, match=fault) as caught:
        decode_answer(content)
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    assert caught.value.__context__ is None


def test_an_error_body_is_named_by_type_and_code_alone() -> None:
    assert error_label(b'{"error": {"message": "m", "type": "Bad Request", "code": 400}}') == (
        "the server sent an error object (type Bad Request, code 400)"
    )
    assert error_label(b'{"detail": "Not Found"}') is None
    assert error_label(b"<html>") is None
