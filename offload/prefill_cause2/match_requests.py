"""The checks of one arm of PF1's matched window, asked of one OpenAI-compatible server: hashes and numbers, no text.

One identity row, six greedy rows, and one logit row for each slot; the rows are written only when all are whole. What
was asked and what came of it stands in a ledger beside them, written as it happens, whole run or not. Run it with
``--help``; docs/pf1.md shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from fairtrial.canonical import canonical, sha256
from fairtrial.client import Call, Endpoint, Exchange, Request, completion, prompt_lines, rows, salt
from fairtrial.errors import EvidenceError, FairtrialError, Refused, StepFailed
from fairtrial.ledger import Ledger
from fairtrial.reading import MATCH_THRESHOLDS
from fairtrial.reading.checks import read_checks
from fairtrial.store import PARTIAL, Directory

PROG = "python3 -m offload.prefill_cause2.match_requests"
PATH = "/v1/completions"
SEED = "pf1 match 1"
GREEDY_TOKENS = 300
LIMIT_S = 300.0
SHORT = "1, 2, 3,"
"""The identity row's prompt: any would do."""

LEDGER = ".ledger.jsonl"
"""What the ledger's name adds to that of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: ``identity``, ``greedy/N`` or ``probe/SLOT``, which names its salt too."""

    name: str
    prompt: str = field(repr=False)
    max_tokens: int

    @property
    def kind(self) -> str:
        """``identity``, ``greedy`` or ``probe``."""
        return self.name.partition("/")[0]

    @property
    def part(self) -> str:
        """A greedy prompt's id, or a probe's slot."""
        return self.name.partition("/")[2]

    @property
    def prompt_sha256(self) -> str:
        """Of the prompt in UTF-8; of a probe it is its file's."""
        return sha256(self.prompt.encode())

    def body(self, model: str, seed: str) -> bytes:
        """Return what is sent."""
        return canonical(
            completion(
                model=model,
                prompt=self.prompt,
                max_tokens=self.max_tokens,
                salt=salt(seed, self.name),
                stream=self.kind == "greedy",
                logprobs=MATCH_THRESHOLDS.top_n if self.kind == "probe" else None,
            )
        )


class _Clock:
    utc = staticmethod(time.time)
    monotonic_ns = staticmethod(time.monotonic_ns)


def asks(prompts: Sequence[str], probe: str, slots: Sequence[str]) -> Iterator[Ask]:
    """Yield what is asked of one arm, in order."""
    yield Ask(name="identity", prompt=SHORT, max_tokens=1)
    for number, prompt in enumerate(prompts, 1):
        yield Ask(name=f"greedy/{number}", prompt=prompt, max_tokens=GREEDY_TOKENS)
    for slot in slots:
        yield Ask(name=f"probe/{slot}", prompt=probe, max_tokens=1)


def row_of(ask: Ask, exchange: Exchange) -> rows.Row:
    """Return the row of one answer. Raises ``StepFailed`` for one that is not whole, or a probe that is not cold."""
    rows.whole(ask.name, exchange, prompt_tokens=None, output_tokens=None if ask.kind == "greedy" else 1)
    if ask.kind == "greedy":
        measured = exchange.measured
        assert measured is not None
        if measured.output_tokens is None or measured.output_tokens > ask.max_tokens:
            raise StepFailed(
                f"{ask.name}: {measured.output_tokens} tokens came, at most {ask.max_tokens} were asked for"
            )
        return rows.greedy(ask.part, measured)
    answer = exchange.answer
    assert answer is not None
    if ask.kind == "identity":
        return rows.identity(answer)
    _prove_probe(ask.name, answer.prompt_tokens, answer.cached_tokens)
    return rows.logit(ask.name, ask.part, ask.prompt_sha256, answer)


def _prove_probe(name: str, prompt_tokens: int, cached_tokens: int | None) -> None:
    due = MATCH_THRESHOLDS.probe_tokens
    if prompt_tokens != due:
        raise StepFailed(
            f"{name}: the server counts {prompt_tokens} prompt tokens in the probe, {due} are due: "
            "pin a probe of that length by this server's tokenizer"
        )
    if cached_tokens is None:
        raise StepFailed(
            f"{name}: the server says nothing of cached tokens, so the probe is not proved cold "
            "(vLLM: --enable-prompt-tokens-details)"
        )
    if cached_tokens:
        raise StepFailed(
            f"{name}: not cold: the server had {cached_tokens} of its prompt tokens in its prefix cache: "
            "start the server anew, and see that it heeds cache_salt"
        )


