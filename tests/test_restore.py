"""Whoever restores, and whatever happens meanwhile: production comes back once, and the evidence stays whole."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill
import pytest

from fairtrial import demo
from fairtrial.switch import procs
from fairtrial.switch.state import State


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kill.Lane]:
    """One host for window after window: what one leaves behind, the next one finds."""
    with kill.lane(tmp_path_factory.mktemp("restore")) as one:
        yield one


@pytest.fixture
def out(lane: kill.Lane) -> Path:
    """The evidence folder of the next window."""
    return lane.out()


def at(step: str, *signals: str, kind: str = "begin", after_s: float = 0.0) -> dict[str, Any]:
    """A point at which the runner gets signals."""
    return {"at": step, "signals": signals, "kind": kind, "after_s": after_s}


def killed(lane: kill.Lane, out: Path, step: str, kind: str = "begin") -> None:
    """Run a window that is SIGKILLed in a step."""
    ran = lane.demo(out, [at(step, "SIGKILL", kind=kind)]).end()
    assert ran.exit == -signal.SIGKILL, ran.stderr


def stopped(lane: kill.Lane, out: Path, step: str, after_s: float = 0.0) -> kill.Program:
    """Run a window that is SIGSTOPped in a step, and has lost its lease to the switch, which has served."""
    program = lane.demo(out, [at(step, "SIGSTOP", after_s=after_s)])
    program.stopped()
    kill.until(lambda: lane.last().get("state") == "served" and lane.last().get("out") == str(out), "served")
    return program


def switch_killed(lane: kill.Lane, out: Path, step: str) -> None:
    """Kill the switch first and the runner then, in a step in which production does not run."""
    program = lane.demo(out, [at(step, "SIGSTOP")])
    program.stopped()
    for one in procs.steps(str(lane.state)):
        if one["mode"] == "switch":
            procs.send(one["pid"], one["start"], signal.SIGKILL)
    program.send(signal.SIGKILL)
    program.end()


def bytes_of(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file below a folder: its hash, and when it was last changed."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in found
    }


def kinds(out: Path) -> list[str]:
    """The kinds of the ledger's records."""
    return [record["kind"] for record in kill.records(out)]


def summary(out: Path) -> Any:
    """The summary of a window."""
    return json.loads((out / "summary.json").read_bytes())


def assert_restored(lane: kill.Lane, out: Path) -> None:
    """All holds that must hold after a window was restored and released."""
    wrong = kill.restored(lane, out)
    assert not wrong, "\n".join(wrong)


# -- restorers -----------------------------------------------------------------------------------------------------


def test_of_two_restorers_one_acts_and_both_say_restored(lane: kill.Lane, out: Path) -> None:
    killed(lane, out, "off.requests")
    both = [kill.Program(lane, ["restore", out]) for _ in range(2)]
    ends = [one.end() for one in both]
    assert [end.exit for end in ends] == [0, 0], "\n".join(end.stderr for end in ends)
    assert kinds(out).count("restorer") == 1
    assert_restored(lane, out)


def test_a_restorer_that_is_killed_is_followed_by_the_next(lane: kill.Lane, out: Path) -> None:
    killed(lane, out, "off.requests")
    for step in ("restore.end", "restore.start", "restore.prove", "release.begin", kill.SEALED):
        ran = kill.Program(lane, ["restore", out], [at(step, "SIGKILL")]).end()
        assert ran.exit == -signal.SIGKILL, ran.stderr
    assert lane.run("restore", out).exit == 0
    assert kinds(out).count("restorer") == 6
    assert_restored(lane, out)


def test_restoring_again_what_was_released_touches_nothing(lane: kill.Lane, out: Path) -> None:
    killed(lane, out, "fix.start")
    assert lane.run("restore", out).exit == 0
    before = bytes_of(out), bytes_of(lane.state), lane.served()
    again = lane.run("restore", out)
    assert again.exit == 0
    assert "nothing was touched" in again.stderr
    assert (bytes_of(out), bytes_of(lane.state), lane.served()) == before


