"""What is asked of one server: the timed cells, and the checks. Each returns rows that evidence can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fairtrial.canonical import canonical, sha256
from fairtrial.client import (
    Call,
    Counters,
    Endpoint,
    Exchange,
    completion,
    counters,
    probe_quality,
    prompt_lines,
    rows,
    salt,
    sized_dice,
    token_ids,
)
from fairtrial.errors import Refused, StepFailed
from fairtrial.experiment import Arm, Cell
from fairtrial.guards import NS
from fairtrial.runner import Runner

TOP_N = 20
SHORT_TOKENS = 16


def cell_prompt(runner: Runner, cell: Cell) -> list[int]:
    """The token ids of a cell's prompt: the same in every arm and every rep."""
    found = runner.prompts.cells.get(cell.name)
    if found is None:
        protocol = runner.experiment.protocol
        low, high = protocol.token_ids
        found = token_ids(f"{protocol.seed}/{cell.name}", cell.prompt_tokens, low, high)
        runner.prompts.cells[cell.name] = found
        runner.screen.learn_ids(found)
    return found


def greedy_prompts(runner: Runner, base: Endpoint) -> list[list[int]]:
    """The token ids of the greedy prompts: from the seed, or from the pinned file by the server's own tokenizer."""
    if runner.prompts.greedy:
        return runner.prompts.greedy
    assert runner.experiment.checks is not None
    greedy, protocol = runner.experiment.checks.greedy, runner.experiment.protocol
    low, high = protocol.token_ids
    if greedy.file is None:
        found = [
            token_ids(f"{protocol.seed}/greedy/{number}", greedy.prompt_tokens, low, high)
            for number in range(1, greedy.prompts + 1)
        ]
    else:
        texts = greedy_texts(runner)
        found = [tokenize(runner, base, text) for text in texts]
    for ids in found:
        runner.screen.learn_ids(ids)
    runner.prompts.greedy = found
    return found


def greedy_texts(runner: Runner) -> list[str]:
    """The pinned prompt file, one prompt a line. Raises ``Refused`` when it is not the pinned one."""
    assert runner.experiment.checks is not None
    greedy = runner.experiment.checks.greedy
    assert greedy.file is not None
    path = runner.base / greedy.file
    try:
        content = runner.control.read(path)
    except OSError as error:
        raise Refused(f"checks.greedy.file: {path}: {error.strerror}") from None
    if sha256(content) != greedy.sha256:
        raise Refused(f"checks.greedy.file: {path} has SHA-256 {sha256(content)}, pinned is {greedy.sha256}")
    texts = prompt_lines(content)
    if len(texts) != greedy.prompts:
        raise Refused(
            f"checks.greedy.file: {path} holds {len(texts)} prompts, checks.greedy.prompts is {greedy.prompts}"
        )
    return texts


def tokenize(runner: Runner, base: Endpoint, text: str) -> list[int]:
    """A text's token ids by the server's own tokenizer. Raises ``StepFailed`` when it gives none."""
    runner.screen.learn_text(text)
    body = canonical({"model": runner.experiment.server.model, "prompt": text})
    exchange = runner.wait(Call(base=base, path=runner.experiment.server.tokenize, body=body, limit_s=30))
    try:
        answer = json.loads(exchange.body)
        tokens = [int(token) for token in answer["tokens"]]
    except (ValueError, KeyError, TypeError):
        tokens = []
    if exchange.fault is not None or not tokens:
        where = f"http://{base.host}:{base.port}{runner.experiment.server.tokenize}"
        why = exchange.fault or "none in the answer"
        raise StepFailed(f"{where} gives no token ids ({why}): the probe needs them; see server.tokenize")
    return tokens


def probe_prompt(runner: Runner, base: Endpoint) -> list[int]:
    """The probe: seeded dice throws of the exact token count, ending where a throw is due."""
    if not runner.prompts.probe:
        assert runner.experiment.checks is not None
        tokens = runner.experiment.checks.probe.tokens
        seed = f"{runner.experiment.protocol.seed}/probe"
        found = sized_dice(seed, tokens, lambda text: tokenize(runner, base, text))
        runner.screen.learn_ids(found)
        runner.prompts.probe = found
    return runner.prompts.probe


def read_counters(runner: Runner, base: Endpoint) -> Counters | None:
    """The server's own counters, or None where it gives none."""
    path = runner.experiment.server.metrics
    if path is None:
        return None
    exchange = runner.get(base, path)
    return counters(exchange.body.decode(errors="replace")) if exchange.fault is None else None


