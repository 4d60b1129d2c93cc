from __future__ import annotations

import math
from typing import Any

import pytest

from fairtrial.experiment import Experiment, parse
from fairtrial.guards import GIB, GUARDS, MIB, NS, Guard, Serving, Trip, View, evaluate, headroom

HOST = "here"
PRODUCTION = Serving(pid=10, start=1, port=8001)
ARM = Serving(pid=20, start=2, port=8002)
NOW = 1000 * NS
SEQ = 50
PHASES = sorted({guard.phase for guard in GUARDS})

Sample = dict[str, Any]


def process(pid: int, **parts: Any) -> dict[str, Any]:
    return {"pid": pid, "pgid": pid, "sid": pid, "argv": ["server", "-x"], **parts}


def peer(port: int) -> dict[str, Any]:
    return {"remote": "127.0.0.1", "remote_port": port, "pid": 99}


def sample(arm: bool = True) -> Sample:
    """A host on which everything is as it must be: an arm serves, or production does."""
    return {
        "seq": SEQ,
        "memory": {"available_b": 8 * GIB, "swap_used_b": 0},
        "ports": {
            "8001": {"listeners": [] if arm else [process(10)], "peers": []},
            "8002": {"listeners": [process(20)] if arm else [], "peers": []},
        },
        "processes": {"20": {"alive": True, "start_ok": True}} if arm else {},
        "switch": {"alive": True, "armed": True, "beat_age_s": 1.0},
    }


def view(phase: str, seen: Sample | None = None, **parts: Any) -> View:
    """What the guards of one phase look at: nothing trips, unless ``seen`` or ``parts`` say otherwise."""
    arm = phase != "idle"
    sound: dict[str, Any] = {
        "now_ns": NOW,
        "phases": {phase: {HOST: 0}},
        "samples": {HOST: seen if seen is not None else sample(arm)},
        "sampled_ns": {HOST: NOW},
        "renewed_ns": {HOST: NOW},
        "production": {} if arm else {HOST: PRODUCTION},
        "arm": {HOST: ARM} if arm else {},
        "swap_at_ready_b": {HOST: 0},
        "demand": 0,
        "demand_ns": NOW,
        "counts_demand": True,
    }
    return View(**sound | parts)


def tripped(experiment: Experiment, found: View) -> list[str]:
    return [trip.guard for trip in evaluate(found, experiment)]


@pytest.mark.parametrize("phase", PHASES)
def test_nothing_trips_where_all_is_well(experiment: Experiment, phase: str) -> None:
    assert evaluate(view(phase), experiment) == []


def test_no_guard_looks_outside_its_phase(experiment: Experiment) -> None:
    nothing = View(now_ns=NOW)
    assert evaluate(nothing, experiment) == []
    assert set(PHASES) == {"held", "idle", "stopped", "started", "ready", "armed"}


def test_memory_trips_under_its_minimum_and_not_at_it(experiment: Experiment) -> None:
    limit_b = int(experiment.guards.memory_min_gib * GIB)
    seen = sample()
    seen["memory"]["available_b"] = limit_b
    assert tripped(experiment, view("held", seen)) == []
    seen["memory"]["available_b"] = limit_b - 1
    [trip] = evaluate(view("held", seen), experiment)
    assert trip == Trip(guard="memory", reason="MemAvailable on here is 0.50 GiB, under 0.5 GiB")


def test_swap_trips_over_its_growth_since_the_arm_was_ready_and_not_at_it(experiment: Experiment) -> None:
    before_b, limit_b = 7 * MIB, int(experiment.guards.swap_growth_max_mib * MIB)
    seen = sample()
    seen["memory"]["swap_used_b"] = before_b + limit_b
    assert tripped(experiment, view("ready", seen, swap_at_ready_b={HOST: before_b})) == []
    seen["memory"]["swap_used_b"] += 1
    [trip] = evaluate(view("ready", seen, swap_at_ready_b={HOST: before_b}), experiment)
    assert trip.guard == "swap"
    assert "grew by 256 MiB since the arm was ready, over 256 MiB" in trip.reason


def test_demand_on_the_arm_trips_on_a_peer_that_is_not_ours(experiment: Experiment) -> None:
    seen = sample()
    seen["ports"]["8002"]["peers"] = [peer(40001), peer(40002)]
    assert tripped(experiment, view("started", seen, own_ports={40001, 40002})) == []
    [trip] = evaluate(view("started", seen, own_ports={40001}), experiment)
    assert trip == Trip(guard="demand", reason="127.0.0.1:40002 talks to the arm's port 8002 on here (pid 99)")


