"""Play a list of verbs for one actor, one result line a verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .actor import LOCK_S, Actor
from .state import Failed, Json, State, Usage, hostname

Emit = Callable[[Json], None]
Verb = Callable[[Actor, Json], Json]

READ_ONLY = ("prove", "policy")
VERBS = (*READ_ONLY, "take", "lease", "record", "end", "start", "install", "ask", "arm", "off")


def policy(actor: Actor, args: Json) -> Json:
    """Say that a plain process has no restart policy to put back."""
    return {"policy": None, "reason": "a process has no restart policy"}


def off(actor: Actor, args: Json) -> Json:
    """End the switch, or release the hold: ``what`` "switch" or "hold"."""
    from . import arming, terms

    ways: dict[Any, Verb] = {"switch": arming.off_switch, "hold": terms.off_hold}
    if args.get("what") not in ways:
        raise Usage('off: what must be "switch" or "hold"')
    return ways[args["what"]](actor, args)


def verb(name: str) -> Verb:
    """Return a verb by its name."""
    if name == "policy":
        return policy
    if name == "off":
        return off
    if name in ("take", "lease", "record"):
        from . import terms

        return {"take": terms.take, "lease": terms.lease, "record": terms.record}[name]
    if name in ("install", "ask", "arm"):
        from . import arming

        return {"install": arming.install, "ask": arming.ask, "arm": arming.arm}[name]
    if name == "prove":
        from .proving import prove

        return prove
    from . import servers

    return {"end": servers.end, "start": servers.start}[name]


def perform(actor: Actor, args: Json) -> Json:
    """Do one verb and return its result line. Raises ``Failed``; a refusal of the kernel is one too."""
    try:
        result = verb(args["verb"])(actor, args)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise Failed(f"{args['verb']} on {hostname()}: {error.strerror or type(error).__name__}{where}") from error
    return {"verb": args["verb"], "what": args.get("what"), "ok": True, **result}


def chosen(state: State, args: Json) -> list[Json]:
    """Return the verbs to play: ``verbs``, or those of ``step`` in restore.json."""
    verbs: Any = args.get("verbs")
    if "step" in args:
        restore = state.read("restore.json")
        if restore is None:
            raise Failed(f"{state.path('restore.json')} on {hostname()} is missing or damaged; give the verbs instead")
        verbs = restore["steps"].get(args["step"])
    if not isinstance(verbs, list):
        raise Usage("play: give verbs (a list), or step (one of restore.json)")
    for one in verbs:
        if not isinstance(one, dict) or one.get("verb") not in VERBS:
            raise Usage(f"play: every verb is an object whose verb is one of {', '.join(VERBS)}")
    return verbs


def play(state: State, term: int, args: Json, emit: Emit) -> Json:
    """Play verbs in order and return the last line. Raises what the first failing verb raises, after its line."""
    verbs = chosen(state, args)
    if any(one["verb"] not in READ_ONLY for one in verbs):
        state.trust()
    actor = Actor(state, term, float(args.get("lock_limit_s", LOCK_S)))
    for one in verbs:
        try:
            emit(perform(actor, one))
        except Failed as error:
            emit(
                {
                    "verb": one["verb"],
                    "what": one.get("what"),
                    "ok": False,
                    "message": str(error),
                    **error.fields,
                }
            )
            raise
    return {"ok": True, "term": actor.term}
