"""What each step does, from ``preflight`` to ``reading``. Each act returns what it observed, for the ledger."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from fairtrial.canonical import canonical, sha256
from fairtrial.client import Call
from fairtrial.errors import Refused, StepFailed
from fairtrial.experiment import Arm
from fairtrial.guards import GIB, NS, Serving, evaluate
from fairtrial.identity import MARK, Identity, expected, option, undeclared
from fairtrial.measure import (
    ask_greedy,
    ask_probe,
    cell_prompt,
    complete,
    greedy_prompts,
    greedy_texts,
    identity_row,
    judge_probe,
    read_counters,
    run_cell,
    run_checks,
)
from fairtrial.restoration import document, generation, idle, memory
from fairtrial.runner import Production, Runner
from fairtrial.secrets import RUN_CHARACTERS
from fairtrial.summary import write_summary
from fairtrial.switch.state import canonical as host_canonical
from fairtrial.window import Step

MIN_FREE_B = 64 * 1024 * 1024
CLOCK_SKEW_S = 2.0
LOG_BLOCK = 1000
LOG_BLOCK = 1000
"""Lines of a log that are screened between two ticks."""
REPORTED_LIMIT_B = 256 * 1024


def preflight(runner: Runner, step: Step) -> dict[str, Any]:
    experiment = runner.experiment
    for path in runner.stop_files:
        if path.exists():
            raise Refused(f"a STOP file lies there before the window: {path}: remove it first")
    free_b = shutil.disk_usage(runner.out).free
    if free_b < MIN_FREE_B:
        raise Refused(f"{runner.out}: {free_b >> 20} MiB are free, {MIN_FREE_B >> 20} are needed for the evidence")
    _overlay_sources(runner)
    if experiment.checks is not None and experiment.checks.greedy.file is not None:
        greedy_texts(runner)
    host = experiment.production.host
    found = _look(runner, host)
    _ask_host(runner, host, found)
    runner.production = read_production(runner)
    _contexts(runner)
    _sources_of_production(runner)
    runner.view.now_ns = runner.now()
    available_b = int(found["memory"]["available_b"])
    floor_b = int(max(experiment.guards.memory_floor_gib, experiment.guards.memory_min_gib) * GIB)
    if available_b < floor_b:
        raise Refused(
            f"{host}: MemAvailable is {available_b / GIB:.2f} GiB while production runs; a window needs "
            f"{floor_b / GIB:g} GiB (guards.memory_floor_gib, guards.memory_min_gib)"
        )
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
        _short_cell(runner)
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


def _short_cell(runner: Runner) -> None:
    """One short streamed request: token-id prompts, usage, whole streams."""
    from fairtrial.client import completion, salt

    experiment = runner.experiment
    low = experiment.protocol.token_ids[0]
    ids = [low + number % 2 for number in range(16)]
    runner.screen.learn_ids(ids)
    body = completion(
        model=experiment.server.model,
        prompt_ids=ids,
        max_tokens=2,
        salt=salt(experiment.protocol.seed, f"preflight/{runner.window}"),
        ignore_eos=True,
    )
    call = Call(
        base=runner.endpoint(None), path=experiment.server.completions, body=canonical(body), stream=True, limit_s=60
    )
    complete(runner, "the short streamed request", runner.ask(call, purpose="preflight stream"), 16, 2)


def _overlay_sources(runner: Runner) -> None:
    for name, overlay in runner.experiment.overlays.items():
        for file in overlay.files:
            path = runner.base / file.source
            try:
                found = sha256(path.read_bytes())
            except OSError as error:
                raise Refused(f"overlays.{name}: {path}: {error.strerror}") from None
            if found != file.sha256:
                raise Refused(
                    f"overlays.{name}: {path} has SHA-256 {found}, pinned is {file.sha256}: build it anew, or pin "
                    "what it is"
                )


def _look(runner: Runner, host: str) -> dict[str, Any]:
    experiment = runner.experiment
    ports = sorted({experiment.production.port, *(arm.port for arm in experiment.arms)})
    return runner.call(host, "look", {"ports": ports})[-1]


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
    production = experiment.production
    listeners = found["ports"][str(production.port)]["listeners"]
    if not listeners:
        raise Refused(
            f"{host}: production is down: nothing listens on port {production.port}: a window starts from a production "
            "that serves"
        )
    for arm in experiment.arms:
        if arm.port == production.port:
            continue
        for process in found["ports"][str(arm.port)]["listeners"]:
            name = " ".join(runner.secrets.argv(process["argv"])[:3])[:120]
            raise Refused(
                f"{host}: arm {arm.name}'s port {arm.port} is in use by pid {process['pid']} "
                f"({name}): end it, or give the arm another port"
            )


def read_production(runner: Runner) -> Production:
    """Read production's process from its host. Raises ``Refused`` when it cannot be started again from what is seen."""
    experiment = runner.experiment
    host, port = experiment.production.host, experiment.production.port
    found = runner.call(host, "inspect", {"port": port})[-1]
    identity = Identity(
        argv=tuple(found["argv"]),
        environ=found["environ"],
        cwd=found["cwd"],
        exe=found["exe"],
        uid=found["uid"],
    )
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
    looked = _look(runner, host)
    return Production(
        identity=identity,
        pid=found["pid"],
        start=found["start"],
        tree=[(process["pid"], process["start"]) for process in found["tree"]],
        log=found.get("stdout") or "/dev/null",
        held_b=int(found["held_b"]),
        boot_id=looked["host"]["boot_id"],
        kernel=looked["host"]["kernel"],
    )


