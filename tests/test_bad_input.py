"""Bad input and faulty servers, each in a whole window on real processes: how it ends, and that production is back."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty.faulty import BASE
from faulty.rig import SERVER, Ended, Rig, wait_for

from fairtrial.canonical import sha256
from fairtrial.switch import procs


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def refused(rig: Rig, ended: Ended, *words: str) -> None:
    """Exit 2, said why and what to do; the folder is as if nothing had been asked."""
    assert ended.code == 2, ended.stderr
    assert ended.stderr.startswith("fairtrial: refused: ") or "\nfairtrial: refused: " in ended.stderr
    for word in words:
        assert word in ended.stderr
    assert not ended.out.exists()


def stopped(rig: Rig, ended: Ended, step: str, *words: str, cells: int = 0) -> None:
    """Exit 3, said why and what to do; production is back, the evidence whole, and every completed cell in it."""
    assert ended.code == 3, ended.stderr
    for word in (f"stopped in {step}", "production is proved to be back", "next: ", *words):
        assert word in ended.stderr
    rig.assert_back()
    rig.assert_sealed(ended)
    summary = ended.summary
    assert (summary["status"], summary["restored"], summary["verdict"]) == ("STOPPED", True, None)
    assert summary["stop"]["step"] == step
    assert len(summary["cells"]) == cells
    assert not [record for record in ended.of("request") if record["seq"] > ended.of("stop")[0]["seq"]]


def completed(rig: Rig, ended: Ended) -> dict[str, Any]:
    """Exit 0; production is back, the evidence whole."""
    assert ended.code == 0, ended.stderr
    rig.assert_back()
    rig.assert_sealed(ended)
    summary = ended.summary
    assert (summary["status"], summary["restored"], summary["stop"]) == ("COMPLETE", True, None)
    return summary


# ---- the control: without a fault it completes ---


def test_without_a_fault_the_window_completes(rig: Rig) -> None:
    rig.serve()
    summary = completed(rig, rig.run())
    assert [row["cold"] for row in summary["cells"]] == ["proved", "proved"]
    assert [row["alone"] for row in summary["cells"]] == ["proved", "proved"]


def test_an_arms_log_keeps_its_lines_without_any_text(rig: Rig) -> None:
    rig.serve()
    ended = rig.run(rig.experiment(**rig.matched()))
    completed(rig, ended)
    for arm in ("off", "cause", "fix"):
        log = (ended.out / "arms" / arm / "server.log").read_text()
        assert "listening\n" in log
        assert "served a request\n" in log


# ---- refused: nothing was touched ---


def test_an_arms_port_in_use_is_refused_with_pid_and_name(rig: Rig) -> None:
    rig.serve()
    other = rig.serve(port=rig.arm_port)
    refused(rig, rig.run(), f"port {rig.arm_port} is in use by pid {other.pid}", "faulty.py", "another port")
    rig.assert_untouched()


def test_the_name_of_who_uses_the_port_holds_no_secret(rig: Rig) -> None:
    rig.serve()
    (rig.folder / "x").write_text(f"import socket; socket.create_server(('127.0.0.1', {rig.arm_port})).accept()")
    process = rig.spawn([sys.executable, str(rig.folder / "x"), "--api-key=sesame-open-9"])
    wait_for(lambda: procs.listens(rig.arm_port), "it listens")
    ended = rig.run()
    refused(rig, ended, f"port {rig.arm_port} is in use by pid {process.pid}")
    assert "sesame" not in ended.stderr


def test_production_that_is_down_is_refused(rig: Rig) -> None:
    refused(rig, rig.run(), "production is down", f"port {rig.port}", "production that serves")
    rig.assert_free()


def test_production_that_is_not_ready_is_refused(rig: Rig) -> None:
    rig.serve("never-ready")
    refused(rig, rig.run(), "/health with 200 (HTTP status 503)", "must serve before a window")
    rig.assert_untouched()


def test_production_behind_a_wrapper_is_refused(rig: Rig) -> None:
    words = f"{sys.executable} {SERVER} --port {rig.port} --max-model-len 4096; true"
    rig.spawn(["/bin/sh", "-c", words])
    wait_for(lambda: procs.listens(rig.port), "production listens")
    pid = procs.listeners(rig.port)[0].pid
    refused(rig, rig.run(), f"pid {pid} listens on port {rig.port}", "not the head of its process group", "setsid")
    assert procs.listeners(rig.port)[0].pid == pid


def test_production_with_a_windows_mark_is_refused(rig: Rig) -> None:
    rig.spawn([sys.executable, str(SERVER), "--port", str(rig.port)], FAIRTRIAL_WINDOW="an-earlier-one")
    wait_for(lambda: procs.listens(rig.port), "production listens")
    refused(rig, rig.run(), "FAIRTRIAL_WINDOW", "fairtrial restore")


def test_another_windows_hold_is_refused_with_its_owner(rig: Rig) -> None:
    rig.serve()
    rig.state.mkdir(mode=0o700)
    owner = {"window": "theirs-1", "owner": "alice", "since": "2026-01-01T00:00:00Z", "pid": 4711}
    owner |= {"control_host": "elsewhere", "purpose": "their own measurements", "out": "/srv/theirs"}
    hold = rig.state / "hold.json"
    hold.write_text(json.dumps(owner))
    words = ("theirs-1", "alice", "4711", "elsewhere", "their own measurements", "fairtrial restore /srv/theirs")
    refused(rig, rig.run(), *words)
    assert json.loads(hold.read_text()) == owner
    assert rig.serving() == rig.pid


def test_a_stop_file_beside_the_experiment_is_refused(rig: Rig) -> None:
    rig.serve()
    (rig.folder / "STOP").touch()
    refused(rig, rig.run(), "a STOP file lies there", str(rig.folder / "STOP"), "remove it")
    rig.assert_untouched()


def test_an_out_folder_that_holds_anything_is_refused(rig: Rig) -> None:
    rig.serve()
    out = rig.folder / "out"
    out.mkdir()
    (out / "STOP").write_text("mine")
    ended = rig.run()
    assert ended.code == 2
    assert "not empty" in ended.stderr
    assert [path.name for path in out.iterdir()] == ["STOP"]
    rig.assert_untouched()


def test_an_empty_out_folder_is_left_empty_when_it_is_refused(rig: Rig) -> None:
    out = rig.folder / "out"
    out.mkdir()
    ended = rig.run()
    assert ended.code == 2
    assert list(out.iterdir()) == []


def test_a_downtime_that_the_plan_cannot_hold_is_refused(rig: Rig) -> None:
    rig.serve()
    refused(rig, rig.run(rig.experiment(), "--max-downtime", "0.5"), "--max-downtime", "give it more")
    rig.assert_untouched()


def test_an_experiment_with_ten_faults_gets_ten_messages_with_their_keys(rig: Rig) -> None:
    experiment = rig.experiment(
        schema="fairtrial.experiment/9",
        name="Not A Name",
        hosts={"here": {"state": "relative", "colour": "red"}},
        production={"host": "there", "port": 70000, "start_limit_s": 0},
        arms=[rig.arm("off"), rig.arm("off", overlay="none")],
        reading={"rule": "none", "cell": "short"},
        bounds={"submit_min": 5, "abort_min": 4},
    )
    ended = rig.run(experiment)
    assert ended.code == 2
    keys = [line.split(":")[0].strip() for line in ended.stderr.splitlines() if line.startswith("  ")]
    assert sorted(keys) == [
        "arms.1.name",
        "arms.1.overlay",
        "arms.1.overlay",
        "bounds.abort_min",
        "hosts.here.colour",
        "hosts.here.state",
        "name",
        "production.port",
        "production.start_limit_s",
        "reading.cell",
        "schema",
    ]
    assert f"{len(keys)} faults" in ended.stderr


def test_a_cell_that_the_arms_context_cannot_hold_is_refused(rig: Rig) -> None:
    rig.serve()
    experiment = rig.experiment(arms=[rig.arm(arguments={"--max-model-len": "67"})])
    refused(rig, rig.run(experiment), "--max-model-len 67", "64 + 4 tokens", "cut it in silence")
    rig.assert_untouched()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no-generation", ("HTTP status 500", "type ServerError")),
        ("silent-cache", ("says nothing of cached tokens", "--enable-prompt-tokens-details", 'coldness = "unproved"')),
        ("no-usage", ("without usage",)),
        ("clamp", ("1 output tokens, 2 were asked for",)),
        ("counts", ("counted 17 prompt tokens, 16 were sent",)),
        ("cut", ("the connection closed before the end of the answer",)),
        ("error-body", ("HTTP status 400",)),
        ("error-event", ("error object", "EngineDeadError")),
    ],
)
def test_production_that_cannot_do_what_the_protocol_needs_is_refused(
    rig: Rig, fault: str, words: tuple[str, ...]
) -> None:
    rig.serve(fault)
    refused(rig, rig.run(), *words)
    rig.assert_untouched()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("flat-probe", ("cannot judge", "0.5000 of the mass (>= 0.995)", "nats (>= 0.3)", "checks.probe.tokens")),
        ("sharp-probe", ("cannot judge", "1.0000 of the mass", "0.00 nats (>= 0.3)", "protocol.seed")),
        ("few-logprobs", ("5 first-token logprobs by token id, 20 are needed",)),
        ("text-logprobs", ("keyed by text", "return_tokens_as_token_ids")),
        ("no-tokenizer", ("/tokenize gives no token ids (HTTP status 404", "server.tokenize")),
    ],
)
def test_a_probe_that_cannot_judge_is_refused(rig: Rig, fault: str, words: tuple[str, ...]) -> None:
    rig.serve(fault)
    refused(rig, rig.run(rig.experiment(**rig.matched())), *words)
    rig.assert_untouched()


@pytest.mark.parametrize("limit", ["memory_floor_gib", "memory_min_gib"])
def test_a_memory_limit_that_production_itself_trips_is_refused(rig: Rig, limit: str) -> None:
    rig.serve()
    guards = rig.experiment()["guards"] | {"memory_floor_gib": 0.1, limit: 100000.0}
    refused(rig, rig.run(rig.experiment(guards=guards)), "MemAvailable is", "100000 GiB", f"guards.{limit}")
    rig.assert_untouched()


# ---- overlays ---


def overlaid(rig: Rig, fault: str = "", **changes: Any) -> dict[str, Any]:
    """An experiment whose arm mounts one file over the server's own, and reports what it loaded."""
    fix = b"fixed kernel\n"
    (rig.folder / "fix.py").write_bytes(fix)
    file = {
        "target": "kernel.py",
        "source": "fix.py",
        "sha256": sha256(fix),
        "base_sha256": sha256(BASE["kernel.py"]),
    } | changes
    return rig.experiment(
        server={"model": "faulty", "sources": "/server_info", "mount_argument": "--overlay={target}={source}"},
        overlays={"fix": {"generated": str(rig.folder / "generated"), "files": [file]}},
        arms=[rig.arm("fix", fault, overlay="fix")],
    )


