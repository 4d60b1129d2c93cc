"""The verb that proves that the right server serves, and goes on serving."""

from __future__ import annotations

import hashlib
import os
import time

from . import procs, setting
from .actor import Actor
from .servers import runs_as
from .state import Failed, Json, canonical, hostname


def prove(actor: Actor, args: Json) -> Json:
    """Prove that the right process serves, and goes on serving. Changes nothing, needs no lock.

    ``args``: ``port``; ``argv``, ``cwd``, ``exe``, ``uid``, ``process`` {limits, affinity, nice}, ``environ`` or
    ``environ_sha256`` (of its canonical JSON): of these what is not given is not compared; ``ready`` (path, or null),
    ``generation`` {path, body} or null, ``headers``,
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
    if args.get("exe") not in (None, procs.link(one.pid, "exe")):
        differs.append("program")
    if args.get("uid") not in (None, procs.shown(one)["uid"]):
        differs.append("user")
    if args.get("process") is not None:
        differs += _unlike(args["process"], setting.of(one.pid))
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


def _unlike(wanted: Json, found: Json) -> list[str]:
    names = [name for name, limit in sorted(wanted["limits"].items()) if found["limits"].get(name) != limit]
    return names + [name for name in ("affinity", "nice") if found[name] != wanted[name]]


def _fail_if_dead(actor: Actor, args: Json) -> None:
    entries = [one for one in actor.state.begun()["started"] if one["what"] == "production"]
    if not entries or any(procs.alive(one["pid"], one["start"]) for one in entries):
        return
    if args.get("argv") is None or any(runs_as(one, args) for one in procs.table().values()):
        return
    raise Failed(
        f"pid {entries[-1]['pid']}, which was started to serve on port {args['port']} of {hostname()}, is gone; "
        "read its log, then start it again",
        dead=entries[-1],
    )


def environ_sha256(environ: dict[str, str]) -> str:
    """Return the hash that stands for an environment: SHA-256 of its canonical JSON."""
    return hashlib.sha256(canonical(environ)).hexdigest()
