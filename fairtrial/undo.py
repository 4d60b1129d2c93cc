"""What each undo step does, for the runner and for ``fairtrial restore``: the same acts, the same verbs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fairtrial.errors import FairtrialError, StepFailed, Superseded
from fairtrial.evidence import seal
from fairtrial.forward import ACTS as FORWARD
from fairtrial.guards import NS
from fairtrial.measure import ask_greedy, greedy_prompts, read_counters
from fairtrial.restoration import END_LIMIT_S, MEMORY_LIMIT_S, document, memory
from fairtrial.runner import Runner
from fairtrial.store import report_unwritten
from fairtrial.summary import write_summary
from fairtrial.ticks import HoldLost, Interrupted
from fairtrial.window import Step

LOCK_WAIT_S = 90.0
GREEDY_TRIES = 3

Act = Callable[[Runner, Step], dict[str, Any]]


def acquire(runner: Runner, *, now: bool = False) -> None:
    """Become the actor of this window on every host that it holds, by the next term. Waits for one that is restoring.

    Raises ``StepFailed`` when a term is live and stays so, ``Superseded`` when another gave the hosts back.
    """
    # the program's copy on the host goes with the HOLD
    runner.installed.clear()
    for host in runner.experiment.hosts:
        _acquire(runner, host, now=now)
    if runner.given_back and not runner.terms:
        hosts = ", ".join(sorted(runner.given_back))
        raise Superseded(f"{hosts}: another actor restored this window and released it")


def _acquire(runner: Runner, host: str, *, now: bool) -> None:
    """Take the next term on one host. One that was given back as proved is left as it is, and one that is not held."""
    patience_ns = runner.now() + int((runner.experiment.waits.lease_s + longest_restore_s(runner)) * NS)
    while True:
        looked = look_at(runner, host)
        state = looked["state"]
        newest = state.get("newest")
        opening = any(one["mode"] == "hold" and one["window"] == runner.window for one in looked["steps"])
        if newest is None or (state.get("hold") or {}).get("window") != runner.window:
            last = state.get("last") or {}
            if last.get("window") == runner.window and last.get("state") == "released" and newest is None:
                runner.terms.pop(host, None)
                runner.view.lost.pop(host, None)
                runner.given_back.add(host)
                return
            if newest is not None and host in runner.terms:
                raise Superseded(f"{host}: it was given back, and another window holds it now")
            if host in runner.terms:
                raise StepFailed(
                    f"{host}: the HOLD's files are gone from {runner.experiment.hosts[host].state}, and nobody "
                    "gave it back: look at what serves and what runs there, then restart production by hand"
                )
            if newest is None and opening and runner.now() < patience_ns:
                # a killed runner's opener may be about to make the HOLD
                runner.pause(0.1)
                continue
            return
        term = int(newest["term"])
        payload = {"verbs": [{"verb": "take", "from": term, "actor": runner.actor, "now": now}]}
        rows = _take(runner, host, payload)
        if rows.get("ok"):
            runner.terms[host] = int(rows["term"])
            runner.view.lost.pop(host, None)
            runner.keep_lease(host)
            return
        if runner.now() > patience_ns:
            other = (rows.get("live") or {}).get("actor") or {}
            raise StepFailed(
                f"{host}: another actor restores this window ({other.get('kind', '?')} "
                f"pid {other.get('pid', '?')}), and its lease lives: wait for it, or take over with --now"
            )
        runner.pause(0.25)


def _take(runner: Runner, host: str, payload: dict[str, Any]) -> dict[str, Any]:
    # Not in the ledger: until it is taken, this evidence is another's.
    reply = runner._send(host, "play", payload, LOCK_WAIT_S + 10)
    rows = [json.loads(line) for line in reply.stdout.decode().splitlines() if line.startswith("{")]
    found: dict[str, Any] = next((row for row in rows if row.get("verb") == "take"), {"ok": False})
    return found


def longest_restore_s(runner: Runner) -> float:
    return (
        END_LIMIT_S + MEMORY_LIMIT_S + 2 * runner.experiment.production.start_limit_s + runner.experiment.waits.settle_s
    )


def look_at(runner: Runner, host: str) -> dict[str, Any]:
    """Read a host's state, whatever step it is: reading needs no right."""
    reply = runner._send(host, "look", {"ports": [runner.experiment.port(host)]}, 30)
    return runner._checked(host, "look", reply)[-1]


def _play(runner: Runner, step: Step, limit_s: float) -> dict[str, dict[str, Any]]:
    """Play an undo step on every host, and return its first verb's row by host. Whoever serves comes last.

    The verbs are those compiled; where there are none the host's own ``restore.json`` has them. A host that was given
    back as proved is only proved again.
    """
    rows: dict[str, dict[str, Any]] = {}
    for host in runner.experiment.ranks_first:
        if host in runner.given_back and step.name != "restore.prove":
            continue
        document = runner.documents.get(host)
        payload = {"step": step.name} if document is None else {"verbs": document["steps"][step.name]}
        rows[host] = runner.call(host, "play", payload, limit_s=limit_s)[0]
    return rows


