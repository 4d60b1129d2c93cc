"""What an arm must be, and how it differs from what runs.

An arm is production's snapshot plus its declared differences, nothing else. ``expected`` builds it,
``differences`` compares two identities. ``--a=b`` and ``--a b`` are one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fairtrial.experiment import Arm, Experiment

MARK = "FAIRTRIAL_WINDOW"
"""The variable in the environment of everything that a window starts; its value is the window's id."""

_NUMBER = re.compile(r"^-\d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A server process as the host sees it: arguments, environment, program, folder, user, what it runs under."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: str
    exe: str
    uid: int
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By the kernel's names, soft and hard; -1: unlimited."""
    affinity: tuple[int, ...] = ()
    nice: int = 0

    @property
    def process(self) -> dict[str, Any]:
        """What it runs under, as the host program takes it."""
        limits = {name: list(pair) for name, pair in self.limits.items()}
        return {"limits": limits, "affinity": list(self.affinity), "nice": self.nice}


def observed(found: Mapping[str, Any]) -> Identity:
    """The identity of a process, from what the host program's ``inspect`` says of it."""
    process = found["process"]
    return Identity(
        argv=tuple(found["argv"]),
        environ=found["environ"],
        cwd=found["cwd"],
        exe=found["exe"],
        uid=found["uid"],
        limits={name: (soft, hard) for name, (soft, hard) in process["limits"].items()},
        affinity=tuple(process["affinity"]),
        nice=process["nice"],
    )


def supervisor(cgroup: str, own: str) -> str | None:
    """The service unit that a process belongs to, by the text of its cgroup file; None: none, or our own too."""
    for line in cgroup.splitlines():
        units = [part for part in line.rpartition(":")[2].split("/") if part.endswith((".service", ".scope"))]
        if units and units[-1].endswith(".service") and units[-1] not in re.split(r"[/\n]", own):
            return units[-1]
    return None


def unrestorable(found: Mapping[str, Any], host: Mapping[str, Any]) -> str | None:
    """Why a process could not be brought back as it is, with the way out; None: it can.

    ``found`` is what ``inspect`` says of it, ``host`` what ``look`` says of the host.
    """
    pid = found["pid"]
    if found["uid"] != host["uid"]:
        return (
            f"production (pid {pid}) runs as uid {found['uid']}, and would be started again as uid {host['uid']}, who "
            f"runs this: run fairtrial as uid {found['uid']}"
        )
    unit = supervisor(found["cgroup"], host["cgroup"])
    if unit is not None:
        return (
            f"production (pid {pid}) is run by a supervisor (unit {unit}): this version restarts plain processes: stop "
            f"the unit, start production with setsid from a shell, and hand it back in site.close"
        )
    if found["startable"] is not None:
        return (
            f"production (pid {pid}) could not be started again as it was: {found['startable']}: start it from a "
            "program and a folder that are there, then try again"
        )
    if found["ungivable"]:
        return (
            f"production (pid {pid}) runs under what it could not be given again from here: "
            f"{', '.join(found['ungivable'])}: run fairtrial under limits, processors and a priority that allow it "
            "(ulimit, taskset, nice), or as root"
        )
    if found["log"] is None:
        return (
            f"production (pid {pid}) could not be given its output back: {found['log_why']}: add "
            'log = "/a/file" under [production], or start production again with >/a/file 2>&1'
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as it must be. ``None`` stands for absent. Values may be secret."""

    what: str
    name: str
    expected: str | None
    observed: str | None


def options(argv: Sequence[str]) -> list[tuple[str, str | None]]:
    """Split arguments into ``(option, value)``, in order; a positional is ``("", value)``, a bare flag has None.

    Without knowing the program, a word after an option is its value; ``-1`` is a value too.
    """
    found: list[tuple[str, str | None]] = []
    for word in argv:
        if word.startswith("-") and len(word) > 1 and not _NUMBER.match(word):
            name, equals, value = word.partition("=")
            found.append((name, value if equals else None))
        elif found and found[-1][0] and found[-1][1] is None:
            found[-1] = (found[-1][0], word)
        else:
            found.append(("", word))
    return found


def option(argv: Sequence[str], name: str) -> str | None:
    """The last value given for an option, or None."""
    values = [value for key, value in options(argv) if key == name]
    return values[-1] if values else None


def change(argv: Sequence[str], name: str, value: str | bool | None) -> tuple[str, ...]:
    """Arguments with one option set (a string, or True for a bare flag) or taken away (None, False)."""
    words: list[str] = []
    skip = False
    for index, word in enumerate(argv):
        if skip:
            skip = False
            continue
        if word == name:
            follower = argv[index + 1] if index + 1 < len(argv) else "-"
            skip = not follower.startswith("-") or bool(_NUMBER.match(follower))
        elif not word.startswith(name + "="):
            words.append(word)
    if value is True:
        words.append(name)
    elif value is not None and value is not False:
        # What begins with a dash would be read as an option of its own.
        words += [f"{name}={value}"] if value.startswith("-") and not _NUMBER.match(value) else [name, value]
    return tuple(words)


def mounts(experiment: Experiment, arm: Arm, window: str) -> dict[str, str]:
    """The files an arm mounts: target -> source on the host."""
    if arm.overlay is None:
        return {}
    overlay = experiment.overlays[arm.overlay]
    return {file.target: f"{overlay.generated}/{arm.overlay}/{file.target}" for file in overlay.files}


def expected(production: Identity, experiment: Experiment, arm: Arm, window: str, host: str) -> Identity:
    """The snapshot of a host's part of production plus this arm's declared differences and the window's mark."""
    argv = production.argv
    if experiment.port(host, arm) != experiment.port(host):
        argv = change(argv, experiment.server.port_argument, str(experiment.port(host, arm)))
    for name, value in arm.arguments.items():
        argv = change(argv, name, value)
    for target, source in mounts(experiment, arm, window).items():
        assert experiment.server.mount_argument is not None
        argv = (*argv, experiment.server.mount_argument.format(target=target, source=source))
    environ = {**production.environ, MARK: window}
    for name, setting in arm.environment.items():
        if setting is None or setting is False:
            environ.pop(name, None)
        else:
            environ[name] = setting
    return replace(production, argv=argv, environ=environ)


def differences(wanted: Identity, observed: Identity) -> tuple[Difference, ...]:
    """Everything in which ``observed`` is not ``wanted``; empty: it is what was meant."""
    found: list[Difference] = []
    for what in ("exe", "cwd", "uid", "affinity", "nice"):
        left, right = str(getattr(wanted, what)), str(getattr(observed, what))
        if left != right:
            found.append(Difference(what=what, name=what, expected=left, observed=right))
    for name in sorted(wanted.limits.keys() | observed.limits.keys()):
        before_, after_ = wanted.limits.get(name), observed.limits.get(name)
        if before_ != after_:
            found.append(Difference(what="limit", name=name, expected=_pair(before_), observed=_pair(after_)))
    for name in sorted(wanted.environ.keys() | observed.environ.keys()):
        left_, right_ = wanted.environ.get(name), observed.environ.get(name)
        if left_ != right_:
            found.append(Difference(what="environment", name=name, expected=left_, observed=right_))
    before, after = options(wanted.argv), options(observed.argv)
    for name in sorted({key for key, _ in [*before, *after]}):
        left_values = [value if value is not None else "(set)" for key, value in before if key == name]
        right_values = [value if value is not None else "(set)" for key, value in after if key == name]
        if left_values != right_values:
            found.append(
                Difference(
                    what="argument",
                    name=name or "(positional)",
                    expected=" ".join(left_values) or None,
                    observed=" ".join(right_values) or None,
                )
            )
    return tuple(found)


def _pair(limit: tuple[int, int] | None) -> str | None:
    return None if limit is None else f"{limit[0]}:{limit[1]}"


def undeclared(
    production: Identity, observed: Identity, experiment: Experiment, arm: Arm, window: str, host: str
) -> str:
    """Say in one line how an arm is not what was declared; empty: it is. Names only, never values."""
    found = differences(expected(production, experiment, arm, window, host), observed)
    return "; ".join(
        f"{item.what} {item.name} "
        + ("is missing" if item.observed is None else "is undeclared" if item.expected is None else "differs")
        for item in found
    )
