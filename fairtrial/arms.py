"""What an arm's steps do: stop what serves, start it fresh, prove what it is, measure it, keep its log."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fairtrial.canonical import canonical
from fairtrial.client import Call, rows
from fairtrial.errors import StepFailed
from fairtrial.experiment import Arm
from fairtrial.guards import GIB, NS, Serving
from fairtrial.identity import expected, observed, undeclared
from fairtrial.measure import (
    cell_prompt,
    run_cell,
    run_checks,
    warm_logprobs,
)
from fairtrial.preflight import look_at, reported, sources
from fairtrial.restoration import generation, idle, memory
from fairtrial.runner import Runner
from fairtrial.secrets import RUN_CHARACTERS
from fairtrial.window import Step

LOG_BLOCK = 1000
"""Lines of a log that are screened between two ticks."""


def budget(runner: Runner, step: Step) -> dict[str, Any]:
    """Refuse to begin an arm without the time for it before the submission bound."""
    left_s = runner.bounds.submit_s - runner.elapsed_s()
    if left_s < runner.bounds.arm_s:
        raise StepFailed(
            f"{left_s / 60:.1f} min are left before the submission bound, an arm needs {runner.bounds.arm_s / 60:.1f}"
        )
    return {"left_s": round(left_s, 1)}


def parity(runner: Runner, step: Step) -> dict[str, Any]:
    """No host has booted or changed its kernel since the snapshot, and the ranks' kernels are one."""
    seen: dict[str, Any] = {}
    for host, production in runner.production.items():
        found = look_at(runner, host)["host"]
        if (found["boot_id"], found["kernel"]) != (production.boot_id, production.kernel):
            raise StepFailed(f"{host}: it booted or changed its kernel since the snapshot")
        seen[host] = {"boot_id": found["boot_id"], "kernel": found["kernel"]}
    kernels = {one["kernel"] for one in seen.values()}
    if len(kernels) > 1:
        raise StepFailed(f"the ranks run different kernels: {', '.join(sorted(kernels))}")
    return seen


def floor(runner: Runner, step: Step) -> dict[str, Any]:
    """Memory over the floor on every host, bytes available."""
    return {host: _floor(runner, host) for host in runner.experiment.hosts}


def _floor(runner: Runner, host: str) -> int:
    available_b = int(runner.view.samples[host]["memory"]["available_b"])
    limit_gib = runner.experiment.guards.memory_floor_gib
    if available_b < limit_gib * GIB:
        raise StepFailed(f"{host}: MemAvailable is {available_b / GIB:.2f} GiB before an arm, under {limit_gib:g} GiB")
    return available_b


def start(runner: Runner, step: Step) -> dict[str, Any]:
    """Stop what serves and prove it stopped; then start the arm, and wait until it has answered one generation.

    Whoever serves is stopped first and started last: a rank is never without its others for longer than need be.
    """
    experiment, view = runner.experiment, runner.view
    arm = experiment.arm(step.arm or "")
    stopped = _stop_what_serves(runner)
    for host in experiment.hosts:
        _fresh_sample(runner, host)
        _free(runner, host)
        _floor(runner, host)
    for host in experiment.ranks_first:
        _start_part(runner, arm, host)
    runner.enter("started")
    took_s = wait_ready(runner, arm)
    view.swap_at_ready_b = {name: int(sample["memory"]["swap_used_b"]) for name, sample in view.samples.items()}
    runner.enter("ready")
    pids = {host: serving.pid for host, serving in view.arm.items()}
    return {"pids": pids, "ready_s": round(took_s, 3), "stopped": stopped}


def _start_part(runner: Runner, arm: Arm, host: str) -> None:
    experiment = runner.experiment
    wanted = expected(runner.production[host].identity, experiment, arm, runner.window, host)
    verb = {
        "verb": "start",
        "what": "arm",
        "argv": list(wanted.argv),
        "environ": dict(wanted.environ),
        "cwd": wanted.cwd,
        "process": wanted.process,
        "log": arm_log(runner, arm, host),
        "port": experiment.port(host, arm),
        "limit_s": 30,
    }
    row = runner.play(host, [verb], limit_s=60)[0]
    if row.get("unwritten"):
        runner.progress.say(f"  ! {host}: not written there: {'; '.join(row['unwritten'])}")
    runner.view.arm[host] = Serving(pid=row["pid"], start=row["start"], port=experiment.port(host, arm))
    runner.watch()


def arm_log(runner: Runner, arm: Arm, host: str) -> str:
    """Where an arm's output lies on a host until it is collected."""
    return f"{runner.experiment.hosts[host].state}/.log-{arm.name}"


def _stop_what_serves(runner: Runner) -> dict[str, Any]:
    experiment, view = runner.experiment, runner.view
    # Nothing of an arm's stop is decided by what the first of them has changed already.
    first = "stopped" not in view.phases
    view.leave("started", "ready")
    rows = {host: _stop_part(runner, host, first=first) for host in reversed(experiment.ranks_first)}
    runner.enter("stopped")
    view.production.clear()
    view.arm.clear()
    return rows