def served(runner: Runner, base: Endpoint, before: Counters | None, tokens: int) -> tuple[str, Counters | None]:
    """Whether nobody else was served since ``before``, in which we had one request of ``tokens`` in all.

    Finished requests prove it, or where the server counts none, tokens. Raises ``StepFailed`` when more moved than
    ours. The server may count a request a little after it answered: it is asked again for ``counters_wait_s``.
    """
    deadline = runner.now() + int(runner.experiment.server.counters_wait_s * NS)
    while True:
        after = read_counters(runner, base)
        if before is None or after is None:
            return "unproved", after
        if before.finished is not None and after.finished is not None:
            what, moved, ours = "requests", after.finished - before.finished, 1
        elif (first := _tokens(before)) is not None and (last := _tokens(after)) is not None:
            what, moved, ours = "tokens", last - first, tokens
        else:
            return "unproved", after
        if moved > ours:
            raise StepFailed(
                f"port {base.port}: the server counts {moved} {what} where this window asked for {ours}: "
                "somebody else was served during this cell"
            )
        if moved == ours:
            return "proved", after
        if runner.now() > deadline:
            return "unproved", after
        runner.pause(0.02)


def _tokens(found: Counters) -> int | None:
    if found.prompt_tokens is None or found.generation_tokens is None:
        return None
    return found.prompt_tokens + found.generation_tokens


def cold(runner: Runner, what: str, cached: int | None, before: Counters | None, after: Counters | None) -> str:
    """``proved``: a witness says 0 and none says more; else ``unproved``. Raises ``StepFailed`` when one says more."""
    witnesses = [cached]
    if before is not None and after is not None:
        for name in ("prefix_hits", "external_hits"):
            first, last = getattr(before, name), getattr(after, name)
            if first is not None and last is not None:
                witnesses.append(last - first)
    said = [witness for witness in witnesses if witness is not None]
    if any(witness > 0 for witness in said):
        raise StepFailed(f"{what}: not cold: the server had {max(said)} of its prompt tokens in its prefix cache")
    if cached is None and runner.experiment.protocol.coldness == "cached_tokens":
        raise StepFailed(
            f"{what}: the server says nothing of cached tokens, and protocol.coldness demands it "
            '(vLLM: --enable-prompt-tokens-details; or set coldness = "unproved")'
        )
    return "proved" if said else "unproved"


def submit(
    runner: Runner,
    base: Endpoint,
    what: str,
    ids: list[int],
    *,
    salt_name: str,
    output_tokens: int,
    whole_output: bool = True,
    stream: bool = True,
    logprobs: int | None = None,
) -> Exchange:
    """Send one completion under a registered salt, and return it once it is whole and of the counts asked for.

    ``whole_output``: exactly ``output_tokens`` must come, whatever the model would end on; else at most that many.
    Raises ``StepFailed``.
    """
    experiment = runner.experiment
    runner.screen.learn_ids(ids)
    body = canonical(
        completion(
            model=experiment.server.model,
            prompt=ids,
            max_tokens=output_tokens,
            salt=salt(experiment.protocol.seed, salt_name),
            stream=stream,
            ignore_eos=whole_output,
            logprobs=logprobs,
        )
    )
    call = Call(
        base=base,
        path=experiment.server.completions,
        body=body,
        stream=stream,
        limit_s=experiment.protocol.limit_s,
    )
    exchange = runner.ask(
        call,
        purpose=what,
        prompt_sha256=sha256(canonical(ids)),
        prompt_tokens=len(ids),
        body_sha256=sha256(body),
    )
    rows.whole(what, exchange, prompt_tokens=len(ids), output_tokens=output_tokens if whole_output else None)
    return exchange


def short_prompt(runner: Runner) -> list[int]:
    """A prompt that only asks whether a server can do something at all."""
    low = runner.experiment.protocol.token_ids[0]
    return [low + number % 2 for number in range(SHORT_TOKENS)]