def _as_owner(act: Act) -> Act:
    """An undo step whose actor has lost the HOLD, or loses it: it becomes the next actor, and does the step (again)."""

    def done(runner: Runner, step: Step) -> dict[str, Any]:
        while True:
            if runner.view.lost:
                acquire(runner)
            if runner.view.lost:
                host, reason = next(iter(runner.view.lost.items()))
                raise StepFailed(
                    f"{host}: there is no HOLD of this window to act under ({reason}): look at what serves "
                    "and what runs there, then bring production back by hand"
                )
            try:
                return act(runner, step)
            except HoldLost as error:
                runner.view.lost[error.host] = error.reason

    return done


def end(runner: Runner, step: Step) -> dict[str, Any]:
    """End all that this window started on every host, prove it gone and the memory back."""
    runner.view.leave("started", "ready")
    rows = _play(runner, step, END_LIMIT_S + MEMORY_LIMIT_S + LOCK_WAIT_S)
    return {host: {"ended": row.get("ended", [])} for host, row in rows.items()}


def start(runner: Runner, step: Step) -> dict[str, Any]:
    """Start production by its own command, as its owner declared it: every host is clear by now."""
    runner.view.leave("stopped")
    rows = _play(runner, step, runner.experiment.production.start_limit_s + LOCK_WAIT_S)
    return {host: _part(row, "pid", "already", "under_way") for host, row in rows.items()}


def prove(runner: Runner, step: Step) -> dict[str, Any]:
    """Prove production: identity, readiness and one generation on its hosts, then the greedy answers."""
    experiment = runner.experiment
    limit_s = experiment.production.start_limit_s + experiment.waits.settle_s + LOCK_WAIT_S
    for host in experiment.hosts:
        if host not in runner.documents and (host not in runner.terms or not runner.state.restorers):
            # Nothing was held, or this runner had compiled no restore yet: production was never touched, and must only
            # be seen to serve.
            runner.documents[host] = document(
                experiment, window=runner.window, host=host, production=None, log="/dev/null"
            )
    rows = _play(runner, step, limit_s)
    _record(runner, "proved")
    proved = {host: _part(row, "pid", "ready", "generation_s", "settled_s") for host, row in rows.items()}
    return {"proved": proved, "greedy": _greedy(runner)}


def _part(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names if name in row}


def _greedy(runner: Runner) -> str:
    """Compare production's greedy answers with the reference; a mismatch is asked again twice."""
    reference = runner.reference
    if runner.experiment.checks is None:
        return "not comparable: the experiment names no checks"
    if reference is None:
        return "not comparable: this window stopped before its reference"
    if not reference:
        return "not comparable: no greedy prompt agreed with itself on production"
    base = runner.endpoint(None)
    prompts = greedy_prompts(runner, base)
    same = 0
    for row in reference:
        number = int(row["prompt"])
        for turn in range(GREEDY_TRIES):
            name = f"restore/{runner.window}/{runner.state.restorers}/{number}/{turn}"
            found = ask_greedy(runner, base, number, prompts[number - 1], name)
            if found == row:
                same += 1
                break
    strangers = read_counters(runner, base) if same < len(reference) else None
    if strangers is not None and (strangers.running or strangers.waiting):
        # A batch with others may change an answer without any change of the server.
        return f"not comparable: strangers are being served ({same} of {len(reference)} the same)"
    if same < len(reference):
        raise StepFailed(
            f"production answers {same} of {len(reference)} greedy prompts as it did before the window: "
            "what runs now is not what ran then"
        )
    return f"{same} of {len(reference)}"


def _record(runner: Runner, state: str) -> None:
    for host in runner.terms:
        runner.play(host, [{"verb": "record", "state": state}], limit_s=30)


def close(runner: Runner, step: Step) -> dict[str, Any]:
    """Run the site's own last commands on production's host."""
    host = runner.experiment.production.host
    for argv in runner.experiment.site.close:
        reply = runner.site(host, argv)
        if reply.exit != 0:
            shown = "its end was not seen" if reply.exit is None else f"exit {reply.exit}"
            raise StepFailed(f"{host}: site.close: {argv[0]}: {shown}")
    return {"commands": len(runner.experiment.site.close)}


