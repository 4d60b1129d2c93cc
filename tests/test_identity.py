from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tomllib
from conftest import PACKAGE
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import restoration
from fairtrial.experiment import Arm, Experiment, parse
from fairtrial.identity import (
    MARK,
    Difference,
    Identity,
    change,
    differences,
    expected,
    mounts,
    observed,
    option,
    options,
    supervisor,
    undeclared,
    unrestorable,
)

SECRET = "hunter2-hunter2-hunter2"
PRODUCTION = Identity(
    argv=("/usr/bin/server", "serve", "--port", "8001", "--max-model-len=262144", "--eager", "--api-key", SECRET),
    environ={"PATH": "/bin", "API_TOKEN": SECRET, "MODE": "fast"},
    cwd="/",
    exe="/usr/bin/server",
    uid=1000,
    limits={"RLIMIT_NOFILE": (1024, 4096), "RLIMIT_CORE": (0, -1)},
    affinity=(0, 1),
    nice=0,
)


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--a=b"], [("--a", "b")]),
        (["--a", "b"], [("--a", "b")]),
        (["--a", "--b"], [("--a", None), ("--b", None)]),
        (["--a", "-1"], [("--a", "-1")]),
        (["--a", "-1.5", "c"], [("--a", "-1.5"), ("", "c")]),
        (["serve", "model", "--a"], [("", "serve"), ("", "model"), ("--a", None)]),
        (["--a=", "b"], [("--a", ""), ("", "b")]),
        (["--a", ""], [("--a", "")]),
        (["--a=b=c"], [("--a", "b=c")]),
        (["-", "-x", "-"], [("", "-"), ("-x", "-")]),
        ([], []),
    ],
)
def test_arguments_are_read_as_options_and_their_values(argv: list[str], wanted: list[tuple[str, str | None]]) -> None:
    assert options(argv) == wanted


NAMES = st.from_regex(r"--[a-z]{1,6}", fullmatch=True)
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
PLAIN = VALUES.filter(lambda text: not text.startswith("-"))


@given(st.lists(st.tuples(NAMES, PLAIN), max_size=5))
def test_a_value_after_equals_or_after_a_space_is_one(pairs: list[tuple[str, str]]) -> None:
    joined = [f"{name}={value}" for name, value in pairs]
    apart = [word for pair in pairs for word in pair]
    assert options(joined) == options(apart) == pairs
    left, right = replace(PRODUCTION, argv=tuple(joined)), replace(PRODUCTION, argv=tuple(apart))
    assert differences(left, right) == ()


@given(st.lists(st.tuples(NAMES, PLAIN | st.none(), st.booleans()), max_size=5), NAMES, VALUES)
def test_an_option_that_was_set_has_that_value_once_and_the_others_keep_theirs(
    given_: list[tuple[str, str | None, bool]], name: str, value: str
) -> None:
    argv: list[str] = []
    for key, one, joined in given_:
        argv += [key] if one is None else [f"{key}={one}"] if joined else [key, one]
    set_ = change(argv, name, value)
    assert [one for key, one in options(set_) if key == name] == [value]
    assert option(set_, name) == value
    assert [pair for pair in options(set_) if pair[0] != name] == [pair for pair in options(argv) if pair[0] != name]
    for gone in (None, False):
        assert [key for key, _ in options(change(argv, name, gone))] == [key for key, _ in options(argv) if key != name]
    assert options(change(argv, name, True))[-1] == (name, None)


@pytest.mark.parametrize(
    ("argv", "name", "value", "wanted"),
    [
        (("s", "--port", "1", "--x"), "--port", "2", ("s", "--x", "--port", "2")),
        (("s", "--port=1", "--portal=3"), "--port", "2", ("s", "--portal=3", "--port", "2")),
        (("--a", "--b", "1"), "--a", None, ("--b", "1")),
        (("--a", "-1", "--b"), "--a", None, ("--b",)),
        (("--a", "1", "--a=2"), "--a", "3", ("--a", "3")),
        (("--a", "1"), "--a", True, ("--a",)),
        (("s",), "--a", "-x", ("s", "--a=-x")),
        (("s",), "--a", "-1", ("s", "--a", "-1")),
        (("s", "--a"), "--a", False, ("s",)),
    ],
)
def test_one_option_is_set_or_taken_away(
    argv: tuple[str, ...], name: str, value: str | bool | None, wanted: tuple[str, ...]
) -> None:
    assert change(argv, name, value) == wanted


def with_arm(raw: dict[str, Any], **parts: Any) -> tuple[Experiment, Arm]:
    """The demo, its last arm with other parts."""
    raw["arms"][2] = {"name": "fix", "port": 8002, "checks": ["b"]} | parts
    found = parse(raw, file="x")
    return found, found.arm("fix")