def test_an_overlay_is_staged_mounted_and_seen_from_inside_the_server(rig: Rig) -> None:
    rig.serve()
    ended = rig.run(overlaid(rig))
    completed(rig, ended)
    identity = json.loads((ended.out / "arms" / "fix" / "identity.json").read_bytes())
    [rank] = identity["ranks"].values()
    assert rank["sources"] == {"kernel.py": sha256(b"fixed kernel\n")}


def test_an_overlay_file_with_another_hash_is_refused(rig: Rig) -> None:
    rig.serve()
    ended = rig.run(overlaid(rig, sha256="0" * 64))
    refused(rig, ended, "overlays.fix", "fix.py", sha256(b"fixed kernel\n"), "0" * 64, "build")
    rig.assert_untouched()


def test_an_overlay_file_that_is_missing_is_refused(rig: Rig) -> None:
    rig.serve()
    refused(rig, rig.run(overlaid(rig, source="nowhere.py")), "overlays.fix", "nowhere.py", "No such file")


def test_an_overlay_built_from_another_base_is_refused(rig: Rig) -> None:
    rig.serve()
    ended = rig.run(overlaid(rig, base_sha256="1" * 64))
    refused(rig, ended, "kernel.py was built from 1111", sha256(BASE["kernel.py"]), "build the overlay anew")
    rig.assert_untouched()


