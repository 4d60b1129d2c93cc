"""Every recorded exchange with a real server, replayed: HTTP framing by h11, the body by the decoder."""

from __future__ import annotations

import base64
import itertools
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.client.answers import Counters, counters, probe_quality
from fairtrial.errors import EvidenceError
from fairtrial.stream import Measured, Stream, decode_answer, error_label

RECORDINGS = Path(__file__).parent / "data" / "recordings"
VLLM, LLAMA = "vllm-0.32.0-cpu", "llama-server-11434"
FILES = sorted(path.relative_to(RECORDINGS).as_posix() for path in RECORDINGS.glob("*/*.json"))


@dataclass(frozen=True)
class Replayed:
    """One response; ``pieces`` is what each piece of the raw bytes brought of its body."""

    status: int
    pieces: list[tuple[int, bytes]]

    @property
    def body(self) -> bytes:
        return b"".join(content for _, content in self.pieces)


@cache
def received(file: str) -> tuple[tuple[int, bytes], ...]:
    exchange = json.loads((RECORDINGS / file).read_text())
    return tuple((at_ns, base64.b64decode(text)) for at_ns, text in exchange["recv"])


def replay(pieces: tuple[tuple[int, bytes], ...]) -> Replayed:
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    status, body = 0, list[tuple[int, bytes]]()
    for at_ns, content in (*pieces, (pieces[-1][0], b"")):
        try:
            connection.receive_data(content)
            while not isinstance(event := connection.next_event(), type):
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body.append((at_ns, bytes(event.data)))
                elif isinstance(event, h11.EndOfMessage):
                    return Replayed(status, body)
        except h11.RemoteProtocolError:
            break
    return Replayed(status, body)


def measure(pieces: list[tuple[int, bytes]], *, usage_asked: bool = True) -> Measured:
    stream = Stream(usage_asked=usage_asked)
    for at_ns, content in pieces:
        stream.feed(content, at_ns)
    return stream.end(pieces[-1][0])


# finish reason, prompt tokens, output tokens, cached tokens, content events, first content, end mark (ns)
STREAMS = {
    f"{LLAMA}/chat-stream-logprobs.json": ("length", 39, 4, 38, 3, 39189260, 74882355),
    f"{LLAMA}/chat-stream-usage.json": ("length", 39, 24, 38, 21, 36182362, 402939555),
    f"{LLAMA}/completion-cold-2k-new-salt.json": ("length", 2048, 8, 2047, 4, 146673277, 601821388),
    f"{LLAMA}/completion-cold-2k-salted.json": ("length", 2048, 8, 0, 8, 18300757106, 18840107833),
    f"{LLAMA}/completion-stop-eos.json": ("stop", 5, 3, 4, 2, 13744141, 43201506),
    f"{LLAMA}/completion-stream-continuous-usage.json": ("length", 5, 8, 4, 8, 30106198, 222816772),
    f"{LLAMA}/completion-stream-no-usage.json": ("length", 5, 8, 4, 8, 38171874, 594479026),
    f"{LLAMA}/completion-stream-token-ids.json": ("length", 5, 8, 4, 8, 60704845, 210174377),
    f"{LLAMA}/completion-stream-usage.json": ("length", 5, 8, 4, 8, 283022301, 426690936),
    f"{LLAMA}/completion-warm-2k-same-salt.json": ("length", 2048, 8, 2047, 4, 152710142, 596872218),
    f"{LLAMA}/error-unknown-model.json": ("length", 5, 8, 4, 8, 64530112, 163309995),
    f"{VLLM}/chat-stream-logprobs.json": ("length", 39, 4, 0, 3, 310627890, 499965184),
    f"{VLLM}/chat-stream-usage.json": ("length", 39, 24, 0, 17, 295647790, 2430495022),
    f"{VLLM}/completion-cold-2k-new-salt.json": ("length", 2048, 8, 0, 4, 9979774594, 10659552581),
    f"{VLLM}/completion-cold-2k-salted.json": ("length", 2048, 8, 0, 4, 9272855305, 10034049451),
    f"{VLLM}/completion-stop-eos.json": ("stop", 5, 3, 0, 2, 111849947, 301772290),
    f"{VLLM}/completion-stream-continuous-usage.json": ("length", 5, 8, 0, 8, 123634766, 781225639),
    f"{VLLM}/completion-stream-token-ids.json": ("length", 5, 8, 0, 8, 120328064, 800656161),
    f"{VLLM}/completion-stream-usage.json": ("length", 5, 8, 0, 8, 170905901, 1006845358),
    f"{VLLM}/completion-warm-2k-same-salt.json": ("length", 2048, 8, 1920, 4, 889450214, 1671230204),
}
FAULTY_STREAMS = {
    f"{LLAMA}/chat-stream-no-usage.json": "the stream ended without usage",
    f"{LLAMA}/worker-killed-mid-stream.json": "the stream ended without finish reason, [DONE], usage",
    f"{VLLM}/chat-stream-no-usage.json": "the stream ended without usage",
    f"{VLLM}/completion-stream-no-usage.json": "the stream ended without usage",
    f"{VLLM}/completion-two-choices.json": "more than one choice",
    f"{VLLM}/worker-killed-mid-stream.json": "error object (type InternalServerError, code 500)",
}
# finish reason, prompt tokens, output tokens, cached tokens, entries of the first token's top
ANSWERS = {
    f"{LLAMA}/chat-plain.json": ("length", 39, 24, 0, None),
    f"{LLAMA}/clamped-output.json": ("length", 2000, 304, 1999, None),
    f"{LLAMA}/completion-logprobs-top20-ids.json": ("length", 5, 1, 4, 20),
    f"{LLAMA}/completion-logprobs-top20-text.json": ("length", 5, 1, 4, 20),
    f"{LLAMA}/completion-plain.json": ("length", 5, 8, 0, None),
    f"{LLAMA}/error-empty-salt.json": ("length", 5, 8, 4, None),
    f"{LLAMA}/error-logprobs-21.json": ("length", 5, 8, 4, 21),
    f"{VLLM}/chat-plain.json": ("length", 39, 24, 0, None),
    f"{VLLM}/clamped-output.json": ("length", 2000, 304, 0, None),
    f"{VLLM}/completion-logprobs-top20-ids.json": ("length", 5, 1, 0, 20),
    f"{VLLM}/completion-plain.json": ("length", 5, 8, 0, None),
}
# status, the error object as it is named
ERRORS = {
    f"{LLAMA}/completion-two-choices.json": (400, "type invalid_request_error, code 400"),
    f"{LLAMA}/error-bad-json.json": (400, "type invalid_request_error, code 400"),
    f"{LLAMA}/error-not-found.json": (404, "type not_found_error, code 404"),
    f"{LLAMA}/error-too-long.json": (400, "type exceed_context_size_error, code 400"),
    f"{LLAMA}/version.json": (404, "type not_found_error, code 404"),
    f"{VLLM}/error-bad-json.json": (400, "type Bad Request, code 400"),
    f"{VLLM}/error-empty-salt.json": (400, "type BadRequestError, code 400"),
    f"{VLLM}/error-logprobs-21.json": (400, "type BadRequestError, code 400"),
    f"{VLLM}/error-not-found.json": (404, None),
    f"{VLLM}/error-too-long.json": (400, "type BadRequestError, code 400"),
    f"{VLLM}/error-unknown-model.json": (404, "type NotFoundError, code 404"),
}
REFUSED = {f"{VLLM}/completion-logprobs-top20-text.json"}
OTHERS = {f"{server}/{name}.json" for server in (LLAMA, VLLM) for name in ("health", "metrics", "models", "tokenize")}
OTHERS |= {f"{VLLM}/version.json"}