def test_a_cell_that_landed_before_the_kill_is_in_the_summary(lane: kill.Lane, out: Path) -> None:
    killed(lane, out, "cause.requests", kind="cell")
    assert lane.run("restore", out).exit == 0
    cells = [(row["arm"], row["cell"], row["rep"]) for row in summary(out)["cells"]]
    assert cells == [("off", "warm-up", 1), ("off", "long", 1), ("off", "long", 2), ("cause", "warm-up", 1)]
    assert summary(out)["status"] == "STOPPED"
    assert summary(out)["stop"]["step"] == "cause.requests"
    assert_restored(lane, out)


def test_half_a_record_and_half_a_file_are_no_evidence(lane: kill.Lane, out: Path) -> None:
    killed(lane, out, "off.checks")
    with (out / "ledger.jsonl").open("ab") as file:
        file.write(b'{"at":"2026-')
    (out / "arms" / "off" / "checks.jsonl.partial").write_bytes(b"{")
    with (out / "arms" / "off" / "cells.jsonl").open("ab") as file:
        file.write(b'{"arm":"off"')
    assert lane.run("restore", out).exit == 0
    assert "torn" in kinds(out)
    assert not list(out.rglob("*.partial"))
    assert_restored(lane, out)


@pytest.mark.parametrize("what", ["missing", "empty", "a file", "no window's"])
def test_what_is_no_windows_folder_is_refused(lane: kill.Lane, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "folder"
    if what == "a file":
        folder.write_text("")
    elif what != "missing":
        folder.mkdir()
    if what == "no window's":
        (folder / "ledger.jsonl").write_text("")
    before = lane.last()
    ran = lane.run("restore", folder)
    assert ran.exit == 2, ran.stderr
    assert str(folder) in ran.stderr
    assert lane.last() == before


def test_a_person_who_vouches_for_what_serves_has_it_left_alone(lane: kill.Lane, out: Path) -> None:
    switch_killed(lane, out, "off.identity")
    pid = _start_production_by_hand(lane)
    ran = lane.run("restore", out, "--accept", "started by hand")
    assert ran.exit == 0, ran.stderr
    stat = lane.production()
    assert stat is not None
    assert stat.pid == pid
    found = summary(out)
    assert found["restored"] is False
    assert found["accepted"]["reason"] == "started by hand"
    assert found["accepted"]["observed"] == [{"pid": pid, "start": stat.start}]
    assert not procs.listeners(lane.port + 1)
    assert "no HOLD" in lane.run("status", out).stdout
    assert lane.run("verify", out).exit == 0
    assert lane.last()["state"] == "released"


def _start_production_by_hand(lane: kill.Lane) -> int:
    argv = demo.command(lane.port, True)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(demo.PACKAGE.parent), demo.LABEL: "production"}
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = [(os.POSIX_SPAWN_OPEN, number, str(lane.folder / "production.log"), flags, 0o600) for number in (1, 2)]
    pid = os.posix_spawn(argv[0], argv, environ, file_actions=log, setsid=True)
    kill.until(lambda: procs.listens(lane.port), "production listens")
    return pid


# -- the runner lives ----------------------------------------------------------------------------------------------


def test_a_live_runner_is_not_restored_but_stopped(lane: kill.Lane, out: Path) -> None:
    program = lane.demo(out)
    kill.until(lambda: (out / "ledger.jsonl").exists() and _begun(out, "off.start"), "off.start begun")
    refused = lane.run("restore", out)
    assert refused.exit == 2, refused.stderr
    assert f"pid {program.process.pid}" in refused.stderr
    assert "lease" in refused.stderr
    stop = lane.run("stop", out)
    assert stop.exit == 0, stop.stderr
    assert "production is proved to be back" in stop.stdout
    ended = program.end()
    assert ended.exit == 3, ended.stderr
    assert "STOP" in summary(out)["stop"]["reason"]
    assert_restored(lane, out)


def _begun(out: Path, step: str) -> bool:
    return any(record["kind"] == "begin" and record["step"] == step for record in kill.records(out))


def test_a_runner_that_is_taken_over_from_writes_nothing_more(lane: kill.Lane, out: Path) -> None:
    program = lane.demo(out, [at("off.requests", "SIGSTOP", kind="request")])
    program.stopped()
    assert lane.run("restore", out, "--now").exit == 0
    assert_restored(lane, out)
    before, production = bytes_of(out), lane.served()
    program.send(signal.SIGCONT)
    ended = program.end()
    assert ended.exit == 3, ended.stderr
    assert bytes_of(out) == before
    assert lane.served() == production


