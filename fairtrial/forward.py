"""What each step up to the reading does; those of an arm lie in ``arms``. What it returns is what it observed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fairtrial import arms
from fairtrial.canonical import canonical, sha256
from fairtrial.errors import Refused, StepFailed
from fairtrial.guards import NS, Serving, evaluate
from fairtrial.measure import (
    ask_greedy,
    greedy_prompts,
    read_counters,
)
from fairtrial.preflight import preflight, read_production, reported
from fairtrial.restoration import document
from fairtrial.runner import Runner
from fairtrial.summary import write_summary
from fairtrial.switch.state import canonical as host_canonical
from fairtrial.window import Step


def hold(runner: Runner, step: Step) -> dict[str, Any]:
    """Take the HOLD on every host or on none, renew it from here on, and begin to sample."""
    experiment = runner.experiment
    runner.held_ns = runner.now()
    for host in experiment.hosts:
        # where an earlier host is held already, that must be given back: a stop, not a refusal
        untaken = StepFailed if runner.terms else Refused
        opener = runner.open_channel(host, "hold")
        runner.openers[host] = opener
        opener.send(json.dumps({"hold": _hold_record(runner), "lease_s": experiment.waits.lease_s}))
        answer = _first_line(runner, opener.lines, opener.ended, f"{host}: hold")
        if not answer.get("ok"):
            owner = answer.get("refused") or {}
            if owner:
                raise untaken(
                    f"{host}: somebody else holds it: window {owner.get('window', '?')} of {owner.get('owner', '?')} "
                    f"for: {owner.get('purpose', '?')}"
                )
            raise untaken(f"{host}: the HOLD was not taken: {answer.get('message', 'no reason was given')}")
        runner.terms[host] = 0
        runner.view.renewed_ns[host] = runner.now()
        reader = runner.open_channel(host, "read")
        runner.readers[host] = reader
        # The copy in the state folder is compiled: a command starts in half the time.
        runner.installed[host] = f"{experiment.hosts[host].state}/host.pyz"
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
    """Read production's identity on every host, and compile from it the restore that brings it back."""
    for host in runner.experiment.hosts:
        _snapshot(runner, host)
    return {host: {"pid": one.pid, "held_b": one.held_b} for host, one in runner.production.items()}


def _snapshot(runner: Runner, host: str) -> None:
    experiment, earlier = runner.experiment, runner.production[host]
    production = read_production(runner, host)
    production.sources = earlier.sources
    if (production.pid, production.start) != (earlier.pid, earlier.start):
        raise StepFailed(f"{host}: production restarted since preflight: pid {earlier.pid} is now {production.pid}")
    runner.production[host] = production
    port = experiment.port(host)
    runner.view.production[host] = Serving(pid=production.pid, start=production.start, port=port)
    shown = runner.secrets.environ(dict(production.identity.environ))
    record = {
        "host": host,
        "pid": production.pid,
        "argv": runner.secrets.argv(list(production.identity.argv)),
        "environ": shown,
        "cwd": production.identity.cwd,
        "exe": production.identity.exe,
        "uid": production.identity.uid,
        "process": production.identity.process,
        "log": production.log,
        "held_b": production.held_b,
        "boot_id": production.boot_id,
        "kernel": production.kernel,
        "sources": production.sources,
        "reported": reported(runner, None) if experiment.serves(host) else {},
    }
    runner.keep("write", f"snapshot/{host}.json", json.dumps(record, indent=1, sort_keys=True).encode())
    runner.documents[host] = document(
        experiment,
        window=runner.window,
        host=host,
        production=production.identity,
        log=production.log,
        held_b=production.held_b,
        was=production.tree,
    )


def switch(runner: Runner, step: Step) -> dict[str, Any]:
    """Install the dead-man's switch on every host, see it alive with the restore it will run, and arm it."""
    armed: list[str] = []
    for host, declared in runner.experiment.hosts.items():
        if declared.switch == "none":
            runner.play(host, [{"verb": "install", "restore": runner.documents[host], "switch": False}], limit_s=30)
            continue
        nonce = runner.control.random(8).hex()
        verbs: list[dict[str, Any]] = [
            {"verb": "install", "restore": runner.documents[host]},
            {"verb": "ask", "nonce": nonce},
            {"verb": "arm"},
        ]
        rows = runner.play(host, verbs, limit_s=30)
        answered = next((row for row in rows if row.get("verb") == "ask"), {})
        told = sha256(host_canonical(runner.documents[host]))
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
    unseen, unread = False, 0
    while True:
        found = read_counters(runner, base)
        now = runner.now()
        if found is None or found.running is None:
            unread += 1
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
    observed = {"demand": "unproved: production counts no requests" if unseen else "none"}
    return observed | ({"unread": unread} if unread and not unseen else {})


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
    """Copy overlay trees to every host where absent; one that is there and differs stops, and is never overwritten."""
    staged = {host: _stage(runner, host) for host in runner.experiment.hosts}
    return {"staged": staged}


def _stage(runner: Runner, host: str) -> dict[str, int]:
    staged: dict[str, int] = {}
    used = {arm.overlay for arm in runner.experiment.arms if arm.overlay}
    for name in sorted(used):
        overlay = runner.experiment.overlays[name]
        for file in overlay.files:
            path = f"{overlay.generated}/{name}/{file.target}"
            found = runner.fetch(host, path)
            if found is None:
                runner.put(host, path, runner.control.read(runner.base / file.source))
                staged[name] = staged.get(name, 0) + 1
                found = runner.fetch(host, path) or b""
            if sha256(found) != file.sha256:
                raise StepFailed(
                    f"{host}: {path} is there and differs from the pinned {file.sha256[:12]}: it is never overwritten; "
                    "move that tree away, or declare another overlays.*.generated"
                )
    return staged


def reading(runner: Runner, step: Step) -> dict[str, Any]:
    """Save the cells, then read them by the registered rule."""
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
    "budget": arms.budget,
    "parity": arms.parity,
    "floor": arms.floor,
    "start": arms.start,
    "identity": arms.identity,
    "requests": arms.requests,
    "checks": arms.checks,
    "collect": arms.collect,
    "reading": reading,
}