def collect(asked: Sequence[Ask], base: Endpoint, model: str, seed: str, limit_s: float, ledger: Ledger) -> bytes:
    """Ask one after another, and return the rows as JSON lines. Raises ``StepFailed`` with the first fault.

    Each request stands in the ledger before it is sent.
    """
    found = []
    for ask in asked:
        body = ask.body(model, seed)
        ledger.append(
            "request",
            name=ask.name,
            max_tokens=ask.max_tokens,
            prompt_sha256=ask.prompt_sha256,
            salt_sha256=sha256(salt(seed, ask.name).encode()),
            body_sha256=sha256(body),
        )
        call = Call(base=base, path=PATH, body=body, stream=ask.kind == "greedy", limit_s=limit_s)
        exchange = Request(call).run()
        answer = exchange.measured or exchange.answer
        ledger.append(
            "response",
            name=ask.name,
            status=exchange.status,
            fault=exchange.fault,
            prompt_tokens=answer and answer.prompt_tokens,
            output_tokens=answer and answer.output_tokens,
            cached_tokens=answer and answer.cached_tokens,
            answer_sha256=answer and answer.answer_sha256,
        )
        found.append(row_of(ask, exchange))
    return _whole_lines(found, [ask.part for ask in asked if ask.kind == "probe"])


def _whole_lines(found: Sequence[rows.Row], slots: Sequence[str]) -> bytes:
    faults: list[str] = []
    read_checks(found, arm="this server", slots=slots, thresholds=MATCH_THRESHOLDS, faults=faults)
    if faults:
        raise StepFailed("; ".join(faults))
    try:
        return b"".join(canonical(row) + b"\n" for row in found)
    except ValueError:
        raise StepFailed("a logprob is infinite, which JSON cannot hold: the server should send -9999") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog=PROG,
        description="Ask one server the checks of PF1's matched window and write their rows: hashes and numbers, no "
        f"text. One identity row, {MATCH_THRESHOLDS.greedy_total} greedy rows of at most {GREEDY_TOKENS} tokens, and "
        f"for each slot a cold probe of {MATCH_THRESHOLDS.probe_tokens} tokens.",
        epilog="exit status: 0 done; 2 refused, nothing was sent; 3 failed on the way, no rows were written",
    )
    top.add_argument("--base-url", required=True, type=_base_url, metavar="URL", help="such as http://127.0.0.1:8001")
    top.add_argument("--model", required=True, metavar="NAME", help="the served model's name")
    top.add_argument("--prompts", required=True, type=Path, metavar="FILE", help="greedy prompts, one a line")
    top.add_argument("--prompts-sha256", type=_sha256, metavar="HEX", help="refuse any other prompts")
    top.add_argument("--probe", required=True, type=Path, metavar="FILE", help="the probe, sent to the last byte")
    top.add_argument("--probe-sha256", type=_sha256, metavar="HEX", help="refuse any other probe")
    top.add_argument(
        "--slots", required=True, choices=("a,aa", "b"), metavar="SLOTS", help="a,aa (the off arm) or b (the fix arm)"
    )
    top.add_argument("--out", required=True, type=Path, metavar="FILE", help="the rows, as JSON lines; must not exist")
    top.add_argument(
        "--seed", default=SEED, metavar="TEXT", help="of the cache salts, the same in every arm (default: %(default)s)"
    )
    top.add_argument(
        "--limit-s",
        type=_seconds,
        default=LIMIT_S,
        metavar="SECONDS",
        help="the longest that one request may take (default: %(default)g)",
    )
    top.add_argument(
        "--dry-run", action="store_true", help="say what would be asked; open no connection, write nothing"
    )
    return top


def _base_url(text: str) -> Endpoint:
    try:
        url = urlsplit(text)
        host, port = url.hostname, 80 if url.port is None else url.port
    except ValueError:
        host, port = None, 0
    if (
        not host
        or not port
        or text.rstrip("/") != f"{url.scheme}://{url.netloc}"
        or url.scheme != "http"
        or "@" in text
    ):
        raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT, with nothing before or after it")
    return Endpoint(host=host, port=port)