def test_an_overlay_that_leads_out_of_its_folder_is_refused(rig: Rig) -> None:
    ended = rig.run(overlaid(rig, target="../../elsewhere.py"))
    assert ended.code == 2
    assert "overlays.fix.files: '../../elsewhere.py' leads out of its folder" in ended.stderr


def test_a_staged_tree_that_differs_stops_and_is_never_overwritten(rig: Rig) -> None:
    rig.serve()
    there = rig.folder / "generated" / "fix" / "kernel.py"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"somebody else's\n")
    ended = rig.run(overlaid(rig))
    stopped(rig, ended, "stage", str(there), "never overwritten", "move that tree away")
    assert there.read_bytes() == b"somebody else's\n"
    assert rig.serving() == rig.pid


def test_a_server_that_loads_other_files_than_it_was_told_stops(rig: Rig) -> None:
    rig.serve()
    ended = rig.run(overlaid(rig, "ignores-overlay"))
    stopped(rig, ended, "fix.identity", "did not load what was meant: kernel.py")


def test_an_arm_can_take_a_variable_and_an_argument_away(rig: Rig) -> None:
    rig.serve("moody", FENCE="1")
    ended = rig.run(rig.experiment(arms=[rig.arm(arguments={"--fault": False}, environment={"FENCE": False})]))
    completed(rig, ended)
    identity = json.loads((ended.out / "arms" / "off" / "identity.json").read_bytes())
    [rank] = identity["ranks"].values()
    assert "FENCE" not in rank["environ"]
    assert "--fault" not in rank["argv"]


