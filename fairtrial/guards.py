"""Guards: conditions watched throughout, which stop the window when they trip.

A guard reads a ``View`` (the latest of every host, with the age of each value) and says why it trips, or nothing.
A value that is missing or older than its limit is unreadable, and trips: unknown is not safe.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fairtrial.experiment import Experiment

GIB = 1024**3
MIB = 1024**2
NS = 1_000_000_000


DEMAND_STALE_S = 5.0
LEASE_STALE_S = 10.0
"""How long after a renewal was due it may be unseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """A guard tripped: which, on what, and why (with value and limit)."""

    guard: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A server as the host knows it: pid, start time in clock ticks since boot, and the port it listens on."""

    pid: int
    start: int
    port: int


@dataclass(slots=True, kw_only=True)
class View:
    """What the guards look at. The runner keeps it current; times are monotonic nanoseconds.

    ``phases`` are the stretches of the window that hold now (held, idle, stopped, started, ready, armed), each with
    the number of the first sample of every host that was surely read in it.
    ``samples`` are the readers' last lines by host, ``sampled_ns`` when each arrived. ``renewed_ns`` is when the
    last renewal of each host's lease was seen written. ``demand`` is the server's own count of requests running
    and waiting beyond ours, ``counts_demand`` whether it gives one at all. ``production`` and ``arm`` hold what runs of
    them, by host.
    """

    now_ns: int = 0
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    samples: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    sampled_ns: dict[str, int] = field(default_factory=dict)
    renewed_ns: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    stop_file: str | None = None
    own_ports: set[int] = field(default_factory=set)
    production: dict[str, Serving] = field(default_factory=dict)
    arm: dict[str, Serving] = field(default_factory=dict)
    swap_at_ready_b: dict[str, int] = field(default_factory=dict)
    demand: int | None = None
    demand_ns: int = 0
    counts_demand: bool = False
    demand_since_ns: int | None = None

    def enter(self, phase: str) -> None:
        """Begin a phase. A sample that is on its way now may have been read before it: the next but one was not."""
        self.phases[phase] = {host: int(sample.get("seq", 0)) + 2 for host, sample in self.samples.items()}

    def leave(self, *phases: str) -> None:
        """End phases that hold, and no others."""
        for phase in phases:
            self.phases.pop(phase, None)

    def age_s(self, host: str) -> float | None:
        """Seconds since the host's last sample; None: there was none."""
        at = self.sampled_ns.get(host)
        return None if at is None else (self.now_ns - at) / NS