def _stop_part(runner: Runner, host: str, *, first: bool) -> dict[str, Any]:
    experiment, view = runner.experiment, runner.view
    end: dict[str, Any] = {
        "verb": "end",
        "what": "processes",
        "grace_s": experiment.production.grace_s,
        "limit_s": experiment.production.stop_limit_s,
    }
    arm = view.arm.get(host)
    if arm is not None:
        end |= {"processes": [[arm.pid, arm.start]], "port": arm.port, "of": "arm"}
        end["memory"] = memory(experiment, floor=False)
    elif first:
        production = runner.production[host]
        end |= {
            "processes": [[pid, begun] for pid, begun in production.tree],
            "port": experiment.port(host),
            "of": "production",
            "memory": memory(experiment, production.held_b, floor=False),
            "idle": idle(experiment) if experiment.serves(host) else None,
        }
        view.leave("idle")
    limit_s = experiment.production.stop_limit_s + 240
    row = runner.play(host, [end], limit_s=limit_s)[0]
    return {key: row[key] for key in ("seconds", "killed", "memory") if key in row}


def _free(runner: Runner, host: str) -> None:
    """A stop's exit status is a claim: what the host shows is the fact."""
    for port in runner.experiment.ports(host):
        heard = runner.view.samples[host]["ports"][str(port)]["listeners"]
        if heard:
            raise StepFailed(f"{host}: pid {heard[0]['pid']} listens on port {port} still, which was to be stopped")


def _fresh_sample(runner: Runner, host: str) -> None:
    """Wait for a sample that was read after now: what an older one says of ports and memory is over."""
    at = runner.now()
    while runner.view.sampled_ns.get(host, 0) < at:
        runner.pause(0.02)


def wait_ready(runner: Runner, arm: Arm) -> float:
    """Wait until an arm answers its readiness path and one generation; seconds it took. Raises ``StepFailed``."""
    experiment = runner.experiment
    began = runner.now()
    limit_s = experiment.production.start_limit_s
    base = runner.endpoint(arm)
    while True:
        if runner.get(base, experiment.server.ready, limit_s=3).status == 200:
            break
        for host, part in runner.view.arm.items():
            sample = runner.view.samples[host].get("processes", {}).get(str(part.pid))
            if sample is not None and not sample["alive"]:
                raise StepFailed(f"arm {arm.name} died at its start on {host}: {_last_lines(runner, arm, host)}")
        if runner.now() - began > limit_s * NS:
            raise StepFailed(
                f"arm {arm.name} was not ready within {limit_s:g} s (production.start_limit_s): "
                f"{_last_lines(runner, arm, experiment.production.host)}"
            )
        runner.pause(0.1)
    one = generation(experiment)
    exchange = runner.wait(Call(base=base, path=one["path"], body=canonical(one["body"]), limit_s=limit_s))
    prompt_tokens = len(one["body"]["prompt"])
    rows.whole(f"arm {arm.name}'s first generation", exchange, prompt_tokens=prompt_tokens, output_tokens=1)
    return (runner.now() - began) / NS