@pytest.mark.parametrize(("phase", "port", "pid"), [("started", "8002", 20), ("idle", "8001", 10)])
def test_demand_trips_on_a_stranger_that_listens_too(experiment: Experiment, phase: str, port: str, pid: int) -> None:
    seen = sample(arm=phase == "started")
    # A child of the server, a member of its group or of its session, is no stranger.
    seen["ports"][port]["listeners"] += [process(31, pgid=pid), process(32, sid=pid)]
    assert tripped(experiment, view(phase, seen)) == []
    seen["ports"][port]["listeners"].append(process(33))
    [trip] = evaluate(view(phase, seen), experiment)
    assert trip.guard == "demand"
    assert trip.reason.startswith("pid 33 (server -x) listens on ")


def test_demand_on_production_trips_when_it_lasts(experiment: Experiment) -> None:
    """One request that comes and goes between two looks is not demand yet; one seen for a cadence is."""
    young = view("idle", demand=2, demand_since_ns=NOW - NS // 2)
    assert tripped(experiment, young) == []
    [trip] = evaluate(view("idle", demand=2, demand_since_ns=NOW - NS), experiment)
    assert trip.guard == "demand"
    assert "2 running or waiting beyond ours" in trip.reason


def test_demand_that_production_once_counted_and_cannot_be_read_now_trips(experiment: Experiment) -> None:
    assert tripped(experiment, view("idle", demand_ns=NOW - 5 * NS)) == []
    assert tripped(experiment, view("idle", demand_ns=NOW - 5 * NS - 1)) == ["demand"]
    assert tripped(experiment, view("idle", demand_ns=0, demand=None, counts_demand=False)) == []


def test_alone_trips_when_anything_but_the_arm_listens_on_productions_port(experiment: Experiment) -> None:
    seen = sample()
    seen["ports"]["8001"]["listeners"] = [process(20)]
    assert tripped(experiment, view("stopped", seen)) == []
    seen["ports"]["8001"]["listeners"] = [process(10)]
    assert tripped(experiment, view("stopped", seen)) == ["alone"]
    assert tripped(experiment, view("stopped", seen, arm={})) == ["alone"]


@pytest.mark.parametrize("gone", [{"alive": False, "start_ok": True}, {"alive": True, "start_ok": False}])
def test_server_trips_when_the_arms_process_is_gone_or_another(experiment: Experiment, gone: dict[str, bool]) -> None:
    seen = sample()
    seen["processes"]["20"] = gone
    assert tripped(experiment, view("ready", seen)) == ["server"]


def test_a_stop_file_trips(experiment: Experiment) -> None:
    [trip] = evaluate(view("held", stop_file="/out/STOP"), experiment)
    assert trip == Trip(guard="stop file", reason="a STOP file was found: /out/STOP")


def test_lease_trips_when_no_renewal_was_seen_in_time_or_it_is_lost(raw: dict[str, Any]) -> None:
    for lease_s in (1, 4, 20, 120, 3600):
        found = parse(raw | {"waits": {"lease_s": lease_s}}, file="x")
        limit_ns = next(
            age for age in range(0, 3600 * NS, NS // 4) if tripped(found, view("held", renewed_ns={HOST: NOW - age}))
        )
        # A renewal is due every quarter; what has not been seen written must stop the window while the lease lives.
        assert lease_s / 4 < limit_ns / NS <= lease_s + 0.25
    assert tripped(found, view("held", lost={HOST: "another actor"})) == ["lease"]
    assert tripped(found, view("held", renewed_ns={})) == ["lease"]


@pytest.mark.parametrize(
    "switch",
    [
        None,
        {},
        {"alive": False, "armed": True, "beat_age_s": 1.0},
        {"alive": True, "armed": False, "beat_age_s": 1.0},
        {"alive": True, "armed": True, "beat_age_s": None},
        {"alive": True, "armed": True, "beat_age_s": 15.1},
        {"alive": True, "armed": True, "beat_age_s": math.nan},
        {"alive": True, "armed": True, "beat_age_s": "1"},
    ],
)
def test_switch_trips_unless_it_lives_beats_and_is_armed(raw: dict[str, Any], switch: dict[str, Any] | None) -> None:
    seen = sample() | {"switch": switch}
    assert tripped(parse(raw, file="x"), view("armed", seen)) == ["switch"]
    raw["hosts"]["here"]["switch"] = "none"
    assert tripped(parse(raw, file="x"), view("armed", seen)) == []


def test_switch_does_not_trip_at_its_oldest_beat(experiment: Experiment) -> None:
    seen = sample() | {"switch": {"alive": True, "armed": True, "beat_age_s": 15}}
    assert tripped(experiment, view("armed", seen)) == []


@pytest.mark.parametrize("guard", [guard for guard in GUARDS if guard.sampled], ids=lambda guard: guard.name)
def test_a_value_older_than_its_limit_trips_and_so_does_none_at_all(experiment: Experiment, guard: Guard) -> None:
    stale_ns = int(guard.stale_s * NS)
    assert guard.name not in tripped(experiment, view(guard.phase, sampled_ns={HOST: NOW - stale_ns}))
    late = evaluate(view(guard.phase, sampled_ns={HOST: NOW - stale_ns - 1}), experiment)
    assert guard.name in [trip.guard for trip in late]
    assert all("unknown is not safe" in trip.reason for trip in late)
    assert guard.name in tripped(experiment, view(guard.phase, samples={}, sampled_ns={}))


HOLES = [
    ("held", "memory", lambda seen: seen.pop("memory")),
    ("held", "memory", lambda seen: seen["memory"].pop("available_b")),
    ("held", "memory", lambda seen: seen["memory"].update(available_b=math.nan)),
    ("held", "memory", lambda seen: seen["memory"].update(available_b=None)),
    ("held", "memory", lambda seen: seen["memory"].update(available_b="9999999999")),
    ("held", "memory", lambda seen: seen.pop("seq")),
    ("ready", "swap", lambda seen: seen["memory"].pop("swap_used_b")),
    ("ready", "swap", lambda seen: seen["memory"].update(swap_used_b=math.nan)),
    ("ready", "server", lambda seen: seen.pop("processes")),
    ("ready", "server", lambda seen: seen["processes"].clear()),
    ("ready", "server", lambda seen: seen["processes"]["20"].pop("start_ok")),
    ("started", "demand", lambda seen: seen.pop("ports")),
    ("started", "demand", lambda seen: seen["ports"].pop("8002")),
    ("started", "demand", lambda seen: seen["ports"]["8002"].pop("peers")),
    ("started", "demand", lambda seen: seen["ports"]["8002"].pop("listeners")),
    ("idle", "demand", lambda seen: seen["ports"].pop("8001")),
    ("stopped", "alone", lambda seen: seen["ports"].pop("8001")),
    ("armed", "switch", lambda seen: seen.pop("switch")),
]


@pytest.mark.parametrize(("phase", "guard", "take"), HOLES)
def test_a_value_that_is_missing_or_no_number_trips(experiment: Experiment, phase: str, guard: str, take: Any) -> None:
    seen = sample(arm=phase != "idle")
    take(seen)
    assert guard in tripped(experiment, view(phase, seen))


def test_swap_trips_when_what_it_was_at_ready_is_not_known(experiment: Experiment) -> None:
    assert tripped(experiment, view("ready", swap_at_ready_b={})) == ["swap"]


@pytest.mark.parametrize("guard", [guard for guard in GUARDS if guard.sampled], ids=lambda guard: guard.name)
def test_a_sample_read_before_a_phase_began_is_not_looked_at(experiment: Experiment, guard: Guard) -> None:
    bad = {"seq": SEQ}
    before = view(guard.phase, dict(bad))
    before.enter(guard.phase)
    for seq in (SEQ, SEQ + 1):
        # The one after may have been on its way already.
        before.samples[HOST] = bad | {"seq": seq}
        assert guard.name not in tripped(experiment, before)
    before.samples[HOST] = bad | {"seq": SEQ + 2}
    if guard.name != "link":
        assert guard.name in tripped(experiment, before)
    # Old samples count as soon as they are too old.
    before.samples[HOST], before.now_ns = bad, NOW + 60 * NS
    assert guard.name in tripped(experiment, before)


def test_leaving_a_phase_ends_its_guards_and_no_others(experiment: Experiment) -> None:
    found = view("held", sample() | {"memory": {}})
    found.enter("ready")
    found.leave("ready", "idle")
    assert list(found.phases) == ["held"]
    assert tripped(experiment, found) == ["memory"]


def test_every_cause_is_reported_not_only_the_first(experiment: Experiment) -> None:
    seen = sample()
    seen["memory"]["available_b"] = 0
    found = view("held", seen, stop_file="/STOP", lost={HOST: "gone"})
    assert tripped(experiment, found) == ["memory", "stop file", "lease"]


def test_a_guard_never_waits_longer_than_two_cadences_to_call_a_value_stale() -> None:
    assert all(guard.stale_s >= 2 * guard.cadence_s for guard in GUARDS)


def test_headroom_says_how_far_memory_is_from_its_minimum(experiment: Experiment) -> None:
    assert headroom(view("held"), experiment) == "here 8.0 GiB free (>= 0.5)"
    assert headroom(View(), experiment) == ""