def _contexts(runner: Runner) -> None:
    """Each arm's context, from its arguments, must hold the protocol's longest request."""
    experiment = runner.experiment
    argument = experiment.server.context_argument
    assert runner.production is not None
    if argument is None:
        return
    for arm in experiment.arms:
        wanted = expected(runner.production.identity, experiment, arm, runner.window)
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


def sources(runner: Runner, arm: Arm | None) -> dict[str, str]:
    """The source files a server says it loaded: target -> SHA-256. Raises ``StepFailed``."""
    path = runner.experiment.server.sources
    if path is None:
        return {}
    base = runner.endpoint(arm)
    exchange = runner.get(base, path)
    try:
        found = json.loads(exchange.body)["sources"]
        return {str(target): str(digest) for target, digest in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        where = f"http://{base.host}:{base.port}{path}"
        raise StepFailed(f"{where} does not say which sources it loaded (status {exchange.status})") from None


def _sources_of_production(runner: Runner) -> None:
    assert runner.production is not None
    try:
        loaded = sources(runner, None)
    except StepFailed as error:
        raise Refused(str(error)) from None
    runner.production.sources = loaded
    for name, overlay in runner.experiment.overlays.items():
        for file in overlay.files:
            base = loaded.get(file.target)
            if runner.experiment.server.sources is not None and base != file.base_sha256:
                raise Refused(
                    f"overlays.{name}: {file.target} was built from {file.base_sha256 or 'no base'}, production runs "
                    f"{base or 'none'}: build the overlay anew from production's file"
                )


def hold(runner: Runner, step: Step) -> dict[str, Any]:
    experiment = runner.experiment
    runner.held_ns = runner.now()
    for host in experiment.hosts:
        opener = runner.open_channel(host, "hold")
        runner.openers[host] = opener
        opener.send(json.dumps({"hold": _hold_record(runner), "lease_s": experiment.waits.lease_s}))
        answer = _first_line(runner, opener.lines, opener.ended, f"{host}: hold")
        if not answer.get("ok"):
            owner = answer.get("refused") or {}
            if owner:
                raise Refused(
                    f"{host}: somebody else holds it: window {owner.get('window', '?')} of {owner.get('owner', '?')} "
                    f"for: {owner.get('purpose', '?')}"
                )
            raise Refused(f"{host}: the HOLD was not taken: {answer.get('message', 'no reason was given')}")
        runner.view.renewed_ns[host] = runner.now()
        reader = runner.open_channel(host, "read")
        runner.readers[host] = reader
        # The copy in the state folder is compiled: a command starts in half the time.
        runner.installed[host] = f"{experiment.hosts[host].state}/host.pyz"
    runner.term = 0
    runner.watch()
    deadline = runner.now() + 5 * NS
    while any(host not in runner.view.samples for host in experiment.hosts) and runner.now() < deadline:
        runner.pause(0.02)
    runner.enter("held")
    runner.view.now_ns = runner.now()
    for trip in evaluate(runner.view, experiment):
        raise StepFailed(f"production itself would trip a guard: {trip.guard}: {trip.reason}")
    return {"hosts": list(experiment.hosts)}


def _hold_record(runner: Runner) -> dict[str, Any]:
    return {
        "schema": "fairtrial.hold/1",
        "window": runner.window,
        "purpose": runner.experiment.purpose,
        "out": str(runner.out),
        "hosts": list(runner.experiment.hosts),
        "registration_sha256": runner.experiment.sha256,
        **runner.actor,
    }


def _first_line(runner: Runner, lines: Callable[[], list[str]], ended: Callable[[], bool], what: str) -> dict[str, Any]:
    deadline = runner.now() + 10 * NS
    while runner.now() < deadline:
        gone = ended()
        for line in lines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                return value
        if gone:
            break
        runner.backend.sleep(0.01)
    raise StepFailed(f"{what}: no answer in time")


def snapshot(runner: Runner, step: Step) -> dict[str, Any]:
    experiment = runner.experiment
    host = experiment.production.host
    earlier = runner.production
    assert earlier is not None
    production = read_production(runner)
    production.sources = earlier.sources
    if (production.pid, production.start) != (earlier.pid, earlier.start):
        raise StepFailed(f"{host}: production restarted since preflight: pid {earlier.pid} is now {production.pid}")
    runner.production = production
    runner.view.production = Serving(pid=production.pid, start=production.start, port=experiment.production.port)
    shown = runner.secrets.environ(dict(production.identity.environ))
    record = {
        "host": host,
        "pid": production.pid,
        "argv": runner.secrets.argv(list(production.identity.argv)),
        "environ": shown,
        "cwd": production.identity.cwd,
        "exe": production.identity.exe,
        "uid": production.identity.uid,
        "log": production.log,
        "held_b": production.held_b,
        "boot_id": production.boot_id,
        "kernel": production.kernel,
        "sources": production.sources,
        "reported": reported(runner, None),
    }
    runner.keep("write", f"snapshot/{host}.json", json.dumps(record, indent=1, sort_keys=True).encode())
    runner.document = document(
        experiment,
        window=runner.window,
        host=host,
        production=production.identity,
        log=production.log,
        held_b=production.held_b,
        was=production.tree,
    )
    return {"pid": production.pid, "held_b": production.held_b}


def reported(runner: Runner, arm: Arm | None) -> dict[str, Any]:
    """What a server says of itself, by path; kept for every arm."""
    found: dict[str, Any] = {}
    base = runner.endpoint(arm)
    for path in runner.experiment.server.reported:
        exchange = runner.get(base, path)
        if exchange.status != 200 or len(exchange.body) > REPORTED_LIMIT_B:
            found[path] = {"status": exchange.status}
            continue
        try:
            found[path] = json.loads(runner.secrets.clean(exchange.body.decode(errors="replace")))
        except ValueError:
            found[path] = {"status": 200, "sha256": sha256(exchange.body)}
    return found


def switch(runner: Runner, step: Step) -> dict[str, Any]:
    armed: list[str] = []
    for host, declared in runner.experiment.hosts.items():
        if declared.switch == "none":
            continue
        assert runner.document is not None
        nonce = os.urandom(8).hex()
        verbs: list[dict[str, Any]] = [
            {"verb": "install", "restore": runner.document},
            {"verb": "ask", "nonce": nonce},
            {"verb": "arm"},
        ]
        rows = runner.play(host, verbs, limit_s=30)
        answered = next((row for row in rows if row.get("verb") == "ask"), {})
        told = sha256(host_canonical(runner.document))
        if answered.get("nonce") != nonce or answered.get("restore_sha256") != told:
            raise StepFailed(
                f"{host}: the dead-man's switch did not answer with our nonce and the restore it was given: production "
                "is not stopped without it"
            )
        armed.append(host)
    runner.watch()
    deadline = runner.now() + 5 * NS
    while runner.now() < deadline:
        states = [(runner.view.samples[host].get("switch") or {}) for host in armed]
        if all(state.get("alive") and state.get("armed") for state in states):
            break
        runner.pause(0.02)
    runner.enter("armed")
    return {"armed": armed}


def wait_idle(runner: Runner, step: Step) -> dict[str, Any]:
    """Wait until production has run and queued nothing for ``idle_s``."""
    waits = runner.experiment.waits
    base = runner.endpoint(None)
    began = quiet_since = runner.now()
    unseen = False
    while True:
        found = read_counters(runner, base)
        now = runner.now()
        if found is None or found.running is None:
            # Counters that cannot be read now are unknown, not idle; a server that has none is never idle to us.
            unseen = runner.experiment.server.metrics is None
            quiet_since = quiet_since if unseen else now
        elif found.running + (found.waiting or 0) > 0:
            quiet_since = now
        if now - quiet_since >= waits.idle_s * NS:
            break
        if now - began > waits.idle_limit_s * NS:
            raise StepFailed(f"production served somebody throughout {waits.idle_limit_s:g} s: choose a quieter time")
        runner.pause(min(0.25, waits.idle_s / 4))
    runner.view.counts_demand, runner.view.demand_ns = not unseen, runner.now()
    runner.enter("idle")
    return {"demand": "unproved: production counts no requests" if unseen else "none"}


def reference(runner: Runner, step: Step) -> dict[str, Any]:
    """Ask production the greedy prompts twice, and keep those that agree with themselves."""
    if runner.experiment.checks is None:
        return {"greedy": 0}
    base = runner.endpoint(None)
    rows = []
    prompts = greedy_prompts(runner, base)
    for number, ids in enumerate(prompts, start=1):
        first, second = (
            ask_greedy(runner, base, number, ids, f"reference/{runner.window}/{number}/{turn}") for turn in (1, 2)
        )
        if first == second:
            rows.append(first)
    runner.reference = rows
    content = b"".join(canonical(row) + b"\n" for row in rows)
    runner.keep("write", "snapshot/reference.jsonl", content)
    return {"greedy": len(rows), "left_out": len(prompts) - len(rows)}


def stage(runner: Runner, step: Step) -> dict[str, Any]:
    """Copy overlay trees to the host where absent; one that is there and differs stops, and is never overwritten."""
    host = runner.experiment.production.host
    staged: dict[str, int] = {}
    used = {arm.overlay for arm in runner.experiment.arms if arm.overlay}
    for name in sorted(used):
        overlay = runner.experiment.overlays[name]
        for file in overlay.files:
            path = f"{overlay.generated}/{name}/{file.target}"
            found = runner.fetch(host, path)
            if found is None:
                runner.put(host, path, (runner.base / file.source).read_bytes())
                staged[name] = staged.get(name, 0) + 1
                found = runner.fetch(host, path) or b""
            if sha256(found) != file.sha256:
                raise StepFailed(
                    f"{host}: {path} is there and differs from the pinned {file.sha256[:12]}: it is never overwritten; "
                    "move that tree away, or declare another overlays.*.generated"
                )
    return {"staged": staged}


def budget(runner: Runner, step: Step) -> dict[str, Any]:
    left_s = runner.bounds.submit_s - runner.elapsed_s()
    if left_s < runner.bounds.arm_s:
        raise StepFailed(
            f"{left_s / 60:.1f} min are left before the submission bound, an arm needs {runner.bounds.arm_s / 60:.1f}"
        )
    return {"left_s": round(left_s, 1)}


def parity(runner: Runner, step: Step) -> dict[str, Any]:
    production = runner.production
    assert production is not None
    host = runner.experiment.production.host
    found = _look(runner, host)["host"]
    if (found["boot_id"], found["kernel"]) != (production.boot_id, production.kernel):
        raise StepFailed(f"{host}: it booted or changed its kernel since the snapshot")
    return {"boot_id": found["boot_id"], "kernel": found["kernel"]}


def floor(runner: Runner, step: Step) -> dict[str, Any]:
    return {host: _floor(runner, host) for host in runner.experiment.hosts}


def _floor(runner: Runner, host: str) -> int:
    available_b = int(runner.view.samples[host]["memory"]["available_b"])
    limit_gib = runner.experiment.guards.memory_floor_gib
    if available_b < limit_gib * GIB:
        raise StepFailed(f"{host}: MemAvailable is {available_b / GIB:.2f} GiB before an arm, under {limit_gib:g} GiB")
    return available_b


def start(runner: Runner, step: Step) -> dict[str, Any]:
    """Stop what serves and prove it stopped; then start the arm, and wait until it has answered one generation."""
    experiment, production, view = runner.experiment, runner.production, runner.view
    assert production is not None
    host = experiment.production.host
    arm = experiment.arm(step.arm or "")
    stopped = _stop_what_serves(runner, host)
    _fresh_sample(runner, host)
    _floor(runner, host)
    wanted = expected(production.identity, experiment, arm, runner.window)
    row = runner.play(
        host,
        [
            {
                "verb": "start",
                "what": "arm",
                "argv": list(wanted.argv),
                "environ": dict(wanted.environ),
                "cwd": wanted.cwd,
                "log": arm_log(runner, arm),
                "port": arm.port,
                "limit_s": 30,
            }
        ],
        limit_s=60,
    )[0]
    if row.get("unwritten"):
        runner.progress.say(f"  ! {host}: not written there: {'; '.join(row['unwritten'])}")
    view.arm = Serving(pid=row["pid"], start=row["start"], port=arm.port)
    runner.enter("started")
    runner.watch()
    took_s = wait_ready(runner, arm)
    view.swap_at_ready_b = {name: int(sample["memory"]["swap_used_b"]) for name, sample in view.samples.items()}
    runner.enter("ready")
    return {"pid": row["pid"], "ready_s": round(took_s, 3), "stopped": stopped}


def arm_log(runner: Runner, arm: Arm) -> str:
    """Where an arm's output lies on its host until it is collected."""
    return f"{runner.experiment.hosts[runner.experiment.production.host].state}/.log-{arm.name}"


def _stop_what_serves(runner: Runner, host: str) -> dict[str, Any]:
    experiment, production, view = runner.experiment, runner.production, runner.view
    assert production is not None
    end: dict[str, Any] = {
        "verb": "end",
        "what": "processes",
        "grace_s": experiment.production.grace_s,
        "limit_s": experiment.production.stop_limit_s,
    }
    if view.arm is not None:
        end |= {"processes": [[view.arm.pid, view.arm.start]], "port": view.arm.port, "memory": memory(experiment)}
    elif "stopped" not in view.phases:
        end |= {
            "processes": [[pid, begun] for pid, begun in production.tree],
            "port": experiment.production.port,
            "memory": memory(experiment, production.held_b),
            "idle": idle(experiment),
        }
        view.leave("idle")
    view.leave("started", "ready")
    limit_s = experiment.production.stop_limit_s + 240
    row = runner.play(host, [end], limit_s=limit_s)[0]
    runner.enter("stopped")
    view.production = None
    view.arm = None
    return {key: row[key] for key in ("seconds", "killed", "memory") if key in row}


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
        pid = str(runner.view.arm.pid) if runner.view.arm else ""
        sample = runner.view.samples[experiment.production.host].get("processes", {}).get(pid)
        if sample is not None and not sample["alive"]:
            raise StepFailed(f"arm {arm.name} died at its start: {_last_lines(runner, arm)}")
        if runner.now() - began > limit_s * NS:
            raise StepFailed(
                f"arm {arm.name} was not ready within {limit_s:g} s (production.start_limit_s): "
                f"{_last_lines(runner, arm)}"
            )
        runner.pause(0.1)
    one = generation(experiment)
    exchange = runner.wait(Call(base=base, path=one["path"], body=canonical(one["body"]), limit_s=limit_s))
    if exchange.status != 200 or exchange.fault is not None:
        raise StepFailed(f"arm {arm.name} answers {experiment.server.ready}, but no generation: {exchange.fault}")
    return (runner.now() - began) / NS


def _last_lines(runner: Runner, arm: Arm) -> str:
    """The last line of an arm that was asked nothing yet; its log is kept, for it may be all that says why."""
    kept = collect_log(runner, arm)[0]
    lines = [line for line in kept.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return f"its last line: {last[:300]} (all of them: arms/{arm.name}/server.log)" if lines else "it wrote nothing"


def identity(runner: Runner, step: Step) -> dict[str, Any]:
    """Prove that what runs is production plus the declared differences, from the host and from the inside."""
    experiment, production, view = runner.experiment, runner.production, runner.view
    assert production is not None
    assert view.arm is not None
    arm = experiment.arm(step.arm or "")
    host = experiment.production.host
    found = runner.call(host, "inspect", {"port": arm.port})[-1]
    if view.arm.pid not in (found["pid"], found["pgid"], found["sid"]):
        raise StepFailed(f"{host}: pid {found['pid']} listens on port {arm.port}, the arm's is {view.arm.pid}")
    observed = Identity(
        argv=tuple(found["argv"]), environ=found["environ"], cwd=found["cwd"], exe=found["exe"], uid=found["uid"]
    )
    wrong = undeclared(production.identity, observed, experiment, arm, runner.window)
    if wrong:
        raise StepFailed(f"arm {arm.name} is not production plus its declared differences: {wrong}")
    loaded = sources(runner, arm)
    _verify_sources(runner, arm, loaded)
    _verify_tells(runner, arm)
    record = {
        "arm": arm.name,
        "pid": found["pid"],
        "argv": runner.secrets.argv(list(observed.argv)),
        "environ": runner.secrets.environ(dict(observed.environ)),
        "sources": loaded,
        "reported": reported(runner, arm),
    }
    runner.keep("write", f"arms/{arm.name}/identity.json", json.dumps(record, indent=1, sort_keys=True).encode())
    return {"sources": len(loaded), "tells": len(arm.tells)}


def _verify_sources(runner: Runner, arm: Arm, loaded: Mapping[str, str]) -> None:
    """The files as the server itself loaded them: production's, with the overlay's in their places."""
    production = runner.production
    assert production is not None
    if runner.experiment.server.sources is None:
        return
    wanted = dict(production.sources)
    if arm.overlay is not None:
        wanted |= {file.target: file.sha256 for file in runner.experiment.overlays[arm.overlay].files}
    wrong = sorted(target for target in wanted.keys() | loaded.keys() if wanted.get(target) != loaded.get(target))
    if wrong:
        raise StepFailed(f"arm {arm.name}: the server itself did not load what was meant: {', '.join(wrong)}")


def _verify_tells(runner: Runner, arm: Arm) -> None:
    """A tell must be in the log of the arm that declares it, and in no other arm's."""
    if not any(other.tells for other in runner.experiment.arms):
        return
    content = runner.fetch(runner.experiment.production.host, arm_log(runner, arm)) or b""
    text = content.decode(errors="replace")
    own = {tell.log for tell in arm.tells}
    for pattern in sorted({tell.log for other in runner.experiment.arms for tell in other.tells}):
        there = re.search(pattern, text, re.MULTILINE) is not None
        if there and pattern not in own:
            raise StepFailed(f"arm {arm.name}: its log holds a tell that it does not declare: {pattern!r}")
        if not there and pattern in own:
            raise StepFailed(f"arm {arm.name}: its switch did not bite: its log lacks the tell {pattern!r}")


def requests(runner: Runner, step: Step) -> dict[str, Any]:
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


def warm_logprobs(runner: Runner, arm: Arm) -> None:
    """One short request with logprobs: some servers compile on the first."""
    from fairtrial.client import completion, salt

    experiment = runner.experiment
    low = experiment.protocol.token_ids[0]
    body = completion(
        model=experiment.server.model,
        prompt_ids=[low] * 8,
        max_tokens=1,
        salt=salt(experiment.protocol.seed, "warm logprobs"),
        stream=False,
        logprobs=20,
    )
    call = Call(
        base=runner.endpoint(arm),
        path=experiment.server.completions,
        body=canonical(body),
        limit_s=experiment.protocol.limit_s,
    )
    exchange = runner.ask(call, purpose=f"{arm.name} warm-up with logprobs")
    complete(runner, f"{arm.name} warm-up with logprobs", exchange, 8, 1)


def checks(runner: Runner, step: Step) -> dict[str, Any]:
    arm = runner.experiment.arm(step.arm or "")
    rows = run_checks(runner, arm)
    content = b"".join(canonical(row) + b"\n" for row in rows)
    runner.keep("write", f"arms/{arm.name}/checks.jsonl", content)
    runner.record("check", arm=arm.name, rows=len(rows))
    return {"rows": len(rows)}


def collect(runner: Runner, step: Step) -> dict[str, Any]:
    return {"lines_dropped": collect_log(runner, runner.experiment.arm(step.arm or ""))[1]}


def collect_log(runner: Runner, arm: Arm) -> tuple[str, int]:
    """Keep an arm's log without secrets and texts; return what was kept, and the number of lines that were not.

    What a server logs of an answer that never arrived is not known by the screen: so the log of an arm that is given
    up while it is asked is not kept.
    """
    content = runner.fetch(runner.experiment.production.host, arm_log(runner, arm)) or b""
    lines = runner.secrets.clean(content.decode(errors="replace")).split("\n")
    kept: list[str] = []
    for first in range(0, len(lines), LOG_BLOCK):
        # A large log takes seconds to screen; a run may lie across a block's ends.
        begin, end = max(0, first - RUN_CHARACTERS), first + LOG_BLOCK
        held = runner.screen.held(lines[begin : end + RUN_CHARACTERS])
        kept += [line for number, line in enumerate(lines[first:end], start=first - begin) if number not in held]
        runner.tick()
    text = "\n".join(kept)
    runner.keep("write", f"arms/{arm.name}/server.log", text.encode())
    return text, len(lines) - len(kept)


def reading(runner: Runner, step: Step) -> dict[str, Any]:
    write_summary(runner, read=False)
    summary = write_summary(runner, read=True)
    return {"verdict": summary["verdict"]}


ACTS = {
    "preflight": preflight,
    "hold": hold,
    "snapshot": snapshot,
    "switch": switch,
    "idle": wait_idle,
    "reference": reference,
    "stage": stage,
    "budget": budget,
    "parity": parity,
    "floor": floor,
    "start": start,
    "identity": identity,
    "requests": requests,
    "checks": checks,
    "collect": collect,
    "reading": reading,
}
