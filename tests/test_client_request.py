"""The timed request, against a server on a raw socket that plays a script."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Mapping

import pytest
from hostile import (
    DONE,
    END,
    FLOOD,
    HOLD,
    READ,
    RESET,
    Drip,
    Server,
    Step,
    event,
    framed,
    head,
    serve,
    text_chunk,
    usage_chunk,
    whole,
)

from fairtrial.client.request import Call, Endpoint, Exchange, Request, fetch
from fairtrial.errors import StepFailed
from fairtrial.stream import EVENT_LIMIT

LIMIT_S = 20.0
SECRET = "swordfish"


def call_of(
    server: Server,
    *,
    limit_s: float = LIMIT_S,
    silence_limit_s: float | None = None,
    stream: bool = True,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Call:
    return Call(
        base=dataclasses.replace(server.endpoint, api_key=api_key),
        path="/v1/completions",
        body=b'{"prompt": [1]}',
        headers=headers or {},
        stream=stream,
        limit_s=limit_s,
        silence_limit_s=silence_limit_s,
    )


def ask(call: Call) -> Exchange:
    request = Request(call)
    request.start()
    exchange = request.poll(LIMIT_S)
    assert exchange is not None
    return exchange


def play(*script: Step, stream: bool = True, silence_limit_s: float | None = None) -> Exchange:
    with serve(*script) as server:
        return ask(call_of(server, stream=stream, silence_limit_s=silence_limit_s))


def test_a_whole_stream_is_measured_from_the_first_byte_written() -> None:
    before_ns = time.monotonic_ns()
    exchange = play(*whole("a", "b", "c"))
    after_ns = time.monotonic_ns()
    assert exchange.fault is None
    assert (exchange.status, exchange.answer, exchange.body) == (200, None, b"")
    seen = exchange.measured
    assert seen is not None
    assert (seen.text, seen.output_tokens, seen.cached_tokens, seen.content_events) == ("abc", 3, 0, 3)
    assert exchange.started_ns is not None
    assert exchange.headers_ns is not None
    assert seen.first_content_ns is not None
    assert before_ns < exchange.started_ns < exchange.headers_ns <= seen.first_content_ns <= seen.end_ns
    assert seen.end_ns <= exchange.end_ns < after_ns
    assert exchange.connect_ns is not None
    assert 0 < exchange.connect_ns < exchange.started_ns - before_ns
    assert exchange.ttft_ns == seen.first_content_ns - exchange.started_ns
    assert exchange.tpot_ns == (seen.end_ns - seen.first_content_ns) / 2
    assert exchange.itl_ns == tuple(seen.content_ns[at + 1] - seen.content_ns[at] for at in (0, 1))


def test_the_first_token_is_not_the_headers_a_role_or_progress() -> None:
    gate = threading.Event()
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    progress = event(text_chunk("", prompt_progress={"processed": 4}))
    with serve(head(), role, framed(b": keep-alive\n\n"), progress, gate, *whole("a")[1:]) as server:
        request = Request(call_of(server))
        request.start()
        assert request.poll(0.1) is None
        released_ns = time.monotonic_ns()
        gate.set()
        exchange = request.poll(LIMIT_S)
    assert exchange is not None
    assert exchange.fault is None
    assert exchange.measured is not None
    assert exchange.measured.first_content_ns is not None
    assert exchange.measured.first_content_ns > released_ns
    assert exchange.started_ns is not None
    assert exchange.ttft_ns == exchange.measured.first_content_ns - exchange.started_ns


def test_the_request_is_written_as_asked() -> None:
    with serve(*whole("a")) as server:
        assert ask(call_of(server, api_key="k3y", headers={"X-Request-Id": "7"})).fault is None
        top, _, body = server.requests[0].partition(b"\r\n\r\n")
    line, *headers = top.decode().lower().split("\r\n")
    assert line == "post /v1/completions http/1.1"
    assert {
        f"host: 127.0.0.1:{server.endpoint.port}",
        "authorization: bearer k3y",
        "connection: close",
        "content-type: application/json",
        "content-length: 15",
        "x-request-id: 7",
    } <= set(headers)
    assert body == b'{"prompt": [1]}'


def test_our_own_port_is_known_before_the_server_sees_it() -> None:
    with serve(HOLD) as server:
        request = Request(call_of(server))
        assert request.local_port is None
        request.start()
        while not server.peers:
            assert request.poll(0.001) is None
        assert server.peers == [request.local_port]
        request.close()


def error(kind: str = "BadRequestError", code: object = 400) -> bytes:
    return json.dumps({"error": {"message": SECRET, "type": kind, "param": SECRET, "code": code}}).encode()


ERROR = event({"error": {"message": SECRET, "type": "InternalServerError", "code": 500}})


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        # ends too soon
        ((), "the connection closed before the start of the answer"),
        ((RESET,), "the connection broke before the end of the answer"),
        ((head()[:20],), "the connection closed before the start of the answer"),
        ((head(),), "the connection closed before the end of the answer; the stream ended without"),
        ((head(), event(text_chunk(SECRET))), "the connection closed before the end of the answer; the stream ended"),
        ((head(), event(text_chunk(SECRET)), RESET), "the connection broke before the end of the answer; the stream"),
        ((head(), event(text_chunk(SECRET)), END), "the stream ended without finish reason, [DONE], usage"),
        ((head(), event(text_chunk(SECRET))[:-30]), "cut off inside an event"),
        # ends wrongly
        ((head(), event(text_chunk(SECRET)), ERROR, DONE, END), "error object (type InternalServerError, code 500)"),
        ((head(), event(text_chunk(SECRET, "length")), DONE, END), "the stream ended without usage"),
        ((head(), event(text_chunk(SECRET)), event(usage_chunk(5, 1)), DONE, END), "without finish reason"),
        # is no stream
        ((head("400 Bad Request", "application/json", len(error())), error()), "HTTP status 400: the server sent an"),
        ((head("400 Bad Request", "application/json", 99), error()[:50]), "closed before the end of the answer"),
        ((head("500 Oh", "text/html", 9), SECRET.encode()), "HTTP status 500"),
        ((head("204 No Content", "text/event-stream", 0),), "HTTP status 204"),
        ((head("200 OK", "application/json", len(error())), error()), "the answer is not an event stream"),
        # is no HTTP
        ((f"{SECRET}\r\n\r\n".encode(),), "what the server sent is not HTTP/1.1"),
        ((head(), f"{SECRET}\r\n".encode()), "what the server sent is not HTTP/1.1"),
        ((head() + event(text_chunk("a")), b"zz\r\n" + SECRET.encode()), "what the server sent is not HTTP/1.1"),
        ((b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,), "what the server sent is not HTTP/1.1"),
        # is too much
        ((head(), b"%x\r\n" % (2 * EVENT_LIMIT), b"data: " + b"x" * (EVENT_LIMIT + 9), HOLD), "longer than"),
    ],
)
def test_an_answer_that_is_not_whole_has_a_fault_without_its_text(script: tuple[Step, ...], fault: str) -> None:
    exchange = play(*script)
    assert fault in (exchange.fault or "")
    assert SECRET not in repr(exchange) + str(exchange) + (exchange.fault or "")


def test_a_stream_that_breaks_keeps_what_it_measured() -> None:
    exchange = play(head(), event(text_chunk("a")), event(text_chunk("b")))
    assert exchange.measured is not None
    assert exchange.measured.content_events == 2
    assert exchange.ttft_ns is not None


def test_a_stream_is_whole_once_its_end_mark_came_even_if_the_connection_stays_or_breaks() -> None:
    assert play(*whole("a")[:-1]).fault is None
    assert play(*whole("a")[:-1], RESET).fault is None
    exchange = play(*whole("a")[:-1], HOLD)
    assert exchange.fault is None
    assert exchange.measured is not None
    # what the server did with the connection afterwards is not in the time
    assert exchange.measured.end_ns < exchange.end_ns


@pytest.mark.parametrize("script", [(HOLD,), (head(), HOLD), (head(), event(text_chunk("a")), HOLD)])
def test_a_server_that_falls_silent_ends_at_the_limit(script: tuple[Step, ...]) -> None:
    with serve(*script) as server:
        assert (ask(call_of(server, limit_s=0.2)).fault or "").startswith("no whole answer within 0.2 s")
        assert server.left.wait(LIMIT_S)
    assert (play(*script, silence_limit_s=0.2).fault or "").startswith("the server sent nothing for 0.2 s")


def test_a_server_that_never_stops_sending_ends_at_the_limit() -> None:
    with serve(head(), event(text_chunk("a")), FLOOD) as server:
        exchange = ask(call_of(server, limit_s=0.3, silence_limit_s=LIMIT_S))
    assert (exchange.fault or "").startswith("no whole answer within 0.3 s")


def test_a_server_that_drips_byte_by_byte_is_read_right() -> None:
    content = b"".join(whole("é", "🙂", "c"))
    exchange = play(Drip(content))
    assert exchange.fault is None
    assert exchange.measured is not None
    assert exchange.measured.text == "é🙂c"
    assert exchange.measured.content_events == 3


def test_the_clock_starts_before_the_first_byte_not_after_the_last() -> None:
    gate = threading.Event()
    with serve(gate, READ, *whole("a"), read=False) as server:
        request = Request(dataclasses.replace(call_of(server), body=b"x" * 8_000_000))
        request.start()
        while request.local_port is None:
            assert request.poll(0.001) is None
        # more than the kernel buffers: it cannot be written before the server reads
        assert request.poll(0.1) is None
        reading_ns = time.monotonic_ns()
        gate.set()
        exchange = request.poll(LIMIT_S)
    assert exchange is not None
    assert exchange.fault is None
    assert exchange.started_ns is not None
    assert exchange.started_ns < reading_ns


def test_slow_headers_are_not_the_first_token() -> None:
    gate = threading.Event()
    with serve(gate, *whole("a")) as server:
        request = Request(call_of(server))
        request.start()
        while not server.requests:
            assert request.poll(0.001) is None
        waited_ns = time.monotonic_ns()
        gate.set()
        exchange = request.poll(LIMIT_S)
    assert exchange is not None
    assert exchange.headers_ns is not None
    assert exchange.started_ns is not None
    assert exchange.started_ns < waited_ns < exchange.headers_ns


def test_nobody_listening_is_a_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    exchange = Request(Call(base=Endpoint(host="127.0.0.1", port=port), path="/", limit_s=LIMIT_S)).run()
    assert exchange.fault == "no connection: Connection refused"
    assert (exchange.connect_ns, exchange.started_ns, exchange.status) == (None, None, None)


def test_a_request_the_server_does_not_take_ends_at_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        base = Endpoint(host="127.0.0.1", port=listener.getsockname()[1])
        body = b"x" * 50_000_000
        exchange = Request(Call(base=base, path="/", limit_s=0.3, body=body)).run()
    assert exchange.fault == "the server did not take the request within 0.3 s"


@pytest.mark.parametrize("script", [(HOLD,), (head(), HOLD), (head(), event(text_chunk(SECRET)), HOLD)])
def test_closing_from_another_thread_ends_a_pending_request_within_half_a_second(script: tuple[Step, ...]) -> None:
    with serve(*script) as server:
        request = Request(call_of(server))
        request.start()
        while not server.requests:
            assert request.poll(0.001) is None
        closed_ns = time.monotonic_ns()
        request.close()
        assert server.left.wait(0.5)
        exchange = request.poll(0.5)
        assert time.monotonic_ns() - closed_ns < 500_000_000
    assert exchange is not None
    assert exchange.fault == "closed"
    assert request.poll(0) is exchange


def test_closing_ends_a_request_that_is_still_connecting() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(address)
        request = Request(Call(base=Endpoint(host=address[0], port=address[1]), path="/", limit_s=LIMIT_S))
        request.start()
        while request.local_port is None:
            assert request.poll(0.001) is None
        request.close()
        exchange = request.poll(0.5)
        for sock in waiting:
            sock.close()
    assert exchange is not None
    assert (exchange.fault, exchange.connect_ns) == ("closed", None)


def test_a_request_closed_before_it_began_never_connects() -> None:
    with serve(*whole("a")) as server:
        request = Request(call_of(server))
        request.close()
        assert request.run().fault == "closed"
        assert server.peers == []


def test_closing_after_the_end_changes_nothing() -> None:
    with serve(*whole("a")) as server:
        request = Request(call_of(server))
        exchange = request.run()
        request.close()
    assert request.poll(0) is exchange
    assert exchange.fault is None


def test_the_thread_is_a_daemon_and_ends_with_the_request() -> None:
    gate = threading.Event()
    with serve(gate, *whole("a")) as server:
        request = Request(call_of(server))
        request.start()
        threads = [thread for thread in threading.enumerate() if thread.name == "fairtrial-request"]
        assert [thread.daemon for thread in threads] == [True]
        gate.set()
        threads[0].join(LIMIT_S)
        assert not threads[0].is_alive()
        assert request.done.is_set()


def completion(**choice: object) -> bytes:
    first = {"index": 0, "text": SECRET, "finish_reason": "stop", **choice}
    usage = {"prompt_tokens": 5, "completion_tokens": 1}
    return json.dumps({"model": "m", "choices": [first], "usage": usage}).encode()


def test_a_completion_that_does_not_stream_is_decoded_and_its_body_let_go() -> None:
    body = completion()
    exchange = play(head("200 OK", "application/json", len(body)), body, stream=False)
    assert exchange.fault is None
    assert exchange.answer is not None
    assert (exchange.answer.text, exchange.body, exchange.measured, exchange.ttft_ns) == (SECRET, b"", None, None)
    assert SECRET not in repr(exchange)


def test_a_completion_that_cannot_be_decoded_is_a_fault() -> None:
    body = completion(logprobs={"top_logprobs": [{SECRET: -0.5}]})
    exchange = play(head("200 OK", "application/json", len(body)), body, stream=False)
    assert "ask for token ids" in (exchange.fault or "")
    assert exchange.answer is None
    assert SECRET not in repr(exchange)


def test_neither_prompt_nor_key_is_shown() -> None:
    base = Endpoint(host="127.0.0.1", port=1, api_key=SECRET)
    call = Call(base=base, path="/", limit_s=1, body=SECRET.encode(), headers={"X": SECRET})
    assert SECRET not in repr(call) + repr(Request(call))


@pytest.mark.parametrize("status", ["200 OK", "503 Service Unavailable"])
def test_fetch_gives_status_and_body(status: str) -> None:
    with serve(head(status, "application/json", 2), b"{}") as server:
        assert fetch(server.endpoint, "/v1/models", LIMIT_S) == (int(status[:3]), b"{}")
        assert server.requests[0].startswith(b"GET /v1/models HTTP/1.1\r\n")


@pytest.mark.parametrize("script", [(), (head("200 OK", "application/json", 9), b"{}"), (b"x\r\n\r\n",)])
def test_fetch_without_a_whole_response_says_where(script: tuple[Step, ...]) -> None:
    with (
        serve(*script) as server,
        pytest.raises(StepFailed, match=f"GET /health on 127.0.0.1:{server.endpoint.port}: "),
    ):
        fetch(server.endpoint, "/health", LIMIT_S)