def test_every_recording_has_its_expectation() -> None:
    assert set(FILES) == {*STREAMS, *FAULTY_STREAMS, *ANSWERS, *ERRORS, *REFUSED, *OTHERS}


@pytest.mark.parametrize("file", STREAMS)
def test_a_recorded_stream_measures_what_the_server_sent(file: str) -> None:
    seen = measure(replay(received(file)).pieces)
    assert seen.fault is None
    assert STREAMS[file] == (
        seen.finish_reason,
        seen.prompt_tokens,
        seen.output_tokens,
        seen.cached_tokens,
        seen.content_events,
        seen.first_content_ns,
        seen.end_ns,
    )


@pytest.mark.parametrize("file", FAULTY_STREAMS)
def test_a_recorded_stream_that_is_not_whole_says_why(file: str) -> None:
    seen = measure(replay(received(file)).pieces)
    assert FAULTY_STREAMS[file] in (seen.fault or "")


def test_a_stream_without_usage_is_whole_where_none_was_asked_for() -> None:
    seen = measure(replay(received(f"{VLLM}/completion-stream-no-usage.json")).pieces, usage_asked=False)
    assert (seen.fault, seen.output_tokens, seen.content_events) == (None, None, 8)


@pytest.mark.parametrize("file", ANSWERS)
def test_a_recorded_answer_decodes(file: str) -> None:
    seen = decode_answer(replay(received(file)).body)
    figures = (seen.finish_reason, seen.prompt_tokens, seen.output_tokens, seen.cached_tokens)
    assert (*figures, None if seen.top is None else len(seen.top)) == ANSWERS[file]
    assert seen.model == "m"
    assert seen.system_fingerprint == ("vllm-0.32.0-4885619d" if VLLM in file else "b0-unknown")


def test_top_20_keyed_by_text_is_refused() -> None:
    with pytest.raises(EvidenceError, match="return_tokens_as_token_ids"):
        decode_answer(replay(received(f"{VLLM}/completion-logprobs-top20-text.json")).body)