def test_an_arm_is_production_with_its_declared_differences_and_the_mark(raw: dict[str, Any]) -> None:
    found, arm = with_arm(
        raw,
        overlay="fix",
        arguments={"--max-model-len": "1024", "--eager": None, "--new": True},
        environment={"MODE": "slow", "SWITCH": "1"},
    )
    wanted = expected(PRODUCTION, found, arm, "w-1", "here")
    assert options(wanted.argv[1:]) == [
        *[("", "serve"), ("--api-key", SECRET), ("--port", "8002"), ("--max-model-len", "1024"), ("--new", None)],
        *(("--overlay", f"{target}={source}") for target, source in mounts(found, arm, "w-1").items()),
    ]
    assert wanted.environ == {**PRODUCTION.environ, "MODE": "slow", "SWITCH": "1", MARK: "w-1"}
    assert (wanted.cwd, wanted.exe, wanted.uid) == (PRODUCTION.cwd, PRODUCTION.exe, PRODUCTION.uid)
    assert wanted.process == PRODUCTION.process
    assert differences(wanted, wanted) == ()
    assert undeclared(PRODUCTION, wanted, found, arm, "w-1", "here") == ""


def test_declared_mounts_are_the_overlays_files_under_its_own_name(raw: dict[str, Any]) -> None:
    found, arm = with_arm(raw, overlay="fix")
    assert mounts(found, arm, "w") == {
        f"moe/{name}.py": f"/var/tmp/fairtrial-demo/fix/moe/{name}.py"
        for name in ("dispatch", "experts", "fence", "router")
    }
    assert mounts(found, found.arm("off"), "w") == {}


def test_an_arm_on_productions_own_port_keeps_its_arguments(raw: dict[str, Any]) -> None:
    found, arm = with_arm(raw, port=8001)
    assert expected(PRODUCTION, found, arm, "w", "here").argv == PRODUCTION.argv


@pytest.mark.parametrize(
    ("observed", "wanted"),
    [
        ({"exe": "/other"}, [("exe", "exe", "/usr/bin/server", "/other")]),
        ({"cwd": "/tmp"}, [("cwd", "cwd", "/", "/tmp")]),
        ({"uid": 0}, [("uid", "uid", "1000", "0")]),
        ({"affinity": (0,)}, [("affinity", "affinity", "(0, 1)", "(0,)")]),
        ({"nice": 5}, [("nice", "nice", "0", "5")]),
        (
            {"limits": {"RLIMIT_NOFILE": (1024, 4095), "RLIMIT_CORE": (0, -1)}},
            [("limit", "RLIMIT_NOFILE", "1024:4096", "1024:4095")],
        ),
        ({"limits": {"RLIMIT_NOFILE": (1024, 4096)}}, [("limit", "RLIMIT_CORE", "0:-1", None)]),
        ({"environ": {"PATH": "/bin", "API_TOKEN": SECRET}}, [("environment", "MODE", "fast", None)]),
        ({"environ": {**PRODUCTION.environ, "X": "1"}}, [("environment", "X", None, "1")]),
        ({"environ": {**PRODUCTION.environ, "MODE": ""}}, [("environment", "MODE", "fast", "")]),
        ({"argv": (*PRODUCTION.argv, "--x")}, [("argument", "--x", None, "(set)")]),
        ({"argv": (*PRODUCTION.argv, "--port", "2")}, [("argument", "--port", "8001", "8001 2")]),
        ({"argv": (*PRODUCTION.argv[:5], *PRODUCTION.argv[6:])}, [("argument", "--eager", "(set)", None)]),
        ({"argv": (*PRODUCTION.argv, "stray")}, None),
    ],
)
def test_every_difference_is_found(observed: dict[str, Any], wanted: list[tuple[str, str, str, str]] | None) -> None:
    found = differences(PRODUCTION, replace(PRODUCTION, **observed))
    if wanted is None:
        assert [(item.what, item.name) for item in found] == [("argument", "(positional)")]
    else:
        assert found == tuple(Difference(what=a, name=b, expected=c, observed=d) for a, b, c, d in wanted)


TEXT = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=12, max_size=20)


@given(TEXT, TEXT)
def test_what_is_undeclared_is_named_without_any_value(old: str, new: str) -> None:

    found = parse(tomllib.loads((PACKAGE / "demo.toml").read_text()), file="x")
    production = replace(
        PRODUCTION,
        argv=("/usr/bin/server", "--api-key", old, f"--token={old}", "--seed", "1"),
        environ={"API_TOKEN": old, "GONE": old},
    )
    wanted = expected(production, found, found.arm("off"), "w", "here")
    environ = {**wanted.environ, "API_TOKEN": new, "ADDED": new}
    del environ["GONE"]
    argv = tuple(word.replace(old, new) for word in wanted.argv)
    said = undeclared(production, replace(wanted, environ=environ, argv=argv), found, found.arm("off"), "w", "here")
    parts = {"environment ADDED is undeclared", "environment GONE is missing"}
    if old != new:
        parts |= {"environment API_TOKEN differs", "argument --api-key differs", "argument --token differs"}
    assert set(said.split("; ")) == parts
    assert old not in said
    assert new not in said