# ---- stopped: an arm's server is not what it should be ---


@pytest.mark.parametrize(
    ("fault", "step", "words"),
    [
        (
            "die",
            "off.start",
            ("died at its start", "its last line: fatal: no such device", "look into", "arms/off/server.log"),
        ),
        ("never-ready", "off.start", ("not ready within 1.5 s (production.start_limit_s)", "its last line: listening")),
        ("no-generation", "off.start", ("off's first generation: HTTP status 500",)),
        ("counts", "off.start", ("first generation: the server counted 5 prompt tokens, 4 were sent",)),
        ("restarts", "off.identity", ("not production plus its declared differences", "environment UNDECLARED")),
    ],
)
def test_an_arm_that_is_not_what_was_meant_stops(rig: Rig, fault: str, step: str, words: tuple[str, ...]) -> None:
    rig.serve()
    experiment = rig.experiment(arms=[rig.arm(fault=fault)])
    if fault == "never-ready":
        experiment["production"]["start_limit_s"] = 1.5
    stopped(rig, rig.run(experiment), step, *words)


def test_an_arm_whose_listener_is_another_process_stops(rig: Rig) -> None:
    rig.serve()
    ended = rig.run(rig.experiment(arms=[rig.arm(fault="other-process")]))
    step = ended.summary["stop"]["step"]
    assert step in ("off.start", "off.identity")
    stopped(rig, ended, step, f"port {rig.arm_port}", "listens on")


def test_an_arms_port_that_is_taken_after_preflight_stops(rig: Rig) -> None:
    rig.serve()
    with rig.running() as window:
        window.seen("end", step="hold")
        other = rig.serve(port=rig.arm_port)
        ended = window.ended()
    assert ended.code == 3, ended.stderr
    assert f"pid {other.pid}" in ended.stderr
    assert rig.serving() is not None
    assert procs.alive(other.pid, (procs.stat(other.pid) or pytest.fail("the other was ended")).start)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cut", ("the connection closed before the end of the answer", "without finish reason")),
        ("cached", ("not cold", "64 of its prompt tokens")),
        ("silent-cache", ("says nothing of cached tokens", "--enable-prompt-tokens-details")),
        ("error-body", ("HTTP status 400", "type BadRequestError, code 400")),
        ("error-event", ("error object (type EngineDeadError)",)),
        ("error-after-done", ("after [DONE]",)),
        ("no-content", ("no event carried generated content",)),
        ("no-usage", ("without usage",)),
        ("clamp", ("1 output tokens, 4 were asked for", "in silence")),
        ("no-finish", ("without finish reason",)),
        ("no-done", ("without [DONE]",)),
        ("not-http", ("not HTTP/1.1",)),
        ("not-a-stream", ("not an event stream",)),
        ("slow", ("no whole answer within 0.7 s",)),
        ("endless", ("no whole answer within 0.7 s",)),
        ("counts-others", ("2 requests where this window", "somebody else")),
        ("odd-metrics", ("/metrics, line 3", "not a whole number", "look at the server")),
    ],
)
def test_an_answer_that_is_not_whole_and_honest_stops(rig: Rig, fault: str, words: tuple[str, ...]) -> None:
    rig.serve()
    experiment = rig.experiment(arms=[rig.arm(fault=fault)])
    if fault in ("slow", "endless"):
        experiment["protocol"]["limit_s"] = 0.7
    stopped(rig, rig.run(experiment), "off.requests", *words)


def test_cells_that_landed_before_a_stop_are_in_the_summary(rig: Rig) -> None:
    rig.serve()
    ended = rig.run(rig.experiment(arms=[rig.arm("off"), rig.arm("on", "cut")]))
    stopped(rig, ended, "on.requests", f"completed cells are in {ended.out}/summary.json", cells=2)
    assert {row["arm"] for row in ended.summary["cells"]} == {"off"}
    # the screen cannot know what a server logs of an answer that never arrived
    assert not (ended.out / "arms" / "on" / "server.log").exists()


