"""Every guard tripped for real in a window on real processes, and full disks: it stops, and production is back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faulty.faulty import HELD_PROMPT
from faulty.rig import Ended, Json, Rig, Running, wait_for

from fairtrial.evidence import verify
from fairtrial.switch import procs

SLOW_CELL = "off long rep 1"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def stopped(rig: Rig, ended: Ended, step: str, kind: str, *words: str) -> Json:
    """Exit 3, for this reason; production is back, the evidence whole, and nothing was asked after the stop."""
    assert ended.code == 3, ended.stderr
    rig.assert_back()
    rig.assert_sealed(ended)
    stop: Json = ended.summary["stop"]
    assert (stop["step"], stop["kind"]) == (step, kind)
    for word in ("production is proved to be back", *words):
        assert word in ended.stderr
    requests = [record for record in ended.of("request") if record["seq"] > ended.of("stop")[0]["seq"]]
    assert requests == []
    return stop


def closed_ns(ended: Ended) -> int:
    """From the trip to the closed connection, as the ledger has it."""
    return next(int(record["ns"]) for record in ended.of("noted") if record["what"] == "closed")


@contextmanager
def in_a_slow_cell(rig: Rig, **changes: Any) -> Iterator[Running]:
    """A window whose first cell waits for an answer that does not come."""
    rig.serve()
    with rig.running(rig.experiment(arms=[rig.arm(fault="slow")], **changes)) as window:
        window.seen("request", purpose=SLOW_CELL)
        yield window


def connect(port: int, prompt: list[int] | None = None) -> socket.socket:
    """A stranger's connection, with a request for an answer that is held back if a prompt is given."""
    link = socket.create_connection(("127.0.0.1", port))
    if prompt is not None:
        body = json.dumps({"prompt": prompt, "max_tokens": 1, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        link.sendall(head.encode() + body)
    return link


def open_still(link: socket.socket) -> bool:
    """Whether a connection has neither an answer nor an end."""
    link.setblocking(False)
    try:
        link.recv(1)
    except BlockingIOError:
        return True
    return False


# ---- demand ---


def test_a_stranger_at_the_arms_port_trips_within_two_cadences_and_the_cell_is_closed(rig: Rig) -> None:
    guards = rig.experiment()["guards"] | {"cadence_s": 1.0}
    with in_a_slow_cell(rig, guards=guards) as window:
        came_ns = time.monotonic_ns()
        with connect(rig.arm_port) as link:
            ours = link.getsockname()[1]
            ended = window.ended()
    words = (f"127.0.0.1:{ours} talks to the arm's port {rig.arm_port}", f"pid {os.getpid()}")
    stopped(rig, ended, "off.requests", "guard demand", *words)
    assert ended.of("stop")[0]["mono_ns"] - came_ns <= 2_000_000_000 + 500_000_000
    assert closed_ns(ended) <= 500_000_000


def test_a_stranger_whom_production_serves_before_its_stop_stops_the_window_and_is_not_cut_off(rig: Rig) -> None:
    rig.serve()
    with rig.running() as window:
        window.seen("end", step="idle")
        with connect(rig.port, HELD_PROMPT) as link:
            ended = window.ended()
            assert open_still(link)
    stop = ended.summary["stop"]
    assert stop["step"] in ("off.start", "off.parity", "off.floor", "off.budget", "stage")
    assert "running or waiting" in stop["reason"]
    assert ended.code == 3, ended.stderr
    assert rig.serving() == rig.pid
    rig.assert_back()
    rig.assert_sealed(ended)


def test_a_stranger_at_production_trips_demand_while_the_reference_is_asked(rig: Rig) -> None:
    rig.serve("slow-content")
    experiment = rig.experiment(**rig.matched())
    with rig.running(experiment) as window:
        window.seen("begin", step="reference")
        with connect(rig.port, HELD_PROMPT) as link:
            ended = window.ended()
            assert open_still(link)
    stopped(rig, ended, "reference", "guard demand", "1 running or waiting beyond ours")
    assert rig.serving() == rig.pid


def test_production_that_serves_somebody_throughout_is_left_alone(rig: Rig) -> None:
    rig.serve()
    with connect(rig.port, HELD_PROMPT) as link:
        ended = rig.run(rig.experiment(waits=rig.experiment()["waits"] | {"idle_limit_s": 1}))
        assert open_still(link)
    stopped(rig, ended, "idle", "failed", "served somebody throughout 1 s", "choose a quieter time")
    assert rig.serving() == rig.pid


# ---- alone ---


def test_what_listens_on_productions_port_while_it_is_stopped_trips_alone_and_is_waited_for(rig: Rig) -> None:
    with in_a_slow_cell(rig) as window:
        with socket.create_server(("127.0.0.1", rig.port)):
            window.seen("begin", step="restore.start")
            # long enough that a restore which does not wait has ended
            wait_for(lambda: plays(rig), "production's start is tried")
        ended = window.ended()
    words = (f"pid {os.getpid()}", f"listens on its port {rig.port}")
    stopped(rig, ended, "off.requests", "guard alone", *words)


def plays(rig: Rig) -> bool:
    """Whether a verb is being played on the host now."""
    return any(step["mode"] == "play" for step in procs.steps(str(rig.state)))


def test_a_stranger_who_stays_on_productions_port_is_named_and_needs_a_person(rig: Rig) -> None:
    production = rig.experiment()["production"] | {"start_limit_s": 2}
    with in_a_slow_cell(rig, production=production) as window:
        with socket.create_server(("127.0.0.1", rig.port)):
            ended = window.ended()
            assert ended.code == 4, ended.stderr
            for word in ("PRODUCTION IS NOT PROVED", f"pid {os.getpid()}", f"fairtrial restore {ended.out}"):
                assert word in ended.stderr
            assert ended.summary["restored"] is False
            assert not procs.listens(rig.arm_port)
            assert json.loads((rig.state / "last.json").read_bytes())["state"] in ("down", "restoring")
            assert [path for path in rig.state.iterdir() if path.name in ("hold.json", "term-1.json")]
        again = rig.command("restore", str(ended.out))
    assert again.code == 0, again.stderr
    rig.assert_back()
    assert verify(ended.out).problems == ()
    assert json.loads((ended.out / "summary.json").read_bytes())["restored"] is True


# ---- server, stop file, lease, switch, bounds ---


def test_an_arm_that_is_killed_during_a_cell_stops(rig: Rig) -> None:
    with in_a_slow_cell(rig) as window:
        arm = procs.listeners(rig.arm_port)[0]
        procs.send(arm.pid, arm.start, signal.SIGKILL)
        ended = window.ended()
    stop = ended.summary["stop"]
    assert stop["kind"] in ("guard server", "failed")
    stopped(rig, ended, "off.requests", stop["kind"])
    assert f"the arm's process {arm.pid}" in stop["reason"] or "the connection" in stop["reason"]


def test_an_arm_that_dies_in_the_middle_of_its_own_stream_stops(rig: Rig) -> None:
    rig.serve()
    ended = rig.run(rig.experiment(arms=[rig.arm(fault="gone")]))
    stopped(rig, ended, "off.requests", ended.summary["stop"]["kind"])


def test_an_arm_that_is_killed_between_cells_trips_server(rig: Rig) -> None:
    rig.serve()
    experiment = rig.experiment(arms=[rig.arm(fault="slow-content")])
    experiment["protocol"]["cells"][0]["reps"] = 20
    with rig.running(experiment) as window:
        window.seen("cell", rep=1)
        arm = procs.listeners(rig.arm_port)[0]
        procs.send(arm.pid, arm.start, signal.SIGKILL)
        ended = window.ended()
    stopped(rig, ended, "off.requests", ended.summary["stop"]["kind"])
    assert len(ended.summary["cells"]) == len(ended.of("cell")) >= 1


@pytest.mark.parametrize("beside", ["evidence", "experiment"])
def test_a_stop_file_stops(rig: Rig, beside: str) -> None:
    with in_a_slow_cell(rig) as window:
        path = (window.out if beside == "evidence" else rig.folder) / "STOP"
        path.touch()
        ended = window.ended()
    stopped(rig, ended, "off.requests", "guard stop file", f"a STOP file was found: {path}")
    assert closed_ns(ended) <= 500_000_000


def test_the_command_stop_stops_and_says_what_was_restored(rig: Rig) -> None:
    with in_a_slow_cell(rig) as window:
        asked = rig.command("stop", str(window.out))
        ended = window.ended()
    assert asked.code == 0, asked.stderr
    assert "proved to be back" in asked.stdout
    stopped(rig, ended, "off.requests", "guard stop file")


def test_an_opener_that_is_killed_stops(rig: Rig) -> None:
    with in_a_slow_cell(rig) as window:
        kill(rig, "hold")
        ended = window.ended()
    stopped(rig, ended, "off.requests", "guard lease", "the opener on the host is gone")


def test_a_switch_that_is_killed_stops(rig: Rig) -> None:
    with in_a_slow_cell(rig) as window:
        kill(rig, "switch")
        ended = window.ended()
    stopped(rig, ended, "off.requests", "guard switch", "the dead-man's switch on here does not run")


def test_a_reader_that_is_killed_stops_because_unknown_is_not_safe(rig: Rig) -> None:
    with in_a_slow_cell(rig) as window:
        kill(rig, "read")
        ended = window.ended()
    stop = ended.summary["stop"]
    assert stop["kind"].startswith("guard ")
    stopped(rig, ended, "off.requests", stop["kind"], "unknown is not safe")


def kill(rig: Rig, mode: str) -> None:
    """Kill the one host program of this mode."""
    (one,) = (step for step in procs.steps(str(rig.state)) if step["mode"] == mode)
    procs.send(one["pid"], one["start"], signal.SIGKILL)


@pytest.mark.parametrize("bound", ["submit_min", "abort_min"])
def test_a_bound_that_is_reached_stops(rig: Rig, bound: str) -> None:
    # three seconds of HOLD: the first cell is under way (abort), or the next may not be asked (submit)
    fault = "slow" if bound == "abort_min" else "slow-content"
    rig.serve()
    free = {"seconds": 0.0, "basis": "a test"}
    verbs = "preflight hold snapshot switch idle reference stage budget parity floor start identity requests checks"
    verbs += " collect reading restore.end restore.start restore.prove restore.close look switch.off seal release"
    experiment = rig.experiment(arms=[rig.arm(fault=fault)], estimates=dict.fromkeys(verbs.split(), free))
    experiment["bounds"] = {"submit_min": 0.05, "abort_min": 1.0} if bound == "submit_min" else {bound: 0.06}
    experiment["bounds"]["arm_min"] = 0.0001
    experiment["protocol"]["cells"][0]["reps"] = 30
    words = "no request is submitted after" if bound == "submit_min" else "all is cancelled at"
    stopped(rig, rig.run(experiment), "off.requests", "bound", words)


# ---- full disks ---


@contextmanager
def on_a_small_disk(rig: Rig, place: Path, size_mib: int, experiment: Json) -> Iterator[Running]:
    """A window that sees a small disk at ``place``; its evidence is copied away when it has ended."""
    unshare, copy = shutil.which("unshare"), rig.folder / "copy"
    assert unshare is not None
    place.mkdir(mode=0o700)
    script = (
        f'mount -t tmpfs -o size={size_mib}m,mode=0700 small "{place}" && "$@"; code=$?; '
        f'cp -a "{rig.folder / "out"}" "{copy}"; [ -d "{rig.state}" ] && cp -a "{rig.state}" "{rig.folder / "kept"}"; '
        "exit $code"
    )
    ways = "-m" if os.geteuid() == 0 else "-rm"
    prefix = [unshare, ways, "--propagation", "private", "/bin/sh", "-c", script, "sh"]
    with rig.running(experiment, prefix=prefix) as window:
        window.out = Path(f"/proc/{window.process.pid}/root{rig.folder / 'out'}")
        yield window


def fill(place: Path) -> None:
    """Write until the disk takes no more."""
    try:
        file = place.open("wb", buffering=0)
    except OSError:
        return
    with file:
        size = 1 << 20
        while size:
            try:
                file.write(b"x" * size)
            except OSError:
                size //= 2


def test_a_window_that_stops_in_its_hold_proves_production_and_gives_the_host_back(rig: Rig) -> None:
    rig.serve()
    with rig.running() as window:
        window.seen("begin", step="hold")
        window.process.terminate()
        ended = window.ended()
    assert ended.code == 3, ended.stderr
    assert rig.serving() == rig.pid
    rig.assert_back()
    rig.assert_sealed(ended)


def test_a_full_disk_under_the_evidence_stops_and_restores(rig: Rig) -> None:
    rig.serve()
    experiment = rig.experiment(arms=[rig.arm("off"), rig.arm("next", "slow")])
    with on_a_small_disk(rig, rig.folder / "out", 80, experiment) as window:
        window.seen("request", purpose="next long rep 1")
        fill(window.out / "filler")
        code = window.process.wait(60)
        said = (rig.folder / "run.stderr").read_text()
    assert code == 3, said
    for word in ("stopped in next.requests (disk)", "its reserve was given up", "free space below"):
        assert word in said
    rig.assert_back()
    # the reserve is for what must still be written
    summary = json.loads((rig.folder / "copy" / "summary.json").read_bytes())
    assert (summary["status"], summary["restored"], len(summary["cells"])) == ("STOPPED", True, 2)
    assert verify(rig.folder / "copy").problems == ()


@pytest.mark.parametrize(
    "step", ["hold", "snapshot", "switch", "off.start", "off.requests", "reading", "restore.start"]
)
def test_a_disk_that_stays_full_whatever_is_given_up_restores_all_the_same(rig: Rig, step: str) -> None:
    rig.serve()
    with on_a_small_disk(rig, rig.folder / "out", 80, rig.experiment()) as window:
        window.seen("begin", step=step)
        number = 0
        while window.process.poll() is None:
            number += 1
            fill(window.out / f"filler{number}")
            time.sleep(0.01)
        said = (rig.folder / "run.stderr").read_text()
    assert "Traceback" not in said
    assert "NOT PROVED" not in said
    # what landed before the disk was full may have been all
    late = step in ("off.requests", "reading", "restore.start")
    assert window.process.returncode == 3 or (late and window.process.returncode == 0)
    rig.assert_back()


def test_a_disk_that_is_full_before_the_window_is_refused(rig: Rig) -> None:
    rig.serve()
    with on_a_small_disk(rig, rig.folder / "out", 20, rig.experiment()) as window:
        code = window.process.wait(60)
        said = (rig.folder / "run.stderr").read_text()
    assert code == 2, said
    assert "MiB are free, 64 are needed for the evidence" in said
    rig.assert_untouched()


def test_a_full_disk_under_the_state_folder_restores(rig: Rig) -> None:
    rig.serve()
    experiment = rig.experiment(arms=[rig.arm(fault="slow"), rig.arm("next")])
    experiment["protocol"]["limit_s"] = 3
    with on_a_small_disk(rig, rig.state, 4, experiment) as window:
        window.seen("request", purpose=SLOW_CELL)
        fill(Path(f"/proc/{window.process.pid}/root{rig.state}/filler"))
        code = window.process.wait(60)
        said = (rig.folder / "run.stderr").read_text()
    assert code == 3, said
    assert "Traceback" not in said
    assert rig.serving() not in (None, rig.pid)
    kept = sorted(path.name for path in (rig.folder / "kept").iterdir())
    assert kept == ["filler", "last.json", "lock"]
    assert json.loads((rig.folder / "kept" / "last.json").read_bytes())["state"] == "released"
    assert verify(rig.folder / "copy").problems == ()
