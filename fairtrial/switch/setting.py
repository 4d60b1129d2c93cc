"""What a process runs under, and what it takes to start it again: limits, processors, priority, program, output."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Mapping

from . import procs
from .state import Json

DELETED = " (deleted)"
LIMITS = {
    name: int(getattr(resource, name))
    for name in sorted(dir(resource))
    if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
}


def of(pid: int) -> Json:
    """Return what a process runs under: ``limits`` {name: [soft, hard]} (-1: none), ``affinity``, ``nice``.

    A thread may have bound itself to fewer processors than the process was given: affinity is that of all threads.
    What cannot be read, of another user's process, is empty.
    """
    limits: dict[str, list[int]] = {}
    processors: set[int] = set()
    try:
        for name, number in LIMITS.items():
            limits[name] = list(resource.prlimit(pid, number))
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                processors |= os.sched_getaffinity(int(thread))
            except ProcessLookupError:
                pass
        nice = os.getpriority(os.PRIO_PROCESS, pid)
    except OSError:
        return {"limits": {}, "affinity": [], "nice": None}
    return {"limits": limits, "affinity": sorted(processors), "nice": nice}


def settle(wanted: Json) -> list[str]:
    """Give the calling process what ``of`` told of another; return what cannot be given, in words."""
    failed = []
    for name, (soft, hard) in wanted["limits"].items():
        own = resource.getrlimit(LIMITS[name])
        try:
            if own != (soft, hard):
                resource.setrlimit(LIMITS[name], (soft, hard))
        except (OSError, ValueError):
            failed.append(f"{name} {soft}:{hard} (here {own[0]}:{own[1]})")
    try:
        os.sched_setaffinity(0, wanted["affinity"])
    except OSError:
        pass
    given = sorted(os.sched_getaffinity(0))
    if given != wanted["affinity"]:
        failed.append(f"processors {wanted['affinity']} (here {given})")
    own_nice = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        if own_nice != wanted["nice"]:
            os.setpriority(os.PRIO_PROCESS, 0, wanted["nice"])
    except (OSError, TypeError):
        failed.append(f"nice {wanted['nice']} (here {own_nice})")
    return failed


def program(word: str, environ: Mapping[str, str], cwd: str) -> str | None:
    """Return the file that would run as ``word`` with this environment in this folder, or None."""
    if "/" in word:
        places = [word]
    else:
        places = [os.path.join(folder, word) for folder in environ.get("PATH", os.defpath).split(os.pathsep)]
    for place in places:
        path = os.path.join(cwd, place)
        if word and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def unstartable(pid: int) -> str | None:
    """Return why a process cannot be started again from its arguments and folder, or None."""
    cwd, exe = procs.link(pid, "cwd"), procs.link(pid, "exe")
    if cwd is None or exe is None:
        return "its program and its working folder cannot be read"
    if cwd.endswith(DELETED):
        return f"its working folder is gone: {cwd}"
    if exe.endswith(DELETED):
        return f"its program was removed or replaced while it runs: {exe}"
    word = (procs.argv(pid) or [""])[0]
    found = program(word, procs.environ(pid) or {}, cwd)
    try:
        same = found is not None and (os.path.realpath(found) == exe or os.path.samefile(found, f"/proc/{pid}/exe"))
    except OSError:
        same = False
    if not same:
        told = f"runs {os.path.realpath(found)}" if found else "names no program there"
        return f"its program is {exe}, and its first argument {told}"
    return None


def output(pid: int) -> Json:
    """Return {log, why}: the one file that a process writes its output and errors to; else null, and why."""
    out, err = procs.link(pid, "fd/1"), procs.link(pid, "fd/2")
    if out is None or out != err:
        return {"log": None, "why": f"its output goes to {out or 'nothing'}, its errors to {err or 'nothing'}"}
    if out == os.devnull:
        return {"log": out, "why": None}
    try:
        there, opened = os.stat(out), os.stat(f"/proc/{pid}/fd/1")
        same = stat.S_ISREG(opened.st_mode) and os.path.samestat(there, opened)
    except OSError:
        same = False
    if not same:
        return {"log": None, "why": f"its output goes to {out}, which is no file that could be opened again"}
    if not os.access(out, os.W_OK):
        return {"log": None, "why": f"its output goes to {out}, which cannot be written to by who asks"}
    return {"log": out, "why": None}


def appendable(log: str) -> Json:
    """Return {log, why}: a file that output may be appended to, or made; else null, and why."""
    there = os.path.lexists(log)
    if there and log != os.devnull and not stat.S_ISREG(os.lstat(log).st_mode):
        return {"log": None, "why": f"{log} is no file"}
    if not os.access(log if there else os.path.dirname(log), os.W_OK):
        return {"log": None, "why": f"{log} cannot be written to by who asks"}
    return {"log": log, "why": None}


def cgroup(pid: int | str) -> str:
    """Return the text of /proc/PID/cgroup; empty where it cannot be read."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