def test_a_server_that_says_nothing_of_caching_is_unproved_where_that_is_allowed(rig: Rig) -> None:
    rig.serve("silent-cache")
    protocol = rig.experiment()["protocol"] | {"coldness": "unproved"}
    server = {"model": "faulty", "metrics": False}
    summary = completed(rig, rig.run(rig.experiment(protocol=protocol, server=server)))
    assert [row["cold"] for row in summary["cells"]] == ["unproved", "unproved"]
    assert [row["alone"] for row in summary["cells"]] == ["unproved", "unproved"]


def test_a_cached_prompt_stops_also_where_coldness_may_be_unproved(rig: Rig) -> None:
    rig.serve()
    protocol = rig.experiment()["protocol"] | {"coldness": "unproved"}
    ended = rig.run(rig.experiment(protocol=protocol, arms=[rig.arm(fault="cached")]))
    stopped(rig, ended, "off.requests", "not cold")


def test_time_to_first_token_counts_from_content_not_from_the_first_event(rig: Rig) -> None:
    rig.serve()
    ended = rig.run(rig.experiment(arms=[rig.arm(fault="slow-content")]))
    summary = completed(rig, ended)
    # the server waits for half a second between its first events and its first content
    assert all(row["ttft_ns"] >= 500_000_000 for row in summary["cells"])
    assert all(row["content_events"] == 4 for row in summary["cells"])


# ---- checks and tells ---


def test_a_fix_that_answers_otherwise_is_unsafe(rig: Rig) -> None:
    rig.serve()
    summary = completed(rig, rig.run(rig.experiment(**rig.matched(fix="other-answers"))))
    assert summary["verdict"] == "UNSAFE"
    assert summary["reading"]["safety"]["greedy"] == {"same": 0, "of": 3}


def test_a_production_that_never_answers_twice_the_same_is_not_comparable(rig: Rig) -> None:
    rig.serve("moody")
    ended = rig.run(rig.experiment(**rig.matched()))
    completed(rig, ended)
    proved = next(record for record in ended.of("end") if record["step"] == "restore.prove")
    assert proved["observed"]["greedy"].startswith("not comparable")


def test_a_tell_that_is_missing_stops(rig: Rig) -> None:
    rig.serve()
    arms = [rig.arm("fix", tells=[{"log": "^fence: on$"}])]
    stopped(rig, rig.run(rig.experiment(arms=arms)), "fix.identity", "its switch did not bite", "'^fence: on$'")


def test_a_tell_that_another_arm_shows_stops(rig: Rig) -> None:
    rig.serve()
    fence = {"environment": {"FENCE": "1"}}
    arms = [rig.arm("off", **fence), rig.arm("fix", **fence, tells=[{"log": "^fence: on$"}])]
    stopped(rig, rig.run(rig.experiment(arms=arms)), "off.identity", "a tell that it does not declare")


def test_a_tell_where_it_should_be_is_no_obstacle(rig: Rig) -> None:
    rig.serve()
    arms = [rig.arm("off"), rig.arm("fix", environment={"FENCE": "1"}, tells=[{"log": "^fence: on$"}])]
    completed(rig, rig.run(rig.experiment(arms=arms)))


# ---- production that does not come back as it was ---


def test_production_that_answers_otherwise_after_its_restart_is_not_proved(rig: Rig) -> None:
    rig.serve("reborn")
    ended = rig.run(rig.experiment(**rig.matched()))
    assert ended.code == 4, ended.stderr
    for word in ("answers 0 of 3 greedy prompts as it did before", "A person must act now", "--accept REASON"):
        assert word in ended.stderr
    again = rig.command("restore", str(ended.out))
    assert again.code == 4, again.stderr
    accepted = rig.command("restore", str(ended.out), "--accept", "it draws its weights at its start")
    assert accepted.code == 0, accepted.stderr
    rig.assert_back()
    rig.assert_sealed(ended)
    summary = ended.summary
    assert (summary["restored"], summary["accepted"]["reason"]) == (False, "it draws its weights at its start")


def test_production_that_does_not_start_again_is_not_proved_until_it_does(rig: Rig) -> None:
    once = rig.folder / "started"
    rig.serve("once", ONCE=str(once))
    ended = rig.run(rig.experiment(arms=[rig.arm(arguments={"--fault": False})]))
    assert ended.code == 4, ended.stderr
    assert "which was started to serve" in ended.stderr
    assert len(ended.summary["cells"]) == 2
    once.unlink()
    again = rig.command("restore", str(ended.out))
    assert again.code == 0, again.stderr
    rig.assert_back()
    rig.assert_sealed(ended)
