from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE

from fairtrial import plan
from fairtrial.experiment import Experiment, parse
from fairtrial.window import bounds, hold_s, steps

Command = Callable[..., subprocess.CompletedProcess[str]]

NETWORK = {"socket", "socketpair", "connect", "bind", "listen", "accept", "accept4", "sendto", "sendmsg", "recvfrom"}
CHILDREN = {"fork", "vfork", "clone", "clone3", "execve", "execveat", "kill", "tgkill", "tkill", "pidfd_send_signal"}
CHANGES = {
    *("mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "rename", "renameat", "renameat2", "link", "linkat"),
    *("symlink", "symlinkat", "truncate", "ftruncate", "creat", "mknod", "mknodat", "chmod", "fchmod", "fchmodat"),
    *("chown", "fchown", "fchownat", "utimensat", "setxattr", "mount", "pwrite64", "pwritev", "sendfile", "fallocate"),
}


def traced(folder: Path, argv: list[str]) -> tuple[str, list[str]]:
    """Run a command under a system-call trace: its standard output, and its calls that touch the world."""
    trace = folder / "trace"
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    strace = ["strace", "-f", "-qq", "-o", str(trace)]
    ended = subprocess.run([*strace, *argv], env=environ, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    calls = [line.partition(" ")[2].strip() for line in trace.read_text(errors="replace").splitlines()]
    own, *rest = [call for call in calls if call.startswith("execve(")]
    assert argv[0] in own
    return ended.stdout, [call for call in calls if touches(call)] + rest


def touches(call: str) -> bool:
    name, _, arguments = call.partition("(")
    if name in ("open", "openat", "openat2"):
        return re.search(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND", arguments) is not None
    if name in ("write", "writev"):
        return not re.match(r"[12],", arguments)
    return name in NETWORK | CHILDREN - {"execve"} | CHANGES


def test_a_plan_opens_no_socket_starts_no_child_and_writes_no_file(tmp_path: Path, experiment: Experiment) -> None:
    argv = [sys.executable, "-m", "fairtrial", "plan", str(PACKAGE / "demo.toml")]
    said, touched = traced(tmp_path, argv)
    assert said == plan.text(experiment)
    assert touched == []


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("import socket; socket.socket().close()", "socket("),
        ("import subprocess; subprocess.run(['true'])", "execve("),
        ("open('x', 'w').close()", "openat("),
        ("import os; os.mkdir('x')", "mkdir("),
    ],
)
def test_the_trace_sees_what_a_plan_must_not_do(tmp_path: Path, code: str, call: str) -> None:
    _, touched = traced(tmp_path, [sys.executable, "-S", "-c", code])
    assert any(one.startswith(call) for one in touched)


def test_every_command_of_a_real_window_was_in_its_plan_in_the_step_that_sent_it(quick_window: Path) -> None:
    planned = {step["step"]: step["commands"] for step in json.loads((quick_window / "plan.json").read_text())["steps"]}
    records = [json.loads(line) for line in (quick_window / "ledger.jsonl").read_text().splitlines()]
    step, sent = "", 0
    for record in records:
        if record["kind"] == "begin":
            step = record["step"]
        if record["kind"] != "command":
            continue
        sent += 1
        program = f"{record['host']}$ PYTHON -S -E host.pyz"
        if record["mode"] == "play":
            shown = {line.partition("<- ")[2].split(" ")[0] for line in planned[step] if f"{program} play " in line}
            assert set(record["verbs"]) <= shown, step
        else:
            assert any(line.startswith(f"{program} {record['mode']} ") for line in planned[step]), step
    assert sent > 20


def test_a_command_as_it_was_sent_is_its_template_with_names_filled_in(quick_window: Path) -> None:
    shown = {
        line.split("   <- ")[0].split("$ PYTHON -S -E host.pyz ")[1]
        for step in json.loads((quick_window / "plan.json").read_text())["steps"]
        for line in step["commands"]
        if "$ PYTHON -S -E host.pyz " in line
    }
    for path in sorted((quick_window / "cmd").iterdir()):
        words = json.loads(path.read_text())["argv"]
        assert words[1:3] == ["-S", "-E"]
        assert words[3].endswith("host.pyz")
        filled = [
            "WINDOW" if before == "--window" else "N" if before == "--term" else word
            for before, word in pairwise(words[3:])
        ]
        assert " ".join(filled) in shown


def test_the_steps_that_ran_are_those_that_were_planned(quick_window: Path) -> None:
    planned = [step["step"] for step in json.loads((quick_window / "plan.json").read_text())["steps"]]
    records = [json.loads(line) for line in (quick_window / "ledger.jsonl").read_text().splitlines()]
    ran = [record["step"] for record in records if record["kind"] == "begin"]
    # These two leave one record between them, the ledger's last.
    assert planned == [*ran, "seal", "release"]
    assert records[-1]["kind"] == "release.begin"


def test_the_plan_that_a_window_keeps_is_the_plan_of_its_registration(quick_window: Path) -> None:
    registered = json.loads((quick_window / "registration.json").read_text())
    experiment = parse(registered["experiment"], file="registration.json")
    assert experiment.sha256 == registered["sha256"]
    assert json.loads((quick_window / "plan.json").read_text()) == json.loads(json.dumps(plan.plan(experiment)))


def test_a_plan_says_everything_that_a_person_must_know(experiment: Experiment) -> None:
    said = plan.text(experiment)
    assert experiment.sha256 in said
    for arm in experiment.arms:
        assert re.search(rf"^  {arm.name} +{re.escape(plan.differences(experiment, arm))}$", said, re.MULTILINE)
    for step in steps(experiment):
        assert re.search(rf"^  {re.escape(step.name)} +[0-9.]+ s  ", said, re.MULTILINE)
        assert f"basis: {step.estimate.basis}" in said
    for part in ("HOLD", "BOUNDS", "WAITS", "GUARDS", "READING", "RESTORE", "ARMS", "STEPS"):
        assert re.search(rf"^{part} ?", said, re.MULTILINE)
    assert "MemAvailable over the minimum (0.5 GiB; 0.75 GiB before an arm) (every 1 s, stale after 5 s)" in said


def test_the_rule_is_shown_with_the_limits_that_are_registered(experiment: Experiment, raw: dict[str, Any]) -> None:
    said = "\n".join(plan.rule(experiment))
    for limit in ("15.0%", "0.7 x off", "0.9 x off", "6 of 6", "max(0.005, 2 x", ">= 0.99", "top 20"):
        assert limit in said
    raw["reading"]["thresholds"] |= {"spread_max": 0.03, "kl_min": 0.125}
    changed = "\n".join(plan.rule(parse(raw, file="x")))
    assert "3.0%" in changed
    assert "max(0.125, 2 x" in changed
    raw["reading"] = {"rule": "none", "cell": "long"}
    assert plan.rule(parse(raw, file="x")) == ["no verdict: cells and spreads"]


def test_differences_are_in_one_line_with_values_and_removals(raw: dict[str, Any]) -> None:
    raw["arms"][2] |= {
        "arguments": {"--max-model-len": "1024", "--eager": True, "--gone": None},
        "environment": {"A": "1", "B": None},
    }
    found = parse(raw, file="x")
    assert plan.differences(found, found.arm("fix")) == (
        "--port 8002; --eager; --gone removed; --max-model-len 1024; A=1; B removed; overlay fix (3 replaced, 1 added)"
    )
    raw["arms"][0]["port"] = 8001
    found = parse(raw, file="x")
    assert plan.differences(found, found.arm("off")) == ""


def test_a_host_without_a_switch_is_said(raw: dict[str, Any], experiment: Experiment) -> None:
    assert "no dead-man restore" not in plan.text(experiment)
    raw["hosts"]["here"]["switch"] = "none"
    assert "no dead-man restore on here" in plan.text(parse(raw, file="x"))


def test_the_sites_own_commands_are_shown_where_they_run(raw: dict[str, Any]) -> None:
    raw["site"] = {"close": [["/usr/bin/maintenance", "off"]]}
    found = {step["step"]: step["commands"] for step in plan.plan(parse(raw, file="x"))["steps"]}
    assert "here$ /usr/bin/maintenance off" in found["restore.close"]


def test_every_file_that_staging_writes_is_shown(experiment: Experiment) -> None:
    found = {step["step"]: step["commands"] for step in plan.plan(experiment)["steps"]}
    for name in ("cause", "fix"):
        for file in experiment.overlays[name].files:
            assert any(f"/{name}/{file.target} " in line for line in found["stage"])
    assert not any("/unsafe/" in line for line in found["stage"])


def test_bounds_and_slack_are_those_of_the_run(experiment: Experiment) -> None:
    for minutes in (None, 2.0):
        value = plan.plan(experiment, minutes)
        limits = bounds(experiment, steps(experiment), minutes)
        assert value["bounds"] == {
            "submit_s": round(limits.submit_s, 1),
            "abort_s": round(limits.abort_s, 1),
            "arm_s": round(limits.arm_s, 1),
            "slack_s": round(limits.abort_s - hold_s(steps(experiment)), 1),
        }


def test_a_plan_is_the_same_every_time_and_json_is_the_same_plan(command: Command, experiment: Experiment) -> None:
    assert plan.text(experiment) == plan.text(experiment)
    ended = command("plan", PACKAGE / "demo.toml", "--json")
    assert json.loads(ended.stdout) == json.loads(json.dumps(plan.plan(experiment)))