def test_an_identity_is_what_inspect_says_and_gives_the_same_process_back() -> None:
    found = {
        "argv": list(PRODUCTION.argv),
        "environ": dict(PRODUCTION.environ),
        "cwd": PRODUCTION.cwd,
        "exe": PRODUCTION.exe,
        "uid": PRODUCTION.uid,
        "process": {
            "limits": {"RLIMIT_CORE": [0, -1], "RLIMIT_NOFILE": [1024, 4096]},
            "affinity": [0, 1],
            "nice": 0,
        },
    }
    assert observed(found) == PRODUCTION
    assert PRODUCTION.process == found["process"]


def test_the_restore_gives_production_back_what_it_ran_under_and_proves_it(raw: dict[str, Any]) -> None:
    document = restoration.document(
        parse(raw, file="x"), window="w", host="here", production=PRODUCTION, log="/a", held_b=7
    )
    start, prove = document["steps"]["restore.start"][0], document["steps"]["restore.prove"][0]
    for verb in (start, prove):
        assert verb["process"] == PRODUCTION.process
        assert (verb["exe"], verb["uid"]) == (PRODUCTION.exe, PRODUCTION.uid)


def test_a_restore_passes_by_the_floor_and_production_and_a_forward_stop_by_neither(raw: dict[str, Any]) -> None:
    found = parse(raw, file="x")
    floor_b = int(found.guards.memory_floor_gib * (1 << 30))
    end = restoration.document(found, window="w", host="here", production=PRODUCTION, log="/a", held_b=7)["steps"][
        "restore.end"
    ][0]
    assert (end["memory"]["floor_b"], end["memory"]["production_b"]) == (floor_b, 7)
    assert restoration.memory(found, 7, floor=False)["floor_b"] is None


UNIT = "/system.slice/vllm.service"


@pytest.mark.parametrize(
    ("cgroup", "own", "wanted"),
    [
        (f"0::{UNIT}\n", "0::/user.slice/user-1000.slice/session-3.scope\n", "vllm.service"),
        (f"9:name=systemd:{UNIT}/worker\n4:memory:/\n0::/\n", "0::/\n", "vllm.service"),
        # in the same unit as we are, such as a shell's or the one of the connection
        ("0::/system.slice/ssh.service\n", "0::/system.slice/ssh.service\n", None),
        ("0::/system.slice/ssh.service\n", "0::/system.slice/ssh.service/below\n", None),
        # a scope is what somebody started by hand, also below the unit of all that a user runs
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-u3.scope\n", "0::/\n", None),
        ("0::/user.slice/user@1000.service/app.slice/vllm.service\n", "0::/user.slice/a.scope\n", "vllm.service"),
        ("0::/docker/0123\n", "0::/\n", None),
        ("0::/system.slice/docker-0123.scope\n", "0::/\n", None),
        ("", "", None),
    ],
)
def test_a_service_that_is_not_our_own_is_a_supervisor(cgroup: str, own: str, wanted: str | None) -> None:
    assert supervisor(cgroup, own) == wanted


FIT: dict[str, Any] = {
    "pid": 7,
    "uid": 1000,
    "cgroup": "0::/\n",
    "startable": None,
    "ungivable": [],
    "log": "/var/log/production",
    "log_why": None,
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"uid": 1}, ["uid 1,", "run fairtrial as uid 1"]),
        ({"cgroup": f"0::{UNIT}\n"}, ["is run by a supervisor (unit vllm.service)", "site.close"]),
        ({"startable": "its working folder is gone: /x"}, ["its working folder is gone: /x"]),
        ({"ungivable": ["nice -5 (here 0)", "RLIMIT_NPROC 9:9 (here 8:8)"]}, ["nice -5 (here 0), RLIMIT_NPROC 9:9"]),
        (
            {"log": None, "log_why": "its output goes to pipe:[3]"},
            ["its output goes to pipe:[3]", "under [production]"],
        ),
    ],
)
def test_what_could_not_be_brought_back_is_refused_with_the_reason_and_a_way_out(
    changed: dict[str, Any], words: list[str]
) -> None:
    host = {"uid": 1000, "cgroup": "0::/\n"}
    assert unrestorable(FIT, host) is None
    said = unrestorable(FIT | changed, host)
    assert said is not None
    assert [word for word in words if word not in said] == []