def look(runner: Runner, step: Step) -> dict[str, Any]:
    """Find nothing of this window; what is found is ended and reported."""
    found: dict[str, int] = {}
    for host in runner.experiment.hosts:
        marked = runner.call(host, "look", {"ports": [runner.experiment.port(host)]})[-1]["marked"]
        if marked:
            found[host] = len(marked)
            if host not in runner.terms:
                raise StepFailed(
                    f"{host}: pid {marked[0]['pid']} carries this window's mark, and it holds nothing there"
                )
            verb = {
                "verb": "end",
                "what": "window",
                "limit_s": END_LIMIT_S,
                "grace_s": runner.experiment.production.grace_s,
                "memory": memory(runner.experiment),
            }
            runner.play(host, [verb], limit_s=END_LIMIT_S + MEMORY_LIMIT_S + LOCK_WAIT_S)
    return {"found": found}


def switch_off(runner: Runner, step: Step) -> dict[str, Any]:
    """Keep what the dead-man's switch wrote, then remove it."""
    runner.view.leave("armed")
    for host in runner.terms:
        declared = runner.experiment.hosts[host]
        if declared.switch != "none":
            written = runner.fetch(host, f"{declared.state}/switch.log")
            if written:
                runner.keep("write", f"switch/{host}.jsonl", runner.secrets.clean(written.decode()).encode())
            runner.play(host, [{"verb": "off", "what": "switch"}], limit_s=LOCK_WAIT_S)
    return {}


def seal_and_release(runner: Runner, step: Step) -> dict[str, Any]:
    """Close the evidence with its hashes, then release the HOLD. The ledger's last record is ``release.begin``."""
    runner.last_look()
    try:
        write_summary(runner, read=runner.state.complete, restored=runner.accepted is None)
    except (OSError, FairtrialError) as error:
        # Production is proved: evidence that is damaged or gone keeps no host from being given back.
        report_unwritten("summary.json", error)
    runner.record("release.begin")
    runner.view.leave(*list(runner.view.phases))
    readers, runner.readers = runner.readers, {}
    for reader in readers.values():
        reader.close()
    runner.store.close()
    try:
        runner.seal = seal(runner.store)
    except OSError as error:
        # production is proved: a disk that takes no seal keeps no host from being given back
        report_unwritten("SHA256SUMS: this evidence has no seal", error)
    held = []
    for host in runner.experiment.hosts:
        try:
            if _holds(runner, host):
                held.append(host)
        except FairtrialError as error:
            runner.progress.say(f"  ! {host}: whether it is held was not seen: {error}; {_type_restore(runner)}")
    if not held:
        return {}
    # The release removes that copy, and the lease: a renewal on its way would make it again.
    if runner.store.exists("switch/host.pyz") or runner.state.restorers:
        runner.installed.clear()
    openers, runner.openers = runner.openers, {}
    for opener in openers.values():
        opener.close()
    for host in held:
        verb = {"verb": "off", "what": "hold", "seal": runner.seal}
        reply = runner._send(host, "play", {"verbs": [verb]}, LOCK_WAIT_S + 30)
        if reply.exit != 0:
            runner.progress.say(
                f"  ! {host}: the HOLD was not seen released (exit {reply.exit}); {_type_restore(runner)}"
            )
    return {}


def _type_restore(runner: Runner) -> str:
    return f"production is proved. Type: fairtrial restore {runner.out}"


def _holds(runner: Runner, host: str) -> bool:
    """Whether there is a HOLD to release; a hold whose answer was lost is found on its host."""
    state = look_at(runner, host)["state"]
    if state.get("newest") and (state.get("hold") or {}).get("window") == runner.window:
        runner.terms.setdefault(host, int(state["newest"]["term"]))
        return True
    return False


def not_restored(runner: Runner, step: Step) -> dict[str, Any]:
    """Production is not proved: keep the HOLD and the switches, say so everywhere, and what to type."""
    try:
        _record(runner, "down")
        write_summary(runner, read=False, restored=False)
    except (FairtrialError, Interrupted, HoldLost, OSError) as error:
        runner.progress.say(f"  ! this could not be written down: {error}")
    return {}


def accepting(reason: str) -> dict[str, Act]:
    """The acts of a restore that a person vouches for: end the arms, start nothing, look at what serves."""

    def nothing(runner: Runner, step: Step) -> dict[str, Any]:
        return {"accepted": reason}

    def observe(runner: Runner, step: Step) -> dict[str, Any]:
        host = runner.experiment.production.host
        found = look_at(runner, host)["ports"][str(runner.experiment.port(host))]["listeners"]
        observed = [{"pid": process["pid"], "start": process["start"]} for process in found]
        if runner.accepted is not None:
            runner.accepted["observed"] = observed
        return {"accepted": reason, "observed": observed}

    return {"restore.start": nothing, "restore.prove": observe, "restore.close": nothing}


ACTS = {
    **FORWARD,
    "restore.end": _as_owner(end),
    "restore.start": _as_owner(start),
    "restore.prove": _as_owner(prove),
    "restore.close": _as_owner(close),
    "look": _as_owner(look),
    "switch.off": _as_owner(switch_off),
    "seal": seal_and_release,
    "release": seal_and_release,
    "not restored": not_restored,
}
