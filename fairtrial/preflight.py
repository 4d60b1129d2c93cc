"""What must hold before anything is touched: asked, and nothing changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fairtrial.canonical import sha256
from fairtrial.errors import Refused, StepFailed
from fairtrial.experiment import Arm
from fairtrial.guards import GIB
from fairtrial.identity import MARK, expected, observed, option, unrestorable
from fairtrial.measure import (
    ask_probe,
    greedy_texts,
    identity_row,
    judge_probe,
    read_counters,
    short_prompt,
    submit,
)
from fairtrial.runner import Production, Runner
from fairtrial.window import Step

MIN_FREE_B = 64 * 1024 * 1024
CLOCK_SKEW_S = 2.0
REPORTED_LIMIT_B = 256 * 1024


def preflight(runner: Runner, step: Step) -> dict[str, Any]:
    """Ask everything a window needs, and change nothing. Raises ``Refused`` with what is missing."""
    experiment = runner.experiment
    for path in runner.stop_files:
        if runner.control.exists(path):
            raise Refused(f"a STOP file lies there before the window: {path}: remove it first")
    free_b = runner.control.free_b(runner.out)
    if free_b < MIN_FREE_B:
        raise Refused(f"{runner.out}: {free_b >> 20} MiB are free, {MIN_FREE_B >> 20} are needed for the evidence")
    _overlay_sources(runner)
    if experiment.checks is not None and experiment.checks.greedy.file is not None:
        greedy_texts(runner)
    floor_b = int(max(experiment.guards.memory_floor_gib, experiment.guards.memory_min_gib) * GIB)
    for host in experiment.hosts:
        found = look_at(runner, host)
        _ask_host(runner, host, found)
        runner.production[host] = read_production(runner, host)
        available_b = int(found["memory"]["available_b"])
        if available_b < floor_b:
            raise Refused(
                f"{host}: MemAvailable is {available_b / GIB:.2f} GiB while production runs; a window needs "
                f"{floor_b / GIB:g} GiB (guards.memory_floor_gib, guards.memory_min_gib)"
            )
    _contexts(runner)
    for host in experiment.hosts:
        _sources_of_production(runner, host)
    runner.view.now_ns = runner.now()
    base = runner.endpoint(None)
    ready = runner.get(base, experiment.server.ready)
    if ready.status != 200:
        raise Refused(
            f"production does not answer http://{base.host}:{base.port}{experiment.server.ready} with 200 "
            f"({ready.fault or ready.status}): it must serve before a window"
        )
    found_counters = read_counters(runner, base)
    if experiment.server.metrics is not None and (
        found_counters is None or found_counters.running is None or found_counters.waiting is None
    ):
        # The host program looks at them under its lock before it stops production, and would not stop it.
        raise Refused(
            f"http://{base.host}:{base.port}{experiment.server.metrics} does not count production's running and "
            "waiting requests: name the path that does (server.metrics), or say that there is none: "
            "server.metrics = false"
        )
    proved: dict[str, Any] = {"counters": found_counters is not None}
    try:
        row = identity_row(runner, base)
        proved["identity"] = {key: row[key] for key in ("model", "fingerprint")}
        if row["cached_tokens"] is None and experiment.protocol.coldness == "cached_tokens":
            raise Refused(
                f"production on port {base.port} says nothing of cached tokens, and protocol.coldness demands it "
                '(vLLM: --enable-prompt-tokens-details; or set protocol.coldness = "unproved")'
            )
        what = "the short streamed request"
        salt_name = f"preflight/{runner.window}"
        submit(runner, base, what, short_prompt(runner), salt_name=salt_name, output_tokens=2)
        if experiment.checks is not None and any(arm.checks for arm in experiment.arms):
            probe = ask_probe(runner, base, f"preflight/{runner.window}")
            if probe["cached_tokens"] is None:
                raise Refused(
                    f"production on port {base.port} says nothing of cached tokens: checks need every probe proved "
                    "cold (vLLM: --enable-prompt-tokens-details); or leave the arms' checks out"
                )
            judge_probe(runner, probe)
    except StepFailed as error:
        raise Refused(f"production cannot do what the protocol needs: {error}") from None
    return proved


def _overlay_sources(runner: Runner) -> None:
    for name, overlay in runner.experiment.overlays.items():
        for file in overlay.files:
            path = runner.base / file.source
            try:
                found = sha256(runner.control.read(path))
            except OSError as error:
                raise Refused(f"overlays.{name}: {path}: {error.strerror}") from None
            if found != file.sha256:
                raise Refused(
                    f"overlays.{name}: {path} has SHA-256 {found}, pinned is {file.sha256}: build it anew, or pin "
                    "what it is"
                )


def _ask_host(runner: Runner, host: str, found: Mapping[str, Any]) -> None:
    """Refuse unless the host is free for a window."""
    experiment = runner.experiment
    state = found["state"]
    if state.get("exists") and not state.get("trusted"):
        raise Refused(f"{host}: {experiment.hosts[host].state}: {state.get('why') or 'is not a folder of ours'}")
    newest = state.get("newest")
    if newest:
        owner = state.get("hold") or {}
        raise Refused(
            f"{host}: a HOLD is there: window {owner.get('window', '?')} of {owner.get('owner', '?')} "
            f"(since {owner.get('since', '?')}, pid {owner.get('pid', '?')} on {owner.get('control_host', '?')}, for: "
            f"{owner.get('purpose', '?')}). If that runner is gone: fairtrial restore {owner.get('out', 'DIR')}"
        )
    serving = {listener["pid"] for port in found["ports"].values() for listener in port["listeners"]}
    for process in found.get("window_marked", []):
        # what is marked and serves on none of our ports may be a live window of another state folder
        if process["pid"] not in serving:
            continue
        raise Refused(
            f"{host}: pid {process['pid']} carries a window's mark ({MARK}): an earlier window was not released; "
            "fairtrial restore its folder first"
        )
    skew_s = abs(float(found["host"]["time_s"]) - runner.backend.utc())
    if skew_s > CLOCK_SKEW_S:
        raise Refused(f"{host}: its clock is {skew_s:.1f} s from ours, over {CLOCK_SKEW_S:g} s")
    own = experiment.port(host)
    key = "production.port" if experiment.serves(host) else f"hosts.{host}.port"
    if not found["ports"][str(own)]["listeners"]:
        raise Refused(
            f"{host}: production is down: nothing listens on port {own}: start it, or correct "
            f"{key}; a window starts from a production that serves"
        )
    for arm in experiment.arms:
        port = experiment.port(host, arm)
        if port == own:
            continue
        for process in found["ports"][str(port)]["listeners"]:
            name = " ".join(runner.secrets.argv(process["argv"])[:3])[:120]
            raise Refused(
                f"{host}: arm {arm.name}'s port {port} is in use by pid {process['pid']} "
                f"({name}): end it, or give the arm another port"
            )


def read_production(runner: Runner, host: str) -> Production:
    """Read a host's part of production. Raises ``Refused`` when it cannot be started again from what is seen."""
    experiment = runner.experiment
    port = experiment.port(host)
    log = experiment.production.log if experiment.serves(host) else None
    found = runner.call(host, "inspect", {"port": port, "log": log})[-1]
    identity = observed(found)
    if found["pgid"] != found["pid"]:
        raise Refused(
            f"{host}: pid {found['pid']} listens on port {port}, but is not the head of its process group: what "
            "started it is not known well enough to start it again "
            "(start production with setsid, without a wrapper that stays)"
        )
    if MARK in identity.environ:
        raise Refused(
            f"{host}: production (pid {found['pid']}) carries a window's mark: fairtrial restore that window first"
        )
    looked = look_at(runner, host)
    reason = unrestorable(found, looked["host"])
    if reason is not None:
        raise Refused(f"{host}: {reason}")
    return Production(
        identity=identity,
        pid=found["pid"],
        start=found["start"],
        tree=[(process["pid"], process["start"]) for process in found["tree"]],
        log=found["log"],
        held_b=int(found["held_b"]),
        boot_id=looked["host"]["boot_id"],
        kernel=looked["host"]["kernel"],
    )


