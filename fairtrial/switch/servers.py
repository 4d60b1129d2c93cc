"""Verbs about servers: end them and prove them gone, start one, prove that the right one serves."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from . import procs
from .actor import LOCK_S, Actor
from .procs import Key, Stat
from .state import Failed, Json, Usage, canonical, hostname, utc

GIB = 1 << 30


def end(actor: Actor, args: Json) -> Json:
    """End processes with all that they lead, prove them gone, the port free and the memory back.

    ``args``: ``what`` "window" (everything with this window's mark, or whose arguments fit ``patterns``), "processes"
    (``processes`` [[pid, start], ...]) or "steps" (this window's openers, readers and plays); ``spare`` [[pid, start],
    ...]; ``grace_s`` from SIGTERM to SIGKILL; ``limit_s`` (at most 90: the lock is held); ``port`` that must be free
    after; ``idle`` {port, path, names} looked at just before the first signal; ``memory`` {from_b, floor_b, limit_s,
    still_s, still_b}, waited for without the lock, where what was ended held ``from_b`` (1 GiB) or more.
    """
    before = procs.memory()["available_b"]
    with actor.locked():
        began = time.monotonic()
        find = _finder(args, actor.state.folder, actor.state.window)
        found = find()
        held = procs.held_b(found.values())
        ended = [procs.shown(one) for one in found.values()]
        if found:
            _refuse_busy(actor, args.get("idle"))
        unwritten = _enter(actor, ending=[one.key for one in found.values()]) if found else []
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


def _finder(args: Json, folder: str, window: str) -> Callable[[], dict[int, Stat]]:
    what = args.get("what")
    if what not in ("window", "processes", "steps"):
        raise Usage('end: what must be "window", "processes" or "steps"')
    spare = {(pid, start) for pid, start in args.get("spare") or []}
    listed = {(pid, start) for pid, start in args.get("processes") or []}
    seen: set[Key] = set(listed)

    def find() -> dict[int, Stat]:
        running = procs.table()
        if what == "steps":
            return _steps(folder, window, spare, running)
        if what == "window":
            found = procs.marked(window, args.get("patterns") or [])
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
            if rule.get("floor_b") is not None and now_b >= rule["floor_b"]:
                return result
            raise Failed(
                f"what was ended on {hostname()} held {held >> 20} MiB, and only {(now_b - before) >> 20} MiB came "
                f"back within {limit_s:.0f} s; see what holds memory there, then try again",
                memory=result,
            )
        actor.pause(0.1)


def _enter(actor: Actor, *, started: Json | None = None, ending: Iterable[Key] | None = None) -> list[str]:
    """Write start.json before the deed; a full disk is reported and stops nothing."""
    record = actor.state.begun()
    if started is not None:
        kept = [one for one in record["started"] if one["what"] != started["what"]]
        record["started"] = [*kept, started]
    if ending is not None:
        record["ending"] = [list(key) for key in ending]
    try:
        actor.state.write("start.json", canonical({"schema": "fairtrial.start/1", **record}) + b"\n")
    except OSError as error:
        return [f"start.json: {error}"]
    return []


def start(actor: Actor, args: Json) -> Json:
    """Start a server detached, in a session of its own, unless it runs or is under way.

    ``args``: ``what`` "arm" (gets the window's mark) or "production" (exactly ``environ``), ``argv``, ``environ``,
    ``cwd``, ``log``, ``port``, ``limit_s``; for production also ``was`` [[pid, start], ...], the processes that served
    before the window: what a broken stop left of them is ended first. While anything else listens on the port it is
    not started: ``Failed`` with ``waiting_for``; production waits for it, without the lock, up to ``limit_s``.
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
    listening = procs.listens(args["port"])
    heard = procs.listeners(args["port"]) if listening else []
    ours = [one for one in heard if _is(one, args) and _environ_fits(one, args, environ)]
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
        if led and _is(candidate, args) and procs.environ(candidate.pid) == environ:
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

    pid, began, trouble = spawn(args["argv"], environ, args["cwd"], args.get("log"), entered)
    unwritten += trouble
    result: Json = {"started": True, "pid": pid, "start": began}
    return [], result | ({"unwritten": unwritten} if unwritten else {})


def _argv_sha256(args: Json) -> str:
    return hashlib.sha256(canonical([args["argv"], args["cwd"]])).hexdigest()


def _is(one: Stat, args: Json) -> bool:
    words = procs.argv(one.pid)
    return words == list(args["argv"]) and procs.link(one.pid, "cwd") == os.path.realpath(args["cwd"])


def _environ_fits(one: Stat, args: Json, environ: dict[str, str]) -> bool:
    found = procs.environ(one.pid) or {}
    return found == environ if args["what"] == "arm" else procs.MARK not in found


def _finish_ending(actor: Actor, args: Json, ending: list[Key]) -> None:
    """End what a killed step had begun to end: it may serve for seconds more, and then be gone."""
    begun = [(pid, began) for pid, began in ending if procs.alive(pid, began)]
    if not any(_is(one, args) for one in procs.listeners(args["port"])):
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


def prove(actor: Actor, args: Json) -> Json:
    """Prove that the right process serves, and goes on serving. Changes nothing, needs no lock.

    ``args``: ``port``; ``argv``, ``cwd``, ``environ`` or ``environ_sha256`` (of its canonical JSON): of these three,
    what is not given is not compared; ``ready`` (path, or null), ``generation`` {path, body} or null, ``headers``,
    ``settle_s`` in which it serves without a break and nothing with the window's mark runs, ``limit_s`` for all of
    it. Raises ``Failed``, which says what was seen last.
    """
    from .asking import Unanswered

    until = time.monotonic() + float(args["limit_s"])
    while True:
        try:
            return _proved(actor, args, until)
        except (NotYet, Unanswered) as error:
            if time.monotonic() > until:
                raise Failed(
                    f"what should serve on port {args['port']} of {hostname()} was not proved within "
                    f"{float(args['limit_s']):.0f} s: {error}",
                ) from None
        actor.pause(0.1)


class NotYet(Exception):
    """Something that may still come true has not yet."""


def _proved(actor: Actor, args: Json, until: float) -> Json:
    from .asking import exchange, finished

    port = args["port"]
    heard = procs.listeners(port)
    if not heard:
        _fail_if_dead(actor, args)
        raise NotYet("nothing listens there")
    one = heard[0]
    differs = [] if args.get("argv") in (None, procs.argv(one.pid)) else ["arguments"]
    if args.get("cwd") is not None and procs.link(one.pid, "cwd") != os.path.realpath(args["cwd"]):
        differs.append("working directory")
    wanted = args.get("environ_sha256")
    if wanted is None and args.get("environ") is not None:
        wanted = environ_sha256(args["environ"])
    if wanted is not None and environ_sha256(procs.environ(one.pid) or {}) != wanted:
        differs.append("environment")
    if differs:
        raise NotYet(f"pid {one.pid} listens, whose {', '.join(differs)} are not production's")
    host = args.get("host") or procs.address(port)
    headers = args.get("headers")
    observed: Json = {"pid": one.pid, "start": one.start}
    began = time.monotonic()
    if args.get("ready"):
        left_s = max(until - time.monotonic(), 0.1)
        status, _ = exchange(host, port, args["ready"], headers=headers, limit_s=min(left_s, 10), tick=actor.tick)
        if status != 200:
            raise NotYet(f"{args['ready']} answered {status}")
        observed["ready"] = status
    generation = args.get("generation")
    if generation:
        left_s = max(until - time.monotonic(), 0.1)
        path, body = generation["path"], generation["body"]
        status, content = exchange(host, port, path, body=body, headers=headers, limit_s=left_s, tick=actor.tick)
        if status != 200 or not finished(content):
            raise NotYet(f"{path} answered {status}, without a whole generation")
        observed["generation_s"] = round(time.monotonic() - began, 3)
    settled = time.monotonic() + float(args.get("settle_s", 10))
    while True:
        # the look comes before the clock: the last look lies at or after the end of the settle time
        now = time.monotonic()
        if not any(found.key == one.key for found in procs.listeners(port)):
            raise NotYet(f"pid {one.pid} stopped serving within the settle time")
        marked = procs.marked(actor.state.window, args.get("patterns") or [])
        if marked:
            some = procs.named(procs.shown(next(iter(marked.values()))))
            raise NotYet(f"{some} of window {actor.state.window} runs")
        if now >= settled:
            return observed | {"settled_s": float(args.get("settle_s", 10))}
        actor.pause(min(0.25, max(settled - now, 0.01)))


def _fail_if_dead(actor: Actor, args: Json) -> None:
    entries = [one for one in actor.state.begun()["started"] if one["what"] == "production"]
    if not entries or any(procs.alive(one["pid"], one["start"]) for one in entries):
        return
    if args.get("argv") is None or any(_is(one, args) for one in procs.table().values()):
        return
    raise Failed(
        f"pid {entries[-1]['pid']}, which was started to serve on port {args['port']} of {hostname()}, is gone; "
        "read its log, then start it again",
        dead=entries[-1],
    )


def environ_sha256(environ: dict[str, str]) -> str:
    """Return the hash that stands for an environment: SHA-256 of its canonical JSON."""
    return hashlib.sha256(canonical(environ)).hexdigest()