@pytest.mark.parametrize(
    ("server", "first", "mass", "entropy_nats"),
    [(VLLM, (7042, -0.25807321071624756), 0.9281, 0.8399), (LLAMA, (7042, -0.24842411279678345), 0.9311, 0.8218)],
)
def test_top_20_by_id_reads_the_same_from_both_servers(
    server: str, first: tuple[int, float], mass: float, entropy_nats: float
) -> None:
    top = decode_answer(replay(received(f"{server}/completion-logprobs-top20-ids.json")).body).top
    assert top is not None
    assert top[0] == first
    assert probe_quality(top) == pytest.approx((mass, entropy_nats), abs=1e-4)


@pytest.mark.parametrize("file", ERRORS)
def test_a_recorded_error_is_named_by_type_and_code(file: str) -> None:
    status, label = ERRORS[file]
    seen = replay(received(file))
    assert seen.status == status
    assert error_label(seen.body) == (label and f"the server sent an error object ({label})")


def test_a_streamed_answer_and_a_plain_one_hash_alike() -> None:
    for server in (VLLM, LLAMA):
        plain = decode_answer(replay(received(f"{server}/completion-plain.json")).body)
        streamed = measure(replay(received(f"{server}/completion-stream-usage.json")).pieces)
        assert plain.answer_sha256 == streamed.answer_sha256


def test_token_ids_show_the_token_whose_text_is_not_there_yet() -> None:
    seen = measure(replay(received(f"{VLLM}/completion-stream-token-ids.json")).pieces)
    assert seen.token_ids == (7042, 30, 198, 198, 504, 2988, 314, 42)
    late = measure(replay(received(f"{VLLM}/completion-cold-2k-salted.json")).pieces)
    assert late.first_event_ns is not None
    assert late.first_content_ns is not None
    assert late.first_content_ns - late.first_event_ns > 100_000_000


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (
            VLLM,
            Counters(
                running=0,
                waiting=0,
                finished=18,
                prompt_tokens=8350,
                generation_tokens=465,
                prefix_hits=1920,
                prefix_queries=8350,
                external_hits=0,
            ),
        ),
        (LLAMA, Counters(running=0, waiting=0, prompt_tokens=2108, generation_tokens=473, prefix_hits=6247)),
    ],
)
def test_recorded_counters_read_by_their_exact_names(server: str, expected: Counters) -> None:
    assert counters(replay(received(f"{server}/metrics.json")).body.decode()) == expected


SPLIT = [
    f"{VLLM}/completion-stop-eos.json",
    f"{VLLM}/worker-killed-mid-stream.json",
    f"{LLAMA}/completion-stop-eos.json",
    f"{LLAMA}/worker-killed-mid-stream.json",
]


@pytest.mark.parametrize("file", SPLIT)
def test_every_split_in_two_of_the_raw_bytes_changes_arrival_times_alone(file: str) -> None:
    raw = b"".join(content for _, content in received(file))
    one = measure(replay(((1, raw),)).pieces)
    firsts = []
    for at in range(1, len(raw)):
        seen = measure(replay(((1, raw[:at]), (2, raw[at:]))).pieces)
        assert timeless(seen) == timeless(one)
        firsts.append(seen.first_content_ns)
    # late until the whole first content lies before the cut, then at once
    turn = firsts.index(1)
    assert firsts == [2] * turn + [1] * (len(firsts) - turn)
    content = raw.index(b" Paris")
    assert content < turn < content + 250


@pytest.mark.parametrize("file", [f"{VLLM}/chat-stream-usage.json", f"{LLAMA}/chat-stream-usage.json"])
def test_every_split_in_two_of_a_body_with_multi_byte_text_changes_arrival_times_alone(file: str) -> None:
    body = replay(received(file)).body
    one = measure([(1, body)])
    assert len(one.text.encode()) > len(one.text)
    for at in range(1, len(body)):
        assert timeless(measure([(1, body[:at]), (2, body[at:])])) == timeless(one)


@settings(max_examples=40, deadline=None)
@given(file=st.sampled_from(sorted(STREAMS)), cuts=st.lists(st.integers(1, 100_000), max_size=30))
def test_any_split_of_a_recorded_stream_changes_arrival_times_alone(file: str, cuts: list[int]) -> None:
    raw = b"".join(content for _, content in received(file))
    edges = [0, *sorted({cut % len(raw) for cut in cuts} - {0}), len(raw)]
    pieces = tuple((at, raw[start:stop]) for at, (start, stop) in enumerate(itertools.pairwise(edges), start=1))
    assert timeless(measure(replay(pieces).pieces)) == timeless(measure(replay(received(file)).pieces))


def timeless(seen: Measured) -> tuple[object, ...]:
    return (
        seen.fault,
        seen.answer_sha256,
        seen.content_events,
        seen.output_tokens,
        seen.cached_tokens,
        seen.finish_reason,
        seen.done,
    )


@pytest.mark.parametrize("file", [*STREAMS, *FAULTY_STREAMS])
def test_nothing_of_a_recorded_answers_text_is_shown(file: str) -> None:
    seen = measure(replay(received(file)).pieces)
    assert seen.text
    assert repr(seen) == repr(replace(seen, text="", token_ids=None))