def _contexts(runner: Runner) -> None:
    """Each arm's context, from its arguments, must hold the protocol's longest request."""
    experiment = runner.experiment
    argument = experiment.server.context_argument
    if argument is None:
        return
    host = experiment.production.host
    for arm in experiment.arms:
        wanted = expected(runner.production[host].identity, experiment, arm, runner.window, host)
        value = option(wanted.argv, argument)
        if value is None or not value.isdecimal():
            continue
        asked = [(f"cell {cell.name}", cell.prompt_tokens, cell.output_tokens) for cell in experiment.protocol.cells]
        if experiment.checks is not None and arm.checks:
            greedy = experiment.checks.greedy
            asked.append(("the probe", experiment.checks.probe.tokens, 1))
            asked.append(("a greedy prompt", 0 if greedy.file else greedy.prompt_tokens, greedy.output_tokens))
        for what, prompt_tokens, output_tokens in asked:
            if prompt_tokens + output_tokens > int(value):
                raise Refused(
                    f"arm {arm.name}: {argument} {value} is smaller than {what}'s {prompt_tokens} + {output_tokens} "
                    "tokens: the server would cut it in silence"
                )


def _sources_of_production(runner: Runner, host: str) -> None:
    try:
        loaded = sources(runner, None, host)
    except StepFailed as error:
        raise Refused(str(error)) from None
    runner.production[host].sources = loaded
    for name, overlay in runner.experiment.overlays.items():
        for file in overlay.files:
            base = loaded.get(file.target)
            if runner.experiment.server.sources is not None and base != file.base_sha256:
                raise Refused(
                    f"{host}: overlays.{name}: {file.target} was built from {file.base_sha256 or 'no base'}, "
                    f"production runs {base or 'none'}: build the overlay anew from production's file"
                )


def look_at(runner: Runner, host: str) -> dict[str, Any]:
    experiment = runner.experiment
    return runner.call(host, "look", {"ports": experiment.ports(host)})[-1]


def sources(runner: Runner, arm: Arm | None, host: str) -> dict[str, str]:
    """The source files that a host's rank says it loaded: target -> SHA-256. Raises ``StepFailed``."""
    path = runner.experiment.server.sources
    if path is None:
        return {}
    base = runner.endpoint(arm, host)
    exchange = runner.get(base, path)
    try:
        found = json.loads(exchange.body if exchange.fault is None else b"")["sources"]
        return {str(target): str(digest) for target, digest in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        where = f"http://{base.host}:{base.port}{path}"
        why = exchange.fault or "none in the answer"
        raise StepFailed(f"{where} does not say which sources it loaded ({why})") from None


def reported(runner: Runner, arm: Arm | None) -> dict[str, Any]:
    """What a server says of itself, by path; kept for every arm."""
    found: dict[str, Any] = {}
    base = runner.endpoint(arm)
    for path in runner.experiment.server.reported:
        exchange = runner.get(base, path)
        if exchange.fault is not None or len(exchange.body) > REPORTED_LIMIT_B:
            found[path] = {"status": exchange.status}
            continue
        try:
            found[path] = json.loads(runner.secrets.clean(exchange.body.decode(errors="replace")))
        except ValueError:
            found[path] = {"status": 200, "sha256": sha256(exchange.body)}
    return found