@pytest.mark.parametrize("step", ["off.requests", "cause.start", "restore.end"])
def test_a_runner_that_was_stopped_past_its_lease_measures_no_more(lane: kill.Lane, out: Path, step: str) -> None:
    program = stopped(lane, out, step)
    cells, production = kill.rows(out), lane.served()
    program.send(signal.SIGCONT)
    ended = program.end()
    # it comes next after the switch: it proves the greedy answers, closes, seals and releases
    assert ended.exit == (0 if step == "restore.end" else 3), ended.stderr
    assert kill.rows(out) == cells
    assert lane.served() == production
    assert_restored(lane, out)


@pytest.mark.parametrize(("step", "after_s"), [("off.checks", 0.0), ("idle", 0.25)])
def test_a_runner_that_wakes_up_after_its_window_was_restored_changes_nothing(
    lane: kill.Lane, out: Path, step: str, after_s: float
) -> None:
    # in ``idle`` it waits with ticks: what its readers have queued meanwhile is evidence that comes too late
    program = stopped(lane, out, step, after_s)
    assert lane.run("restore", out).exit == 0
    before, production = bytes_of(out), lane.served()
    program.send(signal.SIGCONT)
    ended = program.end()
    assert ended.exit == 3, ended.stderr
    assert bytes_of(out) == before
    assert lane.served() == production
    assert_restored(lane, out)


def test_with_the_switch_and_the_runner_killed_production_stays_down_until_it_is_restored(
    lane: kill.Lane, out: Path
) -> None:
    switch_killed(lane, out, "cause.requests")
    state = State(str(lane.state), kill.records(out)[0]["window"])
    kill.until(lambda: (lease := state.lease()) is not None and not lease.live, "the lease ran out")
    assert lane.production() is None
    assert [one["mode"] for one in procs.steps(str(lane.state))] == []
    assert lane.run("restore", out).exit == 0
    assert_restored(lane, out)


# -- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "name", "times"),
    [
        ("off.start", "SIGINT", 1),
        ("off.start", "SIGHUP", 2),
        ("cause.requests", "SIGTERM", 1),
        ("fix.requests", "SIGINT", 2),
        ("restore.prove", "SIGHUP", 1),
        ("restore.prove", "SIGTERM", 2),
    ],
)
def test_a_signal_restores_and_a_second_one_cuts_nothing_short(
    lane: kill.Lane, step: str, name: str, times: int
) -> None:
    case = kill.signalled(lane, step, name, times)
    assert not case.wrong, case.told()


def test_ctrl_c_does_not_cut_a_restore_short(lane: kill.Lane, out: Path) -> None:
    killed(lane, out, "fix.requests")
    points = [at("restore.end", "SIGINT"), at("restore.start", "SIGINT"), at("restore.prove", "SIGINT", "SIGTERM")]
    ran = kill.Program(lane, ["restore", out], points).end()
    assert ran.exit == 0, ran.stderr
    assert kinds(out).count("noted") >= 3
    assert_restored(lane, out)


def test_a_signal_in_the_release_is_too_late_for_the_ledger_and_stops_nothing(lane: kill.Lane, out: Path) -> None:
    ran = lane.demo(out, [at("release.begin", "SIGINT", "SIGTERM")]).end()
    assert ran.exit == 0, ran.stderr
    assert kinds(out)[-1] == "release.begin"
    assert_restored(lane, out)


# -- the next demo -------------------------------------------------------------------------------------------------


def test_a_demo_after_a_dead_one_restores_it_first_and_says_so(lane: kill.Lane, out: Path) -> None:
    killed(lane, out, "off.requests")
    second = lane.out()
    ran = lane.demo(second).end()
    assert ran.exit == 0, ran.stderr
    assert "an earlier demo left its HOLD" in ran.stderr
    assert "an earlier demo left its production" in ran.stderr
    assert_restored(lane, second)
    assert lane.run("verify", out).exit == 0
    assert summary(out)["restored"] is True
