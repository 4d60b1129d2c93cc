"""A scripted server behind an OpenAI-compatible API: fast, the same answers every time, with one fault if asked for.

``python faulty.py --port N --max-model-len M [--fault NAME] [--overlay=TARGET=SOURCE]``. It computes nothing: an
answer follows from the prompt's token ids alone. What it answers and logs holds the planted words below, which no
evidence may hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import select
import socket
import socketserver
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWER_WORD = "quartzlantern"
ERROR_WORD = "cinnabarfalcon"
PROMPT_WORD = "Dice rolls"
"""What the text of a probe begins with: the scripted server logs what it tokenizes."""

ASKED_WORD = "asked ["
"""What a line of the log begins with that holds token ids which were sent."""

BASE = {"kernel.py": b"base kernel\n"}
HELD_S = 60.0
"""How long a slow answer is held back, unless its client leaves."""

HELD_PROMPT = [255, 255, 255]
"""The prompt whose answer every server holds back: what a stranger asks who stays."""

FAULTS = {
    "die": "ends at its start, after a line on standard error",
    "never-ready": "its readiness path answers 503 for ever",
    "other-process": "what listens is a child in a session of its own",
    "restarts": "runs itself again with a variable that nobody declared",
    "no-generation": "is ready, and answers every completion with status 500",
    "cut": "closes the connection in the middle of a stream",
    "gone": "its process ends in the middle of a stream",
    "counts": "counts a prompt token too many",
    "cached": "reports that the whole prompt was cached",
    "silent-cache": "says nothing of cached tokens",
    "error-body": "answers a stream with status 400 and an error body",
    "error-event": "sends an error object in the stream, then [DONE]",
    "error-after-done": "sends an error object after [DONE]",
    "slow-content": "sends role-only, progress, empty and comment events half a second before the first content",
    "no-content": "sends no event with content",
    "no-usage": "leaves usage out of the stream",
    "clamp": "ends a stream after one token",
    "no-finish": "gives no finish reason",
    "no-done": "ends a stream without [DONE]",
    "not-http": "answers with what is not HTTP",
    "not-a-stream": "answers a stream with one JSON document",
    "slow": "holds the first byte of a stream back",
    "hang": "holds the second half of a stream back",
    "flat-probe": "its first token's top 20 hold half of the mass",
    "sharp-probe": "its first token is certain",
    "few-logprobs": "gives five logprobs instead of twenty",
    "text-logprobs": "keys its logprobs by text",
    "other-answers": "answers greedy prompts otherwise",
    "moody": "never answers a prompt twice in the same way",
    "no-tokenizer": "has no tokenizer",
    "ignores-overlay": "loads its own files whatever it is told to mount",
    "endless": "never ends a stream",
    "reborn": "answers greedy prompts otherwise at every start",
    "once": "starts once: not while the file named by ONCE is there",
    "counts-others": "counts a finished request that nobody sent, in every stream",
    "odd-metrics": "its counters hold what is no number",
}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.fault: str = given.fault
        self.lock = threading.Lock()
        self.running = 0
        self.finished = 0
        self.prompt_tokens = 0
        super().__init__((given.host, given.port), Handler)

    def server_bind(self) -> None:
        # the standard one asks for the name of the address, which can take seconds
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "faulty", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        print("a client left", flush=True)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: Any) -> None:
        pass

    def reply(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = True

    def reply_json(self, value: Any, status: int = 200) -> None:
        self.reply(status, json.dumps(value).encode())

    def do_GET(self) -> None:
        server = self.server
        if self.path == "/health":
            self.reply(503 if server.fault == "never-ready" else 200, b"")
        elif self.path == "/version":
            self.reply_json({"version": "1.0"})
        elif self.path == "/v1/models":
            self.reply_json({"data": [{"id": "faulty", "max_model_len": server.given.max_model_len}]})
        elif self.path == "/metrics":
            self.reply(200, self.metrics(), "text/plain")
        elif self.path == "/server_info":
            self.reply_json({"sources": loaded(server.given)})
        else:
            self.reply_json({"error": {"message": f"no such path {ERROR_WORD}", "type": "NotFound"}}, 404)

    def metrics(self) -> bytes:
        server = self.server
        with server.lock:
            finished = "many" if server.fault == "odd-metrics" else server.finished
            return (
                f'vllm:num_requests_running{{engine="0"}} {server.running}\n'
                'vllm:num_requests_waiting{engine="0"} 0\n'
                f'vllm:request_success_total{{finished_reason="length"}} {finished}\n'
                f"vllm:prompt_tokens_total {server.prompt_tokens}\n"
                "vllm:prefix_cache_hits_total 0\n"
            ).encode()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and self.server.fault != "no-tokenizer":
            self.reply_json({"tokens": [ord(letter) % 256 for letter in asked["prompt"]]})
            print(f"tokenized {asked['prompt']}", flush=True)
        elif self.path == "/v1/completions":
            with self.server.lock:
                self.server.running += 1
            try:
                self.complete(asked)
            finally:
                with self.server.lock:
                    self.server.running -= 1
        else:
            self.reply_json({"error": {"message": f"no such path {ERROR_WORD}", "type": "NotFound"}}, 404)

    def complete(self, asked: dict[str, Any]) -> None:
        server, fault = self.server, self.server.fault
        prompt, count = asked["prompt"], asked["max_tokens"]
        if asked.get("stream"):
            count = 1 if fault == "clamp" else count
        tokens = [answer_token(server, prompt, asked, number) for number in range(count)]
        text = "".join(token_text(token) for token in tokens)
        if len(prompt) > 4:
            print(f"asked {prompt[:40]}", flush=True)
        print(f"answered {text}", flush=True)
        if fault == "no-generation":
            self.reply_json({"error": {"message": f"{ERROR_WORD} in {text}", "type": "ServerError"}}, 500)
        elif asked.get("stream"):
            self.stream(asked, tokens)
        else:
            self.document(asked, tokens, text)
        print("served a request", flush=True)

    def usage(self, asked: dict[str, Any], count: int) -> dict[str, Any]:
        fault, sent = self.server.fault, len(asked["prompt"])
        usage: dict[str, Any] = {
            "prompt_tokens": sent + (fault == "counts"),
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": sent if fault == "cached" else 0},
        }
        if fault == "silent-cache":
            del usage["prompt_tokens_details"]
        return usage

    def count(self, asked: dict[str, Any]) -> None:
        with self.server.lock:
            self.server.finished += 2 if self.server.fault == "counts-others" and asked.get("stream") else 1
            self.server.prompt_tokens += len(asked["prompt"])

    def document(self, asked: dict[str, Any], tokens: list[int], text: str) -> None:
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "length"}
        if asked.get("logprobs"):
            choice["logprobs"] = {"top_logprobs": [top(self.server.fault)] * len(tokens)}
        self.count(asked)
        usage = self.usage(asked, len(tokens))
        self.reply_json({"model": "faulty", "choices": [choice], "usage": usage})

    def stream(self, asked: dict[str, Any], tokens: list[int]) -> None:
        fault = self.server.fault
        if fault == "error-body":
            message = f"{ERROR_WORD} in {token_text(tokens[0])}"
            self.reply_json({"error": {"message": message, "type": "BadRequestError", "code": 400}}, 400)
            return
        if fault == "not-a-stream":
            self.document(asked, tokens, "".join(map(token_text, tokens)))
            return
        if fault == "not-http":
            self.wfile.write(f"{ERROR_WORD}\r\n\r\n".encode())
            self.close_connection = True
            return
        if fault == "slow" or asked["prompt"] == HELD_PROMPT:
            self.until_client_leaves()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for number, event in enumerate(self.events(asked, tokens)):
            if fault == "cut" and number == 2:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if fault == "gone" and number == 2:
                os._exit(9)
            if fault == "hang" and number == 2:
                self.until_client_leaves()
            content = event.encode()
            self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def events(self, asked: dict[str, Any], tokens: list[int]) -> Iterator[str]:
        fault = self.server.fault
        if fault == "slow-content":
            yield ": keep-alive\n\n"
            yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]})
            yield event({"choices": [{"index": 0, "text": ""}], "prompt_progress": {"processed": 4}})
            yield event({"choices": []})
            time.sleep(0.5)
        for number, token in enumerate(tokens):
            last = number == len(tokens) - 1
            choice: dict[str, Any] = {"index": 0, "text": token_text(token), "token_ids": [token]}
            if fault == "no-content":
                choice |= {"text": "", "token_ids": None}
            choice["finish_reason"] = "length" if last and fault != "no-finish" else None
            yield event({"choices": [choice]})
            while fault == "endless" and len(tokens) > 2:
                time.sleep(0.02)
                yield event({"choices": [choice | {"finish_reason": None}]})
            if fault == "error-event":
                yield event({"error": {"message": f"{ERROR_WORD} {token_text(token)}", "type": "EngineDeadError"}})
                yield "data: [DONE]\n\n"
                return
        self.count(asked)
        if fault != "no-usage":
            yield event({"choices": [], "usage": self.usage(asked, len(tokens))})
        if fault != "no-done":
            yield "data: [DONE]\n\n"
        if fault == "error-after-done":
            yield event({"error": {"message": ERROR_WORD, "type": "EngineDeadError"}})

    def until_client_leaves(self) -> None:
        readable, _, _ = select.select([self.connection], [], [], HELD_S)
        if readable:
            raise ConnectionResetError


def event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def answer_token(server: Server, prompt: list[int], asked: dict[str, Any], number: int) -> int:
    seed = zlib.crc32(json.dumps(prompt).encode())
    if server.fault == "other-answers":
        seed += 1
    if server.fault == "reborn":
        seed += os.getpid()
    if server.fault == "moody":
        seed += zlib.crc32(str(asked.get("cache_salt")).encode())
    return (seed + 37 * number) % 256


def token_text(token: int) -> str:
    # no two tokens have a run of 24 characters in common
    return f"{zlib.crc32(b'%d' % token):08x} {ANSWER_WORD} {zlib.crc32(b'-%d' % token):08x}, "


def top(fault: str) -> dict[str, float]:
    """The first token's twenty likeliest: six of a die hold all but 2 in 1,000 of the mass."""
    count, share = 20, 0.998
    if fault == "flat-probe":
        share = 0.4
    if fault == "sharp-probe":
        share = 0.9999999
    if fault == "few-logprobs":
        count = 5
    first = 1 if fault == "sharp-probe" else 6
    rest = (1 - share) / 20 if fault != "flat-probe" else 0.1 / 14
    found = [share / first] * first + [rest] * (count - first)
    name = "word {}" if fault == "text-logprobs" else "token_id:{}"
    return {name.format(number): round(math.log(value), 6) for number, value in enumerate(found[:count])}


def loaded(given: argparse.Namespace) -> dict[str, str]:
    """The source files that this server loaded, with their hashes."""
    contents = dict(BASE)
    for mount in given.overlay if given.fault != "ignores-overlay" else []:
        target, _, source = mount.partition("=")
        with open(source, "rb") as file:
            contents[target] = file.read()
    return {target: hashlib.sha256(content).hexdigest() for target, content in contents.items()}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--fault", choices=("", *FAULTS), default="")
    parser.add_argument("--overlay", action="append", default=[])
    given = parser.parse_args()
    if os.environ.get("FENCE") == "1":
        print("fence: on", flush=True)
    if given.fault == "die":
        print("loading\nfatal: no such device", file=sys.stderr, flush=True)
        return 3
    if given.fault == "once":
        try:
            os.close(os.open(os.environ["ONCE"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            print("fatal: only once", flush=True)
            return 3
    if given.fault == "restarts" and "UNDECLARED" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "UNDECLARED": "1"})
    if given.fault == "other-process":
        words = [sys.executable, sys.argv[0], "--port", str(given.port)]
        return subprocess.Popen(words, start_new_session=True).wait()
    server = Server(given)
    print("listening", flush=True)
    server.serve_forever(poll_interval=0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main())
