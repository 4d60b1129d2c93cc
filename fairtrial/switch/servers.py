"""Verbs about servers: end them and prove them gone, start one."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from . import procs
from .actor import LOCK_S, Actor
from .procs import Key, Stat
from .state import Failed, Json, State, Usage, canonical, hostname, utc

GIB = 1 << 30


def end(actor: Actor, args: Json) -> Json:
    """End processes with all that they lead, prove them gone, the port free and the memory back.

    ``args``: ``what`` "window" (everything with this window's mark, or whose arguments fit ``patterns``, and what the
    arm in start.json leads, or an end that was cut short had named, with or without the mark), "processes"
    (``processes`` [[pid, start], ...], which are ``of`` "arm" or "production") or "steps" (this window's openers,
    readers and plays); ``spare`` [[pid, start], ...]; ``grace_s`` from SIGTERM to SIGKILL; ``limit_s`` (at most 90:
    the lock is held); ``port`` that must be free after; ``idle`` {port, path, names} looked at just before the first
    signal; ``memory`` {from_b, floor_b, production_b, limit_s, still_s, still_b}, waited for without the lock, where
    what was ended held ``from_b`` (1 GiB) or more: back, or, where there is a floor, enough for it and production.
    """
    before = procs.memory()["available_b"]
    with actor.locked():
        began = time.monotonic()
        find = _finder(args, actor.state)
        found = find()
        held = procs.held_b(found.values())
        ended = [procs.shown(one) for one in found.values()]
        if found:
            _refuse_busy(actor, args.get("idle"))
        of = "window" if args["what"] == "window" else args.get("of")
        unwritten = _enter(actor, ending=[one.key for one in found.values()], of=of) if found else []
        until = began + min(float(args.get("limit_s", LOCK_S)), LOCK_S)
        _end_all(actor, find, float(args.get("grace_s", 10)), until)
        took_s = time.monotonic() - began
        if found:
            unwritten += _enter(actor, ending=[])
    result: Json = {"ended": ended, "took_s": round(took_s, 3), "held_b": held}
    port = args.get("port")
    if port is not None and procs.listens(port):
        others = [procs.shown(one) for one in procs.listeners(port)]
        raise Failed(
            f"port {port} on {hostname()} is still listened on by "
            f"{', '.join(map(procs.named, others)) or 'a process that cannot be seen'}; end it, then try again",
            listeners=others,
            **result,
        )
    rule = args.get("memory")
    if rule and held >= int(rule.get("from_b", GIB)):
        result["memory"] = _memory_back(actor, rule, before, held)
    return result | ({"unwritten": unwritten} if unwritten else {})


def _finder(args: Json, state: State) -> Callable[[], dict[int, Stat]]:
    what = args.get("what")
    if what not in ("window", "processes", "steps"):
        raise Usage('end: what must be "window", "processes" or "steps"')
    spare = {(pid, start) for pid, start in args.get("spare") or []}
    listed = {(pid, start) for pid, start in args.get("processes") or []}
    seen: set[Key] = set(listed)
    if what == "window":
        # a server may overwrite its own environment, mark and all: what its records name, and that leads, is known
        record = state.begun()
        seen.update((one["pid"], one["start"]) for one in record["started"] if one["what"] == "arm")
        if record["ending_of"] in ("window", "arm"):
            seen.update((pid, start) for pid, start in record["ending"])
        seen -= spare

    def find() -> dict[int, Stat]:
        running = procs.table()
        if what == "steps":
            return _steps(state.folder, state.window, spare, running)
        if what == "window":
            found = procs.marked(state.window, args.get("patterns") or [])
            seen.update(one.key for one in found.values())
        return _targets(seen, spare, running)

    return find


def _steps(folder: str, window: str, spare: set[Key], running: dict[int, Stat]) -> dict[int, Stat]:
    above = procs.ancestors()
    found = [one for one in procs.steps(folder) if one["mode"] != "switch" and one["window"] == window]
    keys = {(one["pid"], one["start"]) for one in found if one["pid"] not in above} - spare
    return {pid: running[pid] for pid, start in keys if pid in running and running[pid].start == start}


def _targets(seen: set[Key], spare: set[Key], running: dict[int, Stat]) -> dict[int, Stat]:
    above = procs.ancestors()
    found = {
        pid: one
        for pid, one in procs.tree(seen, running).items()
        if pid not in above and pid != 1 and one.key not in spare and procs.step(procs.argv(pid)) is None
    }
    seen.update(one.key for one in found.values())
    return found


def _end_all(actor: Actor, find: Callable[[], dict[int, Stat]], grace_s: float, until: float) -> None:
    asked: dict[Key, float] = {}
    clean = 0
    while True:
        actor.fence()
        found = find()
        clean = clean + 1 if not found else 0
        # a process is without mark and arguments for an instant while it is exec'd: one empty look proves nothing
        if clean == 2:
            return
        now = time.monotonic()
        if found and now > until:
            left = [procs.shown(one) for one in found.values()]
            raise Failed(
                f"still alive on {hostname()} after SIGTERM and SIGKILL: {', '.join(map(procs.named, left))}; "
                "see why (ps -o pid,stat,wchan), end it, then try again",
                left=left,
            )
        for one in found.values():
            first = asked.setdefault(one.key, now)
            if first == now:
                procs.send(*one.key, signal.SIGTERM)
                procs.send(*one.key, signal.SIGCONT)
            elif now - first >= grace_s:
                procs.send(*one.key, signal.SIGKILL)
        actor.pause()


def _refuse_busy(actor: Actor, idle: Json | None) -> None:
    if not idle or not procs.listens(idle["port"]):
        return
    from .asking import Unanswered, demand, exchange

    host, path = idle.get("host") or procs.address(idle["port"]), idle.get("path", "/metrics")
    try:
        status, content = exchange(host, idle["port"], path, headers=idle.get("headers"), limit_s=5, tick=actor.tick)
        seen = demand(content, idle["names"]) if status == 200 else {}
        why = "" if status == 200 else f"{path} answered {status}"
    except Unanswered as error:
        seen, why = {}, str(error)
    absent = [group for group in idle["names"] if seen.get(group) is None]
    if absent or any(seen.values()):
        why = why or (f"no metric for {', '.join(absent)}" if absent else "requests are running or waiting")
        raise Failed(
            f"what listens on port {idle['port']} of {hostname()} is not idle ({why}); nothing was ended: "
            "wait until it is, then try again",
            busy=seen or True,
        )


def _memory_back(actor: Actor, rule: Json, before: int, held: int) -> Json:
    began = time.monotonic()
    limit_s, still_s = float(rule.get("limit_s", 120)), float(rule.get("still_s", 5))
    still_b = int(rule.get("still_b", 256 << 20))
    low = high = now_b = procs.memory()["available_b"]
    since = began
    while True:
        # without the lock, it may have been given back meanwhile
        actor.fence()
        now = time.monotonic()
        now_b = procs.memory()["available_b"]
        low, high = min(low, now_b), max(high, now_b)
        if high - low > still_b:
            low = high = now_b
            since = now
        back = now_b - before >= 0.9 * held and now - since >= still_s
        result = {"back": back, "before_b": before, "available_b": now_b, "waited_s": round(now - began, 3)}
        if back:
            return result
        if now - began > limit_s:
            floor_b = rule.get("floor_b")
            if floor_b is not None and now_b >= floor_b + int(rule.get("production_b", 0)):
                return result
            raise Failed(
                f"what was ended on {hostname()} held {held >> 20} MiB, and only {(now_b - before) >> 20} MiB came "
                f"back within {limit_s:.0f} s; see what holds memory there, then try again",
                memory=result,
            )
        actor.pause(0.1)


def _enter(
    actor: Actor, *, started: Json | None = None, ending: Iterable[Key] | None = None, of: str | None = None
) -> list[str]:
    """Write start.json before the deed; a full disk is reported and stops nothing."""
    record = actor.state.begun()
    if started is not None:
        kept = [one for one in record["started"] if one["what"] != started["what"]]
        record["started"] = [*kept, started]
    if ending is not None:
        record["ending"] = [list(key) for key in ending]
        record["ending_of"] = of
    try:
        actor.state.write("start.json", canonical({"schema": "fairtrial.start/1", **record}) + b"\n")
    except OSError as error:
        return [f"start.json: {error}"]
    return []


def start(actor: Actor, args: Json) -> Json:
    """Start a server detached, in a session of its own, unless it runs or is under way.

    ``args``: ``what`` "arm" (gets the window's mark) or "production" (exactly ``environ``), ``argv``, ``environ``,
    ``cwd``, ``log``, ``port``, ``limit_s``, ``process`` {limits, affinity, nice}, given to it before it runs; for
    production also ``was`` [[pid, start], ...], the processes that served before the window: what a broken stop left
    of them is ended first. While anything else listens on the port it is not started: ``Failed`` with
    ``waiting_for``; production waits for it, without the lock, up to ``limit_s``.
    """
    if args.get("what") not in ("arm", "production"):
        raise Usage('start: what must be "arm" or "production"')
    environ = dict(args["environ"])
    if args["what"] == "arm":
        environ[procs.MARK] = actor.state.window
    until = time.monotonic() + float(args.get("limit_s", 0))
    while True:
        with actor.locked():
            others, result = _try_start(actor, args, environ)
        if not others:
            return result
        if args["what"] == "arm" or time.monotonic() > until:
            raise Failed(
                f"port {args['port']} on {hostname()} is listened on by {', '.join(map(procs.named, others))}, "
                f"which is not the {args['what']} to be started; end it, then try again",
                waiting_for=others,
            )
        actor.pause(0.2)


def _try_start(actor: Actor, args: Json, environ: dict[str, str]) -> tuple[list[Json], Json]:
    record = actor.state.begun()
    if args["what"] == "production":
        _finish_ending(actor, args, record["ending"])
        marked = procs.marked(actor.state.window)
        if marked:
            # an end that only said so: production never runs beside what it makes room for
            left = [procs.shown(one) for one in marked.values()]
            raise Failed(
                f"{', '.join(map(procs.named, left))} of this window still runs on {hostname()}: production is not "
                "started beside it; end it, then try again",
                left=left,
            )
    listening = procs.listens(args["port"])
    heard = procs.listeners(args["port"]) if listening else []
    ours = [one for one in heard if runs_as(one, args) and _environ_fits(one, args, environ)]
    if ours:
        return [], {"already": True, "pid": ours[0].pid, "start": ours[0].start}
    if listening:
        unseen: Json = {"pid": None, "argv": []}
        return [procs.shown(one) for one in heard] or [unseen], {}
    for one in record["started"]:
        same = one["what"] == args["what"] and one.get("argv_sha256") == _argv_sha256(args)
        if same and procs.alive(one["pid"], one["start"]):
            return [], {"under_way": True, "pid": one["pid"], "start": one["start"]}
    running = procs.table()
    for candidate in running.values():
        # a forked child has its parent's arguments and environment: only one whose group has its leader counts
        led = candidate.pgid in running
        if led and runs_as(candidate, args) and procs.environ(candidate.pid) == environ:
            return [], {"under_way": True, "pid": candidate.pid, "start": candidate.start}
    unwritten: list[str] = []

    def entered(pid: int, began: int) -> None:
        entry = {
            "what": args["what"],
            "pid": pid,
            "start": began,
            "at": utc(),
            "argv_sha256": _argv_sha256(args),
        }
        unwritten.extend(_enter(actor, started=entry))

    from .spawn import spawn

    pid, began, trouble = spawn(args["argv"], environ, args["cwd"], args.get("log"), entered, args.get("process"))
    unwritten += trouble
    result: Json = {"started": True, "pid": pid, "start": began}
    return [], result | ({"unwritten": unwritten} if unwritten else {})


def _argv_sha256(args: Json) -> str:
    return hashlib.sha256(canonical([args["argv"], args["cwd"]])).hexdigest()


def runs_as(one: Stat, args: Json) -> bool:
    """Whether a process has the arguments and the working folder that are given."""
    words = procs.argv(one.pid)
    return words == list(args["argv"]) and procs.link(one.pid, "cwd") == os.path.realpath(args["cwd"])


def _environ_fits(one: Stat, args: Json, environ: dict[str, str]) -> bool:
    found = procs.environ(one.pid) or {}
    return found == environ if args["what"] == "arm" else procs.MARK not in found


def _finish_ending(actor: Actor, args: Json, ending: list[Key]) -> None:
    """End what a killed step had begun to end: it may serve for seconds more, and then be gone."""
    begun = [(pid, began) for pid, began in ending if procs.alive(pid, began)]
    if not any(runs_as(one, args) for one in procs.listeners(args["port"])):
        begun += [(pid, began) for pid, began in args.get("was") or [] if procs.alive(pid, began)]
    if not begun:
        return
    seen = set(begun)
    _end_all(
        actor,
        lambda: _targets(seen, set(), procs.table()),
        float(args.get("grace_s", 10)),
        time.monotonic() + LOCK_S / 2,
    )