Rule = Callable[[View, str, Experiment], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One guard: its rule in words, the phase in which it is active, and when its value is stale."""

    name: str
    rule: str
    phase: str
    cadence_s: float
    stale_s: float
    check: Rule
    sampled: bool = True


def _bytes(memory: Mapping[str, Any], name: str) -> int:
    value = memory[name]
    if not isinstance(value, int):
        raise TypeError(f"a whole number of bytes as {name}")
    return value


def _port(view: View, host: str, port: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = view.samples[host]["ports"][str(port)]
    return found


def _memory(view: View, host: str, experiment: Experiment) -> str | None:
    available = _bytes(view.samples[host]["memory"], "available_b")
    limit = experiment.guards.memory_min_gib * GIB
    if available < limit:
        return f"MemAvailable on {host} is {available / GIB:.2f} GiB, under {experiment.guards.memory_min_gib:g} GiB"
    return None


def _swap(view: View, host: str, experiment: Experiment) -> str | None:
    growth = _bytes(view.samples[host]["memory"], "swap_used_b") - view.swap_at_ready_b[host]
    if growth > experiment.guards.swap_growth_max_mib * MIB:
        limit = experiment.guards.swap_growth_max_mib
        return f"used swap on {host} grew by {growth / MIB:.0f} MiB since the arm was ready, over {limit:g} MiB"
    return None


def _strangers(view: View, host: str, serving: Serving | None, what: str) -> str | None:
    if serving is None:
        return None
    for listener in _port(view, host, serving.port)["listeners"]:
        if serving.pid not in (listener["pid"], listener["pgid"], listener["sid"]):
            return f"pid {listener['pid']} ({_name(listener)}) listens on {what} port {serving.port} on {host}"
    return None


def _demand_arm(view: View, host: str, experiment: Experiment) -> str | None:
    serving = view.arm.get(host)
    reason = _strangers(view, host, serving, "the arm's")
    if reason or serving is None or not experiment.serves(host):
        # what talks to a rank is the arm itself
        return reason
    for peer in _port(view, host, serving.port)["peers"]:
        if peer["remote_port"] not in view.own_ports:
            who = f" (pid {peer['pid']})" if peer.get("pid") else ""
            return f"{peer['remote']}:{peer['remote_port']} talks to the arm's port {serving.port} on {host}{who}"
    return None


def _demand_production(view: View, host: str, experiment: Experiment) -> str | None:
    reason = _strangers(view, host, view.production.get(host), "production's")
    if reason or not experiment.serves(host):
        return reason
    age_s = (view.now_ns - view.demand_ns) / NS
    if view.counts_demand and age_s > DEMAND_STALE_S:
        return f"production's own counters on {host} were last read {age_s:.1f} s ago: unknown is not safe"
    if view.demand and view.demand_since_ns is not None and view.now_ns - view.demand_since_ns >= NS * 9 // 10:
        count = view.demand
        return f"somebody else's requests at production's port on {host}: {count} running or waiting beyond ours"
    return None


def _alone(view: View, host: str, experiment: Experiment) -> str | None:
    port = experiment.port(host)
    listeners = _port(view, host, port)["listeners"]
    arm = view.arm[host].pid if host in view.arm else None
    for listener in listeners:
        if arm is None or arm not in (listener["pid"], listener["pgid"], listener["sid"]):
            return (
                f"while production is stopped, pid {listener['pid']} ({_name(listener)}) "
                f"listens on its port {port} on {host}"
            )
    return None


def _server(view: View, host: str, experiment: Experiment) -> str | None:
    serving = view.arm.get(host)
    if serving is None:
        return None
    process = view.samples[host]["processes"][str(serving.pid)]
    if not (process["alive"] and process["start_ok"]):
        return f"the arm's process {serving.pid} on {host} is gone"
    return None


def _stop_file(view: View, host: str, experiment: Experiment) -> str | None:
    return None if view.stop_file is None else f"a STOP file was found: {view.stop_file}"


def _lease(view: View, host: str, experiment: Experiment) -> str | None:
    if host in view.lost:
        return f"the HOLD on {host} is no longer ours: {view.lost[host]}"
    age_s = (view.now_ns - view.renewed_ns[host]) / NS
    limit_s = min(experiment.waits.lease_s, experiment.waits.lease_s / 4 + LEASE_STALE_S)
    if age_s > limit_s:
        return f"no renewal of the lease on {host} was seen written for {age_s:.1f} s, over {limit_s:g} s"
    return None


def _switch(view: View, host: str, experiment: Experiment) -> str | None:
    if experiment.hosts[host].switch == "none":
        return None
    switch = view.samples[host].get("switch") or {}
    if not switch.get("alive"):
        return f"the dead-man's switch on {host} does not run"
    age_s = switch.get("beat_age_s")
    if age_s is None or not age_s <= 15:
        return f"the dead-man's switch on {host} has not beaten for {age_s if age_s is not None else 'ever'} s"
    if not switch.get("armed"):
        return f"the dead-man's switch on {host} is not armed"
    return None


def _fresh(view: View, host: str, experiment: Experiment) -> str | None:
    """A host that answers is one whose sample is fresh, and ``evaluate`` has just seen that."""
    return None


def _name(process: Mapping[str, Any]) -> str:
    argv = [str(word) for word in process.get("argv") or ["?"]]
    # An option's value may be a secret: what comes before the first option is the name.
    return " ".join(itertools.takewhile(lambda word: not word.startswith("--"), argv[:3]))[:120]


GUARDS: tuple[Guard, ...] = (
    Guard(name="memory", rule="MemAvailable over the minimum", phase="held", cadence_s=1, stale_s=5, check=_memory),
    Guard(name="swap", rule="used swap does not grow", phase="ready", cadence_s=1, stale_s=5, check=_swap),
    Guard(
        name="demand",
        rule="nobody but this window talks to the arm's port, and nothing else listens there",
        phase="started",
        cadence_s=1,
        stale_s=5,
        check=_demand_arm,
    ),
    Guard(
        name="demand",
        rule="nobody but this window is served by production",
        phase="idle",
        cadence_s=1,
        stale_s=5,
        check=_demand_production,
    ),
    Guard(
        name="alone",
        rule="while production is stopped nothing of it runs",
        phase="stopped",
        cadence_s=1,
        stale_s=5,
        check=_alone,
    ),
    Guard(
        name="stop file",
        rule="no STOP file",
        phase="held",
        cadence_s=1,
        stale_s=5,
        check=_stop_file,
        sampled=False,
    ),
    Guard(
        name="lease",
        rule="this window owns the HOLD, and every renewal was seen written",
        phase="held",
        cadence_s=5,
        stale_s=10,
        check=_lease,
        sampled=False,
    ),
    Guard(name="switch", rule="every armed switch beats", phase="armed", cadence_s=5, stale_s=15, check=_switch),
    Guard(name="link", rule="every host answers", phase="held", cadence_s=5, stale_s=10, check=_fresh),
    Guard(
        name="server",
        rule="the arm's process is the one started",
        phase="ready",
        cadence_s=1,
        stale_s=5,
        check=_server,
    ),
)
"""The guards of this version. GPU telemetry belongs to hosts that have one; ``local`` hosts declare none."""


def evaluate(view: View, experiment: Experiment) -> list[Trip]:
    """Return every guard that trips on this view."""
    trips: list[Trip] = []
    for guard in GUARDS:
        if guard.phase not in view.phases:
            continue
        for host in experiment.hosts:
            if guard.sampled:
                age_s = view.age_s(host)
                if age_s is None or age_s > guard.stale_s:
                    shown = "never" if age_s is None else f"{age_s:.1f} s ago"
                    reason = f"{host} was last read {shown}, over {guard.stale_s:g} s: unknown is not safe"
                    trips.append(Trip(guard=guard.name, reason=reason))
                    continue
            try:
                if guard.sampled and view.samples[host]["seq"] < view.phases[guard.phase].get(host, 0):
                    continue
                reason_ = guard.check(view, host, experiment)
            except (KeyError, TypeError) as error:
                reason_ = f"the reading of {host} lacks {error}: unknown is not safe"
            if reason_:
                trips.append(Trip(guard=guard.name, reason=reason_))
    return trips


def headroom(view: View, experiment: Experiment) -> str:
    """How far the memory guard is from tripping, for the progress line; empty before the first sample."""
    shown = [
        f"{host} {sample['memory']['available_b'] / GIB:.1f} GiB free (>= {experiment.guards.memory_min_gib:g})"
        for host, sample in view.samples.items()
        if isinstance((sample.get("memory") or {}).get("available_b"), int)
    ]
    return ", ".join(shown)
