"""The reference server as a client sees it: a real process, asked over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fairtrial

REFERENCE = Path(fairtrial.__file__).parent / "reference"
PATIENCE_S = 30.0


class Server:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, str, bytes]:
        """Return status, content type and body; ``body`` is sent as JSON, bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            connection.request(method, path, content, {"content-type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("content-type", ""), answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, _, content = self.ask("GET", path)
        assert status == 200
        return json.loads(content)

    def complete(self, prompt: object = "Hello", **fields: object) -> Any:
        status, _, content = self.ask(
            "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 4, "ignore_eos": True} | fields
        )
        assert status == 200, content
        return json.loads(content)

    def stream(self, prompt: object = "Hello", **fields: object) -> list[str]:
        """Return the payloads of a stream that is whole."""
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True} | fields
        status, kind, content = self.ask("POST", "/v1/completions", body)
        assert (status, kind) == (200, "text/event-stream; charset=utf-8")
        events = content.decode().split("\n\n")
        assert events.pop() == ""
        return [event.removeprefix("data: ") for event in events]

    def metrics(self) -> dict[str, float]:
        """Return samples by name, or ``name reason`` where they have one."""
        _, kind, content = self.ask("GET", "/metrics")
        assert kind.startswith("text/plain")
        found = {}
        for line in content.decode().splitlines():
            if line.startswith("vllm:"):
                sample = re.fullmatch(r"vllm:(\w+)\{(.*)\} (\S+)", line)
                assert sample, line
                reason = re.search(r'finished_reason="(\w+)"', sample[2])
                found[f"{sample[1]} {reason[1]}" if reason else sample[1]] = float(sample[3])
        return found

    def until(self, **gauges: float) -> dict[str, float]:
        """Ask for the metrics until they say this."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = self.metrics()
            if all(found[name] == value for name, value in gauges.items()):
                return found
        raise AssertionError(f"{gauges} not within {PATIENCE_S:.0f} s")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def command(port: int, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "fairtrial.reference", "--port", str(port), "--model-size", "tiny", *arguments]


@contextlib.contextmanager
def serving(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(REFERENCE.parents[1])} | (env or {})
    process = subprocess.Popen(command(port, *arguments), env=environment, stderr=subprocess.PIPE, text=True)
    server = Server(process, port)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                if server.ask("GET", "/health")[0] == 200:
                    break
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
        yield server
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--max-model-len", "1024") as one:
        yield one


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Server]:
    """Its context is so large that a long prompt takes seconds."""
    with serving("--max-model-len", "262144") as one:
        yield one


# ---- shapes


def test_what_the_server_says_of_itself(server: Server) -> None:
    assert server.ask("GET", "/health")[2] == b""
    assert server.get("/version") == {"version": fairtrial.__version__}
    (model,) = server.get("/v1/models")["data"]
    assert (model["id"], model["max_model_len"], model["object"]) == ("reference", 1024, "model")
    assert server.get("/server_info")["arguments"] == {
        "host": "127.0.0.1",
        "port": server.port,
        "max_model_len": 1024,
        "served_model_name": "reference",
        "model_size": "tiny",
        "overlays": {},
    }


def test_text_and_tokens(server: Server) -> None:
    _, _, content = server.ask("POST", "/tokenize", {"prompt": "3,1"})
    assert json.loads(content) == {"count": 3, "max_model_len": 1024, "tokens": [51, 44, 49], "token_strs": None}
    _, _, content = server.ask("POST", "/detokenize", {"tokens": [51, 44, 49]})
    assert json.loads(content) == {"prompt": "3,1"}


def test_a_whole_answer(server: Server) -> None:
    answer = server.complete("Hello", return_token_ids=True, cache_salt="whole", a_field_nobody_knows=1)
    assert answer["object"] == "text_completion"
    assert re.fullmatch(r"cmpl-[0-9a-f]{16}", answer["id"])
    assert re.fullmatch(r"fairtrial-[\w.]+-[0-9a-f]{8}", answer["system_fingerprint"])
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "total_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
    }
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert choice["prompt_token_ids"] == list(b"Hello")
    assert bytes(choice["token_ids"]).decode() == choice["text"]


def test_ids_and_text_and_a_list_of_one_are_the_same_prompt(server: Server) -> None:
    prompts = ("Dice", list(b"Dice"), ["Dice"], [list(b"Dice")])
    texts = {server.complete(prompt)["choices"][0]["text"] for prompt in prompts}
    assert len(texts) == 1
    assert server.complete("dice")["choices"][0]["text"] not in texts


def test_the_likeliest_twenty_by_token_id(server: Server) -> None:
    fields = {"max_tokens": 2, "logprobs": 20, "return_token_ids": True}
    choice = server.complete("Dice rolls: 3,1,", return_tokens_as_token_ids=True, **fields)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert logprobs["text_offset"] == [0, 1]
    for chosen, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == 20
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert top[chosen] == logprob == max(top.values())
        assert 0.99 < sum(map(math.exp, top.values())) <= 1
    by_text = server.complete("Dice rolls: 3,1,", **fields)["choices"][0]["logprobs"]
    assert by_text["token_logprobs"] == logprobs["token_logprobs"]
    assert "".join(by_text["tokens"]) == choice["text"]


def test_with_no_top_only_the_chosen_token_has_a_logprob(server: Server) -> None:
    logprobs = server.complete("Dice", max_tokens=1, logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{logprobs["tokens"][0]: logprobs["token_logprobs"][0]}]


def test_a_stream(server: Server) -> None:
    whole = server.complete("Hello", return_token_ids=True)["choices"][0]
    *events, end = server.stream(
        "Hello", return_token_ids=True, stream_options={"include_usage": True}, cache_salt="stream"
    )
    assert end == "[DONE]"
    *chunks, usage = map(json.loads, events)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [choice["token_ids"] for choice in choices] == [[token] for token in whole["token_ids"]]
    assert [choice["prompt_token_ids"] for choice in choices] == [list(b"Hello"), None, None, None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 5,
        "total_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1


def test_a_stream_has_usage_only_if_asked(server: Server) -> None:
    *events, end = server.stream()
    assert end == "[DONE]"
    assert all("usage" not in json.loads(event) for event in events)
    assert len(events) == 4


def test_an_output_over_the_context_is_cut_in_silence(server: Server) -> None:
    answer = server.complete([51, 44] * 508, max_tokens=50)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["finish_reason"] == "length"


SECRET = "a prompt nobody may repeat"


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"model": "nope"}, 404, "model", "does not exist"),
        ({"prompt": None}, 400, "prompt", "must be provided and non-empty"),
        ({"prompt": []}, 400, "prompt", "must be provided and non-empty"),
        ({"prompt": [SECRET, SECRET]}, 400, "prompt", "one prompt"),
        ({"prompt": [1, 257]}, 400, "prompt", "out of vocabulary"),
        ({"prompt": {SECRET: SECRET}}, 400, "prompt.str", "valid string"),
        ({"prompt": SECRET * 50}, 400, "input_tokens", "maximum context length is 1024 tokens"),
        ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"max_tokens": "4"}, 400, "max_tokens", "valid integer"),
        ({"min_tokens": 8}, 400, "min_tokens", "less than or equal to max_tokens=4, got 8"),
        ({"logprobs": 21}, 400, "logprobs", "greater than max allowed: 20"),
        ({"cache_salt": ""}, 400, "cache_salt", "non-empty string"),
        ({"cache_salt": 7}, 400, "cache_salt", "non-empty string"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "`stream=True`"),
        ({"temperature": 0.7}, 400, None, "greedily"),
        ({"n": 2}, 400, None, "greedily"),
        ({"logprobs": 21, "stream": True}, 400, "logprobs", "greater than max allowed: 20"),
    ],
)
def test_what_cannot_be_served_is_an_error_object_without_the_prompt(
    server: Server, fields: dict[str, object], status: int, param: str | None, message: str
) -> None:
    got, kind, content = server.ask("POST", "/v1/completions", {"prompt": SECRET, "max_tokens": 4} | fields)
    error = json.loads(content)["error"]
    assert (got, kind, error["code"], error["param"]) == (status, "application/json", status, param)
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    assert message in error["message"]
    assert SECRET.encode() not in content


def test_other_errors_have_their_own_shapes(server: Server) -> None:
    status, _, content = server.ask("POST", "/v1/completions", b'{"prompt": ')
    assert (status, json.loads(content)["error"]["param"]) == (400, "body.11")
    status, _, content = server.ask("POST", "/v1/completions", b"{}", **{"content-type": "text/plain"})
    assert (status, json.loads(content)["error"]["type"]) == (400, "Bad Request")
    assert server.ask("GET", "/nowhere")[::2] == (404, b'{"detail":"Not Found"}')
    assert server.ask("GET", "/v1/completions")[::2] == (405, b'{"detail":"Method Not Allowed"}')


# ---- cold and cached


def cached(answer: Any) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_whole_blocks_of_the_same_salt_are_cached_and_never_all_of_a_prompt(server: Server) -> None:
    for tokens, expected in ((63, 0), (64, 0), (65, 64), (128, 64), (129, 128), (400, 384)):
        prompt, salt = [51, 44] * (tokens // 2) + [51] * (tokens % 2), f"salt {tokens}"
        assert cached(server.complete(prompt, cache_salt=salt)) == 0
        assert cached(server.complete(prompt, cache_salt=salt)) == expected
        assert cached(server.complete(prompt, cache_salt=f"other {tokens}")) == 0
    assert cached(server.complete([50] * 100)) == 0, "no salt is a space of its own"
    assert cached(server.complete([50] * 100)) == 64


def test_a_cached_prompt_gets_the_same_bits_as_a_cold_one(server: Server) -> None:
    prompt = list(b"Dice rolls: " + b"3,1,6,2," * 60)
    for tokens in (300, 321, 470):
        fields = {"logprobs": 20, "return_tokens_as_token_ids": True, "max_tokens": 8, "cache_salt": f"bits {tokens}"}
        cold = server.complete(prompt[:tokens], **fields)
        warm = server.complete(prompt[:tokens], **fields)
        assert cached(cold) == 0
        assert cached(warm) == tokens // 64 * 64
        assert warm["choices"] == cold["choices"]


def test_a_server_started_again_answers_with_the_same_bits(server: Server) -> None:
    fields = {"logprobs": 20, "return_tokens_as_token_ids": True, "max_tokens": 32, "cache_salt": "again"}
    with serving("--max-model-len", "1024") as other:
        first, second = (one.complete([51, 44] * 200, **fields) for one in (server, other))
    assert first["choices"] == second["choices"]


# ---- counters, leaving, ending


def test_the_counters_move_by_exactly_what_was_served(server: Server) -> None:
    before = server.metrics()
    server.complete([51, 44] * 50, cache_salt="counted", max_tokens=3)
    server.stream([51, 44] * 50, cache_salt="counted", max_tokens=5)
    moved = {name: value - before[name] for name, value in server.metrics().items() if value != before[name]}
    assert moved == {
        "request_success_total length": 2,
        "prompt_tokens_total": 200,
        "generation_tokens_total": 8,
        "prefix_cache_queries_total": 200,
        "prefix_cache_hits_total": 64,
    }


def open_stream(server: Server, tokens: int, **fields: object) -> socket.socket:
    """Send a streamed request for a prompt that no other test sends; return the open connection."""
    body = {"prompt": [51, 44] * (tokens // 2), "max_tokens": 4, "ignore_eos": True, "stream": True} | fields
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def received(connection: socket.socket) -> bytes:
    """Read to the end of the connection."""
    content = b""
    while piece := connection.recv(65_536):
        content += piece
    return content


def test_one_request_runs_others_wait_and_who_leaves_is_aborted(slow_server: Server) -> None:
    before = slow_server.metrics()
    with open_stream(slow_server, 20_000, cache_salt="first"), open_stream(slow_server, 20_000, cache_salt="second"):
        slow_server.until(num_requests_running=1, num_requests_waiting=1)
    after = slow_server.until(num_requests_running=0, num_requests_waiting=0)
    assert after["prompt_tokens_total"] == before["prompt_tokens_total"]
    assert after["request_success_total length"] == before["request_success_total length"]
    assert slow_server.complete()["usage"]["completion_tokens"] == 4


def test_who_leaves_while_tokens_come_is_aborted(server: Server) -> None:
    before = server.metrics()
    with open_stream(server, 20, max_tokens=1_000) as connection:
        assert b"data: " in connection.recv(65_536) + connection.recv(65_536)
    after = server.until(num_requests_running=0)
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 1_000


@pytest.mark.parametrize("stream", [True, False])
def test_sigterm_ends_the_server_and_cuts_what_is_open(stream: bool) -> None:
    with serving("--max-model-len", "262144") as one, open_stream(one, 20_000, stream=stream) as connection:
        one.until(num_requests_running=1)
        begun = time.monotonic()
        one.process.send_signal(signal.SIGTERM)
        one.process.wait(PATIENCE_S)
        took_s = time.monotonic() - begun
        content = received(connection)
        assert one.process.stderr
        said = one.process.stderr.read()
    assert "Cancel" not in said, "the engine did not end the request, uvicorn did"
    assert b"[DONE]" not in content
    assert b"finish_reason" not in content
    # A quiet machine takes 0.3 s.
    assert took_s < 5


def test_a_model_that_fails_says_so_in_every_way(tmp_path: Path) -> None:
    broken = tmp_path / "dispatch.py"
    broken.write_text((REFERENCE / "moe/dispatch.py").read_text().replace("loads: list[int] = []", "raise ValueError"))
    with serving("--max-model-len", "1024", "--overlay", f"moe/dispatch.py={broken}") as one:
        payloads = one.stream()
        assert payloads[-1] == "[DONE]"
        assert json.loads(payloads[0])["error"]["code"] == 500
        assert one.ask("GET", "/health")[0] == 503
        status, _, content = one.ask("POST", "/v1/completions", {"prompt": "Hello"})
        assert (status, json.loads(content)["error"]["type"]) == (500, "InternalServerError")


# ---- starting


def test_an_overlay_is_verified_from_inside() -> None:
    folder = REFERENCE / "overlays/fix"
    sums = json.loads((folder / "sums.json").read_text())
    mounts = [f"{target}={folder / Path(target).name}" for target in sums]
    with serving("--max-model-len", "1024", "--overlay", *mounts, env={"REFERENCE_MOE_FENCE": "1"}) as one:
        one.complete()
        found = one.get("/server_info")
    assert found["sources"] == {target: entry["sha256"] for target, entry in sums.items()}
    assert found["arguments"]["overlays"] == dict(mount.split("=") for mount in mounts)
    added = found["moe"]["added"]
    assert list(added) == ["moe/fence.py"]
    assert added["moe/fence.py"]["imported"] is True
    assert added["moe/fence.py"]["report"] == {"enabled": True, "fenced": 6}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--overlay", "moe/gate.py=/nowhere/gate.py"], "/nowhere/gate.py is not a file"),
        (["--overlay", "api.py=/dev/null"], "no such target"),
        (["--overlay", "moe/router.py"], "TARGET=SOURCE"),
        (["--overlay", "moe/router.py=a", "moe/router.py=b"], "each target once"),
        (["--max-model-len", "1"], "at least 2 tokens"),
        (["--model-size", "huge"], "invalid choice"),
    ],
)
def test_what_cannot_be_started_is_refused_with_status_2(arguments: list[str], message: str) -> None:
    argv = command(free_port(), "--max-model-len", "1024", *arguments)
    environment = os.environ | {"PYTHONPATH": str(REFERENCE.parents[1])}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_ends_the_start(server: Server) -> None:
    argv = command(server.port, "--max-model-len", "1024")
    environment = os.environ | {"PYTHONPATH": str(REFERENCE.parents[1])}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert "address already in use" in done.stderr
