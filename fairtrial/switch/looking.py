"""Read-only: how a host stands, what a process is, and the samples that the guards watch."""

from __future__ import annotations

import hashlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterable

from . import procs, setting
from .procs import Stat
from .state import Failed, Json, Lease, State, boot_id, boottime_ns, hostname, read_block

Emit = Callable[[Json], None]


def look(state: State, args: Json) -> Json:
    """Return what a window decides by. ``args``: ``ports`` [int, ...], ``patterns`` [regex on arguments, ...]."""
    return {
        "ok": True,
        "host": {
            "hostname": hostname(),
            "boot_id": boot_id(),
            "time_s": time.time(),
            "boottime_ns": boottime_ns(),
            "python": sys.version.split()[0],
            "uid": os.geteuid(),
            "kernel": os.uname().release,
            "cgroup": setting.cgroup("self"),
            "process": setting.of(os.getpid()),
        },
        "memory": procs.memory(),
        "ports": procs.ports(args.get("ports") or []),
        "marked": _shown(procs.marked(state.window, args.get("patterns") or []).values()),
        "window_marked": _shown(procs.marked(None).values()),
        "steps": procs.steps(state.folder),
        "state": stand(state),
    }


def _shown(found: Iterable[Stat]) -> list[Json]:
    return [procs.shown(one) for one in found]


def stand(state: State) -> Json:
    """Return what the files of a state folder say."""
    nothing: Json = {
        "exists": True,
        "trusted": False,
        "why": None,
        "hold": None,
        "terms": [],
        "newest": None,
        "lease": _lease(None),
        "start": None,
        "last": None,
        "switch": {"beat_age_s": None, "armed": False, "alive": False, "pid": None},
        "restore_sha256": None,
        "locked": False,
    }
    try:
        why = state.distrust()
    except FileNotFoundError:
        return nothing | {"exists": False}
    if why is not None:
        return nothing | {"why": why}
    newest = state.newest()
    return nothing | {
        "trusted": True,
        "hold": state.read(newest[1]) if newest else None,
        "terms": [term for term, _ in state.terms()],
        "newest": {"term": newest[0], "name": newest[1], "age_s": _age_s(state.path(newest[1]))} if newest else None,
        "lease": _lease(state.lease()),
        "start": state.read("start.json"),
        "last": state.read("last.json"),
        "switch": _switch(state),
        "restore_sha256": _sha256(state.path("restore.json")),
        "locked": bool(procs.lockers(state.path("lock"))),
    }


def _lease(lease: Lease | None) -> Json:
    return {
        "readable": lease is not None,
        "term": lease.term if lease else None,
        "live": lease.live if lease else False,
        "left_s": round(lease.left_s, 3) if lease else None,
        "lease_s": lease.lease_s if lease else None,
        "actor": lease.actor if lease else None,
    }


def _age_s(path: str) -> float | None:
    try:
        return round(time.time() - os.stat(path, follow_symlinks=False).st_ctime, 3)
    except FileNotFoundError:
        return None


def _sha256(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


def _switch(state: State) -> Json:
    beat = read_block(state.path("beat"))
    if beat is None:
        return {"beat_age_s": None, "armed": False, "alive": False, "pid": None}
    return {
        "beat_age_s": round((boottime_ns() - beat["at_ns"]) / 1e9, 3),
        "armed": beat["armed"],
        "alive": procs.alive(beat["pid"], beat["start"]),
        "pid": beat["pid"],
    }


def inspect(args: Json) -> Json:
    """Return one process's whole identity and tree. ``args``: ``pid``, or ``port`` (the first that listens there);
    ``log``: where its output is to go once it is started again (none: where it goes now).

    ``process`` is what it runs under, ``ungivable`` what of that a child of this program cannot be given,
    ``startable`` null, or why it cannot be started again; ``log`` the one file that its output and errors go to
    then, or null and ``log_why``.
    """
    if "pid" in args:
        one = procs.stat(int(args["pid"]))
        if one is None:
            raise Failed(f"pid {args['pid']} does not run on {hostname()}", gone=True)
    else:
        heard = procs.listeners(int(args["port"]))
        if not heard:
            raise Failed(f"nothing that can be seen listens on port {args['port']} of {hostname()}", gone=True)
        one = heard[0]
    environ = procs.environ(one.pid)
    if environ is None:
        raise Failed(f"the environment of pid {one.pid} on {hostname()} cannot be read; ask as its owner or as root")
    from .spawn import ungivable

    found = procs.tree([one.key], procs.table())
    process = setting.of(one.pid)
    output = setting.appendable(args["log"]) if args.get("log") else setting.output(one.pid)
    return {
        "ok": True,
        **procs.shown(one),
        "environ": environ,
        "cwd": procs.link(one.pid, "cwd"),
        "exe": procs.link(one.pid, "exe"),
        "stdout": procs.link(one.pid, "fd/1"),
        "stderr": procs.link(one.pid, "fd/2"),
        "log": output["log"],
        "log_why": output["why"],
        "process": process,
        "ungivable": ungivable(process),
        "cgroup": setting.cgroup(one.pid),
        "startable": setting.unstartable(one.pid),
        "tree": _shown(found.values()),
        "rss_total_b": sum(member.rss_b for member in found.values()),
        "held_b": procs.held_b(found.values()),
    }


def read(state: State, term: int, args: Json, emit: Emit) -> int:
    """Emit one sample at each cadence until the input closes.

    ``args``: ``watch`` {ports, processes {name: [pid, start]}, cadence_s, term}; a later line changes what it names.
    """
    import json

    watch: Json = {"ports": [], "processes": {}, "cadence_s": 1.0, "term": term}
    watch |= args.get("watch") or args
    reader = _Reader(state)
    due, rest = time.monotonic(), b""
    while True:
        emit(reader.sample(watch))
        due = max(due + watch["cadence_s"], time.monotonic())
        # at least one look at the input a sample, however late the sample is
        while select.select([0], [], [], max(due - time.monotonic(), 0))[0]:
            part = os.read(0, 65536)
            if not part:
                return 0
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                watch |= json.loads(line)["watch"]
                due = time.monotonic()


class _Reader:
    """Samples the host. The scan for marks, the dearest part, is made at every fifth sample."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.owners = procs.Owners()
        self.count = 0
        self.marked: list[Stat] = []

    def sample(self, watch: Json) -> Json:
        now = boottime_ns()
        if self.count % 5 == 0:
            self.marked = list(procs.marked(self.state.window).values())
            self.owners.forget()
        self.count += 1
        return {
            "seq": self.count,
            "t_boottime_ns": now,
            "memory": procs.memory(),
            "ports": procs.ports(watch["ports"], self.owners),
            "processes": {name: self._process(*key) for name, key in watch["processes"].items()},
            "marked": [procs.shown(one) for one in self.marked if procs.alive(*one.key)],
            "hold": self._hold(watch["term"]),
            "switch": _switch(self.state),
        }

    def _process(self, pid: int, start: int) -> Json:
        one = procs.stat(pid)
        return {"alive": one is not None, "start_ok": one is not None and one.start == start}

    def _hold(self, term: int) -> Json:
        try:
            newest = self.state.terms()
        except FileNotFoundError:
            newest = []
        lease = self.state.lease(tries=1)
        return {
            "own": self.state.owns(term),
            "term": newest[-1][0] if newest else None,
            "lease_term": lease.term if lease else None,
            "left_s": round(lease.left_s, 3) if lease else None,
        }