def _last_lines(runner: Runner, arm: Arm, host: str) -> str:
    """The last line of an arm that was asked nothing yet; its log is kept, for it may be all that says why."""
    kept = collect_log(runner, arm, host)[0]
    lines = [line for line in kept.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return f"its last line: {last[:300]} (all of them: {log_name(runner, arm, host)})" if lines else "it wrote nothing"


def identity(runner: Runner, step: Step) -> dict[str, Any]:
    """Prove that what runs is production plus the declared differences, rank by rank, from outside and inside."""
    experiment = runner.experiment
    arm = experiment.arm(step.arm or "")
    ranks = {host: _identity(runner, arm, host) for host in experiment.hosts}
    _verify_tells(runner, arm)
    record = {"arm": arm.name, "ranks": ranks, "reported": reported(runner, arm)}
    runner.keep("write", f"arms/{arm.name}/identity.json", json.dumps(record, indent=1, sort_keys=True).encode())
    return {"sources": {host: len(rank["sources"]) for host, rank in ranks.items()}, "tells": len(arm.tells)}


def _identity(runner: Runner, arm: Arm, host: str) -> dict[str, Any]:
    experiment, production, part = runner.experiment, runner.production[host], runner.view.arm[host]
    found = runner.call(host, "inspect", {"port": part.port})[-1]
    if part.pid not in (found["pid"], found["pgid"], found["sid"]):
        raise StepFailed(f"{host}: pid {found['pid']} listens on port {part.port}, the arm's is {part.pid}")
    seen = observed(found)
    wrong = undeclared(production.identity, seen, experiment, arm, runner.window, host)
    if wrong:
        raise StepFailed(f"{host}: arm {arm.name} is not production plus its declared differences: {wrong}")
    loaded = sources(runner, arm, host)
    _verify_sources(runner, arm, host, loaded)
    return {
        "pid": found["pid"],
        "argv": runner.secrets.argv(list(seen.argv)),
        "environ": runner.secrets.environ(dict(seen.environ)),
        "process": seen.process,
        "sources": loaded,
    }


def _verify_sources(runner: Runner, arm: Arm, host: str, loaded: Mapping[str, str]) -> None:
    """The files as the rank itself loaded them: production's, with the overlay's in their places."""
    if runner.experiment.server.sources is None:
        return
    wanted = dict(runner.production[host].sources)
    if arm.overlay is not None:
        wanted |= {file.target: file.sha256 for file in runner.experiment.overlays[arm.overlay].files}
    wrong = sorted(target for target in wanted.keys() | loaded.keys() if wanted.get(target) != loaded.get(target))
    if wrong:
        raise StepFailed(f"{host}: arm {arm.name}: the server itself did not load what was meant: {', '.join(wrong)}")


def _verify_tells(runner: Runner, arm: Arm) -> None:
    """A tell must be in the log of the arm that declares it, and in no other arm's."""
    if not any(other.tells for other in runner.experiment.arms):
        return
    host = runner.experiment.production.host
    content = runner.fetch(host, arm_log(runner, arm, host)) or b""
    text = content.decode(errors="replace")
    own = {tell.log for tell in arm.tells}
    for pattern in sorted({tell.log for other in runner.experiment.arms for tell in other.tells}):
        there = re.search(pattern, text, re.MULTILINE) is not None
        if there and pattern not in own:
            raise StepFailed(f"arm {arm.name}: its log holds a tell that it does not declare: {pattern!r}")
        if not there and pattern in own:
            raise StepFailed(f"arm {arm.name}: its switch did not bite: its log lacks the tell {pattern!r}")


def requests(runner: Runner, step: Step) -> dict[str, Any]:
    """Send the timed protocol, cell by cell; each is saved as it lands."""
    experiment = runner.experiment
    arm = experiment.arm(step.arm or "")
    landed = 0
    for cell in experiment.protocol.cells:
        cell_prompt(runner, cell)
        for rep in range(1, experiment.reps(arm, cell) + 1):
            row = run_cell(runner, arm, cell, rep)
            runner.keep("append", f"arms/{arm.name}/cells.jsonl", canonical(row) + b"\n")
            runner.record("cell", arm=arm.name, cell=cell.name, rep=rep, ttft_ns=row["ttft_ns"])
            runner.progress.cell(row)
            landed += 1
        if cell.logprobs:
            warm_logprobs(runner, arm)
    return {"cells": landed}


def checks(runner: Runner, step: Step) -> dict[str, Any]:
    """Ask what the checks compare; rows are saved only when whole."""
    arm = runner.experiment.arm(step.arm or "")
    rows = run_checks(runner, arm)
    content = b"".join(canonical(row) + b"\n" for row in rows)
    runner.keep("write", f"arms/{arm.name}/checks.jsonl", content)
    runner.record("check", arm=arm.name, rows=len(rows))
    return {"rows": len(rows)}


def collect(runner: Runner, step: Step) -> dict[str, Any]:
    """Keep the arm's log of every rank."""
    arm = runner.experiment.arm(step.arm or "")
    return {"lines_dropped": {host: collect_log(runner, arm, host)[1] for host in runner.experiment.hosts}}


def log_name(runner: Runner, arm: Arm, host: str) -> str:
    """Where an arm's log of one rank is kept: ``server.log`` of who serves, ``server-HOST.log`` of any other."""
    rank = "" if runner.experiment.serves(host) else f"-{host}"
    return f"arms/{arm.name}/server{rank}.log"


def collect_log(runner: Runner, arm: Arm, host: str) -> tuple[str, int]:
    """Keep an arm's log without secrets and texts; return what was kept, and the number of lines that were not.

    What a server logs of an answer that never arrived is not known by the screen: so the log of an arm that is given
    up while it is asked is not kept.
    """
    content = runner.fetch(host, arm_log(runner, arm, host)) or b""
    lines = runner.secrets.clean(content.decode(errors="replace")).split("\n")
    kept: list[str] = []
    for first in range(0, len(lines), LOG_BLOCK):
        # A large log takes seconds to screen; a run may lie across a block's ends.
        begin, end = max(0, first - RUN_CHARACTERS), first + LOG_BLOCK
        held = runner.screen.held(lines[begin : end + RUN_CHARACTERS])
        kept += [line for number, line in enumerate(lines[first:end], start=first - begin) if number not in held]
        runner.tick()
    text = "\n".join(kept)
    runner.keep("write", log_name(runner, arm, host), text.encode())
    return text, len(lines) - len(kept)
