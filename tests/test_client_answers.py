"""Bodies of requests, counters, and the quality of a probe."""

from __future__ import annotations

import math

import pytest

from fairtrial.client.answers import Counters, completion, counters, probe_quality
from fairtrial.errors import EvidenceError


def test_a_timed_cell_asks_for_a_greedy_stream_with_usage_and_ids() -> None:
    body = completion(model="m", prompt=[1, 2], max_tokens=9, salt="s", ignore_eos=True)
    assert body == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 9,
        "temperature": 0,
        "seed": 0,
        "cache_salt": "s",
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": True,
    }


def test_a_probe_asks_for_logprobs_by_token_id_without_a_stream() -> None:
    body = completion(model="m", prompt=[1], max_tokens=1, salt="s", stream=False, logprobs=20)
    assert (body["logprobs"], body["return_tokens_as_token_ids"], body["stream"]) == (20, True, False)
    assert not {"stream_options", "return_token_ids", "ignore_eos"} & set(body)
    with pytest.raises(ValueError, match="stream=False"):
        completion(model="m", prompt=[1], max_tokens=1, salt="s", logprobs=20)


def test_counters_are_summed_over_labels_and_matched_by_their_exact_names() -> None:
    text = """# HELP vllm:request_success_total Finished.
vllm:request_success_total{engine="0",finished_reason="stop",model_name="a} 9"} 2.0
vllm:request_success_total{engine="1",finished_reason="length",model_name="m"} 1e1 1795961449000
vllm:request_success_created{engine="0"} 1.79e+09
vllm:prompt_tokens_total_created 5
vllm:prompt_tokens_by_source_total{source="local_compute"} 77
 vllm:num_requests_running 3
vllm:num_requests_waiting_by_reason{reason="x"} 4.0
http_requests_total{handler="/metrics"} nonsense
"""
    assert counters(text) == Counters(running=3, finished=12)
    assert counters("") == Counters()


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1.5", "x"])
def test_a_damaged_counter_is_not_an_absent_one(value: str) -> None:
    with pytest.raises(EvidenceError, match="line 2: vllm:num_requests_running"):
        counters(f"\nvllm:num_requests_running {value}\n")


def test_quality_is_mass_and_entropy_of_the_20_likeliest() -> None:
    even = [(number, math.log(1 / 20)) for number in range(20)]
    assert probe_quality(even) == pytest.approx((1.0, math.log(20)))
    unlikely = (99, math.log(0.01))
    assert probe_quality([unlikely, *even]) == pytest.approx((1.0, math.log(20)))
    sure = [(0, 0.0), *((number, -9999.0) for number in range(1, 19)), (19, -math.inf)]
    assert probe_quality(sure) == (1.0, 0.0)


@pytest.mark.parametrize(
    "top",
    [
        [(number, -3.0) for number in range(19)],
        [(number % 19, -3.0) for number in range(20)],
        [(number, math.nan) for number in range(20)],
        [(number, 0.01) for number in range(20)],
    ],
)
def test_a_probe_that_cannot_be_read_raises(top: list[tuple[int, float]]) -> None:
    with pytest.raises(EvidenceError, match="probe"):
        probe_quality(top)