def run_cell(runner: Runner, arm: Arm, cell: Cell, rep: int) -> dict[str, Any]:
    """Send one timed request to an arm and return its row."""
    base = runner.endpoint(arm)
    what = f"{arm.name} {cell.name} rep {rep}"
    prompt = cell_prompt(runner, cell)
    salt_name = f"{cell.name}/{rep}"
    before = read_counters(runner, base)
    exchange = submit(runner, base, what, prompt, salt_name=salt_name, output_tokens=cell.output_tokens)
    measured = exchange.measured
    assert measured is not None
    alone, after = served(runner, base, before, cell.prompt_tokens + cell.output_tokens)
    row = {
        "arm": arm.name,
        "cell": cell.name,
        "rep": rep,
        "timed": cell.timed,
        "ttft_ns": exchange.ttft_ns,
        "e2e_ns": exchange.end_ns - (exchange.started_ns or 0),
        "tpot_ns": exchange.tpot_ns,
        "connect_ns": exchange.connect_ns,
        "prompt_tokens": measured.prompt_tokens,
        "output_tokens": measured.output_tokens,
        "cached_tokens": measured.cached_tokens,
        "content_events": measured.content_events,
        "content_ns": [at - (exchange.started_ns or 0) for at in measured.content_ns],
        "cold": cold(runner, what, measured.cached_tokens, before, after),
        "alone": alone,
        "prompt_sha256": sha256(canonical(prompt)),
        "salt_sha256": sha256(salt(runner.experiment.protocol.seed, salt_name).encode()),
        "answer_sha256": measured.answer_sha256,
    }
    if row["ttft_ns"] is None:
        raise StepFailed(f"{what}: no event carried generated content: there is no time to first token")
    return row


def ask_greedy(runner: Runner, base: Endpoint, number: int, ids: list[int], salt_name: str) -> dict[str, Any]:
    """Ask one greedy prompt and return its row."""
    assert runner.experiment.checks is not None
    exchange = submit(
        runner,
        base,
        f"greedy {number} on port {base.port}",
        ids,
        salt_name=salt_name,
        output_tokens=runner.experiment.checks.greedy.output_tokens,
        whole_output=False,
    )
    measured = exchange.measured
    assert measured is not None
    return rows.greedy(f"{number}", measured)


def ask_probe(runner: Runner, base: Endpoint, slot: str) -> dict[str, Any]:
    """Send the probe once, cold, and return its row."""
    what = f"probe {slot} on port {base.port}"
    ids = probe_prompt(runner, base)
    exchange = submit(runner, base, what, ids, salt_name=f"probe/{slot}", output_tokens=1, stream=False, logprobs=TOP_N)
    answer = exchange.answer
    assert answer is not None
    cold(runner, what, answer.cached_tokens, None, None)
    return rows.logit(what, slot, sha256(canonical(ids)), answer)


def warm_logprobs(runner: Runner, arm: Arm) -> None:
    """One short request with logprobs: some servers compile on the first."""
    what = f"{arm.name} warm-up with logprobs"
    submit(
        runner,
        runner.endpoint(arm),
        what,
        short_prompt(runner),
        salt_name="warm logprobs",
        output_tokens=1,
        stream=False,
        logprobs=TOP_N,
    )


def run_checks(runner: Runner, arm: Arm) -> list[dict[str, Any]]:
    """Ask an arm everything its checks need; rows are returned only when whole."""
    base = runner.endpoint(arm)
    found = [identity_row(runner, base)]
    for number, ids in enumerate(greedy_prompts(runner, base), start=1):
        found.append(ask_greedy(runner, base, number, ids, f"greedy/{number}"))
    found += [ask_probe(runner, base, slot) for slot in arm.checks]
    return found


def identity_row(runner: Runner, base: Endpoint) -> dict[str, Any]:
    """What a server says of itself in one short answer: model, fingerprint, counts."""
    what = f"identity on port {base.port}"
    exchange = submit(runner, base, what, short_prompt(runner), salt_name="identity", output_tokens=1, stream=False)
    answer = exchange.answer
    assert answer is not None
    return rows.identity(answer)


def judge_probe(runner: Runner, row: Mapping[str, Any]) -> None:
    """Raise ``Refused`` when the probe's distribution cannot judge: too little mass in the top, or no entropy."""
    assert runner.experiment.checks is not None
    limits = runner.experiment.checks.probe
    mass, entropy = probe_quality([(token, logprob) for token, logprob in row["top"]])
    if mass < limits.mass_min or entropy < limits.entropy_min_nats:
        raise Refused(
            f"checks.probe: it cannot judge on this model: its {TOP_N} likeliest tokens hold {mass:.4f} of the mass "
            f"(>= {limits.mass_min:g}) with {entropy:.2f} nats (>= {limits.entropy_min_nats:g}): "
            "try another checks.probe.tokens or protocol.seed"
        )