def _sha256(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no SHA-256 (64 hex digits)")
    return text.lower()


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _pinned(flag: str, path: Path, pinned: str | None) -> bytes:
    try:
        content = path.read_bytes()
        content.decode()
    except OSError as error:
        raise Refused(f"{flag} {path}: {error.strerror}; name a file that can be read") from None
    except UnicodeDecodeError as error:
        raise Refused(f"{flag} {path}: byte {error.start} is not UTF-8; it must be a text file") from None
    if pinned not in (None, sha256(content)):
        raise Refused(f"{flag} {path}: its SHA-256 is {sha256(content)}, pinned is {pinned}; name the pinned file")
    if not content.strip():
        raise Refused(f"{flag} {path}: it is empty; name the pinned file")
    return content


def _prompts(path: Path, content: bytes) -> list[str]:
    due = MATCH_THRESHOLDS.greedy_total
    prompts = prompt_lines(content)
    if len(prompts) != due:
        raise Refused(f"--prompts {path}: it holds {len(prompts)} prompts, {due} are due; one a line")
    return prompts


def _refuse_existing(out: Path) -> Path:
    """Return the ledger's path. Raises ``Refused`` where rows or a ledger are, or cannot be."""
    ledger = out.with_name(out.name + LEDGER) if out.name else out
    if out.name.endswith(PARTIAL):
        raise Refused(f"--out {out}: {PARTIAL} marks files that are not whole yet; choose another name")
    if os.path.lexists(out):
        raise Refused(f"--out {out}: there already, and rows are never overwritten; name a file that is not there")
    if os.path.lexists(ledger):
        raise Refused(f"{ledger}: there already, of an earlier attempt; keep it, and name another --out")
    return ledger


def _begin_ledger(path: Path, store: Directory) -> Ledger:
    try:
        # exclusive: of two drivers with one --out only one begins
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        return Ledger.open(store, _Clock(), name=path.name)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}; name an --out in a folder that is there and may be written") from None


def _plan(given: argparse.Namespace, asked: Sequence[Ask], ledger: Path, hashes: Sequence[str]) -> str:
    base: Endpoint = given.base_url
    host = f"[{base.host}]" if ":" in base.host else base.host
    lines = [
        f"{len(asked)} requests, one after another, to http://{host}:{base.port}{PATH}, model {given.model}",
        f"{given.prompts}: {MATCH_THRESHOLDS.greedy_total} prompts, SHA-256 {hashes[0]}",
        f"{given.probe}: the probe, SHA-256 {hashes[1]};",
        f"  the server must count {MATCH_THRESHOLDS.probe_tokens} tokens and say that 0 of them were cached",
        "",
        f"{'request':<9} {'at most':<10}  {'prompt SHA-256':<16}  {'cache salt':<32}  asks for",
    ]
    wants = {"identity": "model, fingerprint", "greedy": "answer", "probe": f"top {MATCH_THRESHOLDS.top_n} by token id"}
    for ask in asked:
        tokens = f"{ask.max_tokens} token" + "s" * (ask.max_tokens > 1)
        hashed, salted = ask.prompt_sha256[:16], salt(given.seed, ask.name)
        lines.append(f"{ask.name:<9} {tokens:<10}  {hashed}  {salted}  {wants[ask.kind]}")
    return "\n".join(
        [*lines, "", f"rows: {given.out}", f"ledger: {ledger}", "dry run: nothing was sent or written", ""]
    )


def _run(given: argparse.Namespace) -> str:
    ledger_path = _refuse_existing(given.out)
    prompts = _pinned("--prompts", given.prompts, given.prompts_sha256)
    probe = _pinned("--probe", given.probe, given.probe_sha256)
    asked = list(asks(_prompts(given.prompts, prompts), probe.decode(), given.slots.split(",")))
    hashes = [sha256(prompts), sha256(probe)]
    if given.dry_run:
        return _plan(given, asked, ledger_path, hashes)
    store = Directory(given.out.parent)
    ledger = _begin_ledger(ledger_path, store)
    try:
        ledger.append(
            "begin",
            host=given.base_url.host,
            port=given.base_url.port,
            model=given.model,
            slots=given.slots,
            seed_sha256=sha256(given.seed.encode("utf-8", "backslashreplace")),
            prompts_sha256=hashes[0],
            probe_sha256=hashes[1],
        )
        content = collect(asked, given.base_url, given.model, given.seed, given.limit_s, ledger)
        ledger.append("rows", count=len(asked), sha256=sha256(content))
        store.write(given.out.name, content)
    except (StepFailed, KeyboardInterrupt) as error:
        with contextlib.suppress(OSError):
            ledger.append("failed", reason=str(error) or "interrupted")
        raise
    except OSError as error:
        raise StepFailed(f"{given.out}: cannot be written ({error.strerror}); make room, and ask again") from None
    finally:
        store.close()
    return f"{given.out}: {len(asked)} rows, SHA-256 {sha256(content)}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the driver and return its exit status: 0 done; 2 refused, nothing was sent; 3 failed, no rows written."""
    given = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        said = _run(given)
    except (Refused, EvidenceError) as error:
        print(f"match_requests: refused: {error}", file=sys.stderr)
        return 2
    except FairtrialError as error:
        print(f"match_requests: failed, no rows were written: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("match_requests: interrupted, no rows were written", file=sys.stderr)
        return 3
    try:
        print(said, end="", flush=True)
    except BrokenPipeError:
        # what was to be done is done; the interpreter must not find the pipe broken once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
