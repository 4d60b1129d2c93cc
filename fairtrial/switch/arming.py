"""Verbs about the dead-man's switch: install it, see it alive, arm it, end it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from . import procs
from .actor import Actor
from .spawn import spawn
from .state import Failed, Json, State, canonical, hostname, read_block

ANSWER_S = 5.0
END_S = 5.0


def switches(state: State) -> list[Json]:
    """Return the switches that run on a state folder."""
    return [one for one in procs.steps(state.folder) if one["mode"] == "switch"]


def program() -> str:
    """Return the path of the zip that this program runs from."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def copy_program(state: State) -> None:
    """Copy this program into the state folder, compiled for this interpreter: a verb then starts in half the time.

    The sources stay in it, for any other interpreter.
    """
    if program() == state.path("host.pyz"):
        return
    import io
    import marshal
    import zipfile
    from importlib.util import MAGIC_NUMBER, source_hash

    buffer = io.BytesIO()
    with zipfile.ZipFile(program()) as source, zipfile.ZipFile(buffer, "w") as copy:
        for name in source.namelist():
            if not name.endswith(".py"):
                continue
            content = source.read(name)
            copy.writestr(name, content)
            if name.startswith("switch/"):
                code = compile(content, f"host.pyz/{name}", "exec", dont_inherit=True)
                # flag 1: a compiled file that is not checked against its source again
                header = MAGIC_NUMBER + (1).to_bytes(4, "little") + source_hash(content)
                copy.writestr(name + "c", header + marshal.dumps(code))
    state.write("host.pyz", buffer.getvalue())


def install(actor: Actor, args: Json) -> Json:
    """Write ``restore`` (the whole restore.json object) and start the switch, not armed.

    ``switch`` false: write it, and start nothing. The result's ``restore_sha256`` is of the object's canonical JSON.
    One that runs with the same restore is left.
    """
    import hashlib

    state = actor.state
    content = canonical(args["restore"])
    told = hashlib.sha256(content).hexdigest()
    with actor.locked():
        if args.get("switch") is False:
            # no dead-man restore on this host: but whoever comes to restore must know what is to be started
            state.write("restore.json", content, 0o600)
            return {"restore_sha256": told}
        beat = read_block(state.path("beat")) or {}
        running = switches(state)
        if len(running) == 1 and beat.get("pid") == running[0]["pid"] and beat.get("restore_sha256") == told:
            return {"already": True, "pid": beat["pid"], "start": beat["start"], "restore_sha256": told}
        state.remove("switch.json")
        _end(actor, running)
        copy_program(state)
        state.write("restore.json", content, 0o600)
        argv = [sys.executable, "-S", "-E", state.path("host.pyz"), "switch"]
        argv += ["--state", state.folder, "--window", state.window]
        environ = {"PATH": os.environ.get("PATH", os.defpath)}
        pid, start, trouble = spawn(argv, environ, "/", state.path("switch.log"))
    result: Json = {"pid": pid, "start": start, "restore_sha256": told}
    return result | ({"unwritten": trouble} if trouble else {})


def ask(actor: Actor, args: Json) -> Json:
    """Have the switch answer ``nonce`` in its beat, with the hash of the restore that it holds in memory."""
    with actor.locked():
        actor.state.write("ask.json", canonical({"nonce": args["nonce"]}))
    beat = _answer(actor, "nonce", args["nonce"])
    return {key: beat[key] for key in ("nonce", "restore_sha256", "pid", "start", "armed")}


def arm(actor: Actor, args: Json) -> Json:
    """Arm the switch, and wait until its beat says so."""
    with actor.locked():
        actor.state.write("switch.json", canonical({"armed": True, "window": actor.state.window}))
    beat = _answer(actor, "armed", True)
    return {"armed": True, "pid": beat["pid"], "start": beat["start"]}


def _answer(actor: Actor, key: str, value: object) -> Json:
    until = time.monotonic() + ANSWER_S
    while True:
        beat = read_block(actor.state.path("beat"))
        if beat and beat.get(key) == value and procs.alive(beat["pid"], beat["start"]):
            return beat
        if time.monotonic() > until:
            raise Failed(
                f"the switch of {actor.state.folder} on {hostname()} did not answer within {ANSWER_S:.0f} s ({key}); "
                "read switch.log there; production must not be stopped without it",
                beat=beat,
            )
        actor.pause()


def off_switch(actor: Actor, args: Json) -> Json:
    """Disarm the switch, end it, prove it gone, remove its files. ``log`` in the result is what it wrote."""
    state = actor.state
    with actor.locked():
        state.remove("switch.json")
        ended = switches(state)
        _end(actor, ended)
        log = _log(state)
        for name in ("ask.json", "beat", "switch.log"):
            state.remove(name)
        state.sync()
    return {"ended": ended, "log": log}


def _end(actor: Actor, running: list[Json]) -> None:
    until = time.monotonic() + END_S
    for one in running:
        procs.send(one["pid"], one["start"], signal.SIGTERM)
    while any(procs.alive(one["pid"], one["start"]) for one in running):
        left_s = until - time.monotonic()
        for one in running:
            if left_s < END_S / 2:
                procs.send(one["pid"], one["start"], signal.SIGKILL)
        if left_s < 0:
            raise Failed(
                f"the switch on {hostname()} (pid {running[0]['pid']}) does not end after SIGKILL",
                left=running,
            )
        actor.pause()


def _log(state: State) -> list[Json]:
    try:
        with open(state.path("switch.log"), encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()[-500:]
    except OSError:
        return []
    found: list[Json] = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append({"text": line})
    return found
