"""The overlays: what they replace, what they compute, what they cost, and that the defect is an honest one.

Costs are the CPU time of one thread, each configuration in a process of its own: this file, run as a program, is
that process. It takes the size of the context and prompt lengths, and prints what it measured as JSON.
"""

from __future__ import annotations

import ast
import cProfile
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# One BLAS thread, as the server has; it is read when numpy is loaded.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import pytest
from test_reference_model import dice, greedy, prefill

import fairtrial
from fairtrial.errors import Refused
from fairtrial.reference.model import log_softmax
from fairtrial.reference.mount import TARGETS, mount
from fairtrial.reference.server import load
from fairtrial.reference.shape import Floats

REFERENCE = Path(fairtrial.__file__).parent / "reference"
OVERLAYS = REFERENCE / "overlays"
NAMES = ("cause", "fix", "unsafe")
SWITCH = {"cause": "REFERENCE_TRACE", "fix": "REFERENCE_MOE_FENCE", "unsafe": "REFERENCE_MOE_FENCE"}
LONG, SHORT = 262_144, 1_100


def overlay(name: str) -> dict[str, Path]:
    """The mounts of an overlay; of ``""``, none."""
    return {f"moe/{path.name}": path for path in sorted((OVERLAYS / name).glob("*.py"))} if name else {}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- the files


@pytest.mark.parametrize("name", NAMES)
def test_an_overlay_replaces_three_files_and_adds_one(name: str) -> None:
    targets = set(overlay(name))
    assert targets > set(TARGETS)
    assert len(targets) == 4
    assert all(sha256(OVERLAYS / name / Path(t).name) != sha256(REFERENCE / t) for t in TARGETS)


@pytest.mark.parametrize("name", NAMES)
def test_the_sums_are_those_of_the_files(name: str) -> None:
    right = {
        target: {"base_sha256": sha256(REFERENCE / target) if target in TARGETS else None, "sha256": sha256(path)}
        for target, path in overlay(name).items()
    }
    assert json.loads((OVERLAYS / name / "sums.json").read_text()) == right, json.dumps(right, indent=2)


def test_the_loaded_bytes_are_what_is_hashed(tmp_path: Path) -> None:
    copy = tmp_path / "router.py"
    copy.write_bytes((REFERENCE / "moe/router.py").read_bytes() + b"\n# another\n")
    assert mount({}).sources == {target: sha256(REFERENCE / target) for target in sorted(TARGETS)}
    assert mount({"moe/router.py": copy}).sources["moe/router.py"] == sha256(copy)
    assert mount({}).sources["moe/router.py"] == sha256(REFERENCE / "moe/router.py"), "one mount leaks into the next"


@pytest.mark.parametrize(
    ("target", "content", "message"),
    [
        ("moe/router.py", None, "is not a file"),
        ("router.py", "", "no such target"),
        ("moe/../api.py", "", "no such target"),
        ("moe/ruoter.py", "", "nothing imports it"),
        ("moe/router.py", "def route(", "do not load"),
        ("moe/router.py", "from . import absent", "do not load"),
    ],
)
def test_an_overlay_that_cannot_be_mounted_is_refused(
    tmp_path: Path, target: str, content: str | None, message: str
) -> None:
    source = tmp_path / "source.py"
    if content is not None:
        source.write_text(content)
    with pytest.raises(Refused, match=message):
        mount({target: source})


# ---- the answers


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, bool], tuple[Floats, list[int]]]:
    """(overlay, switched) -> all logits of a prompt, and a greedy answer."""
    found = {}
    for name in ("", *NAMES):
        for switched in (False, True) if name else (False,):
            if switched:
                os.environ[SWITCH[name]] = "1"
            try:
                model = load(model_size="tiny", max_model_len=SHORT, overlays=overlay(name))[0]
            finally:
                if switched:
                    del os.environ[SWITCH[name]]
            states, _ = prefill(model, dice(7, 400))
            found[name, switched] = model.logits(states), greedy(model, dice(8, 90), 32)
    return found


@pytest.mark.parametrize(
    ("name", "switched"), [("cause", False), ("cause", True), ("fix", False), ("fix", True), ("unsafe", False)]
)
def test_answers_are_bit_equal(
    name: str, switched: bool, answers: dict[tuple[str, bool], tuple[Floats, list[int]]]
) -> None:
    logits, chosen = answers["", False]
    assert np.array_equal(answers[name, switched][0], logits)
    assert answers[name, switched][1] == chosen


def test_the_unsafe_overlay_really_changes_the_answers(
    answers: dict[tuple[str, bool], tuple[Floats, list[int]]],
) -> None:
    (logits, chosen), (other_logits, other_chosen) = answers["", False], answers["unsafe", True]
    p, q = log_softmax(logits[-1]), log_softmax(other_logits[-1])
    assert float((np.exp(p) * (p - q)).sum()) > 0.01
    assert chosen != other_chosen


@pytest.mark.parametrize("name", NAMES)
def test_an_added_file_reports_whether_its_switch_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, on in (("0", False), ("1", True)):
        monkeypatch.setenv(SWITCH[name], value)
        model, mounted = load(model_size="tiny", max_model_len=SHORT, overlays=overlay(name))
        prefill(model, dice(1, 70))
        (report,) = mounted.added.values()
        assert report is not None
        said = report()
        assert said["enabled"] is on
        assert bool(said["events" if name == "cause" else "fenced"]) is on


# ---- the cost


def run(name: str, switched: bool, rows: int, *arguments: object) -> str:
    """Run this file in a process with the server's own environment; return what it prints."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("REFERENCE_")}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REFERENCE.parents[1])}
    if switched:
        environment[SWITCH[name]] = "1"
    argv = [sys.executable, __file__, name, str(rows), *map(str, arguments)]
    return subprocess.run(argv, env=environment, check=True, capture_output=True, text=True).stdout


def measure(name: str, switched: bool, rows: int, *tokens: int) -> list[float]:
    """CPU seconds of a cold prefill of each length, the least of three."""
    seconds: list[float] = json.loads(run(name, switched, rows, *tokens))
    return seconds


@pytest.fixture(scope="module")
def off() -> list[float]:
    return measure("", False, LONG, 512, 1024)


@pytest.fixture(scope="module")
def fix() -> list[float]:
    return measure("fix", True, LONG, 512, 1024)


def test_the_fix_costs_far_less_in_a_large_context(off: list[float], fix: list[float]) -> None:
    assert fix[0] < 0.65 * off[0]


def test_tracing_makes_the_gap_vanish(off: list[float], fix: list[float]) -> None:
    (cause,) = measure("cause", True, LONG, 512)
    assert cause < 0.65 * off[0]
    assert 0.8 < cause / fix[0] < 1.25


@pytest.mark.parametrize("name", NAMES)
def test_an_overlay_without_its_switch_gains_nothing(name: str, off: list[float]) -> None:
    (seconds,) = measure(name, False, LONG, 512)
    assert 0.8 < seconds / off[0] < 1.25


def test_there_is_no_gap_in_a_small_context() -> None:
    (off,), (fix,) = measure("", False, SHORT, 512), measure("fix", True, SHORT, 512)
    assert 0.8 < fix / off < 1.25


def test_doubling_the_prompt_at_least_doubles_the_gap(off: list[float], fix: list[float]) -> None:
    assert off[1] - fix[1] >= 2 * (off[0] - fix[0])


def test_the_gap_grows_with_the_context(off: list[float], fix: list[float]) -> None:
    (quarter,) = measure("", False, LONG // 4, 512)
    assert 2.5 * (quarter - fix[0]) < off[0] - fix[0]


def test_a_profile_names_the_function_that_costs() -> None:
    own: dict[str, float] = json.loads(run("", False, LONG, "profile", 512))
    assert max(own, key=lambda name: own[name]) == "dispatch.py place", own


# ---- the source


def words(path: Path) -> Iterator[str]:
    """Every word of the code of a file: names, attributes and strings, without docstrings."""
    tree = ast.parse(path.read_text())
    strings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        for text in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", "")):
            yield from re.split(r"[^a-z]+", str(text or "").lower())
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in strings:
            yield from re.split(r"[^a-z]+", node.value.lower())


def test_no_source_waits_or_knows_an_arm() -> None:
    forbidden = {"sleep", "arm", "arms", "story", "cause", "fix", "unsafe", "refuted", "confirmed", "window", "demo"}
    sources = sorted(REFERENCE.rglob("*.py"))
    assert len(sources) > 20
    for path in sources:
        # The name of a model's size, in the table of sizes and as the default of the command line.
        allowed = {"demo"} if path.name in ("shape.py", "__main__.py") else set()
        assert not (forbidden - allowed) & set(words(path)), path


def test_the_port_decides_nothing() -> None:
    for path in sorted(REFERENCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Compare):
                assert not {"port", "environ"} & set(re.split(r"\W+", ast.unparse(getattr(node, "test", node)))) or (
                    path.parent.parent.name == "overlays"
                ), path


def own_seconds(profile: cProfile.Profile) -> dict[str, float]:
    """Seconds of each function of fairtrial, with what it calls elsewhere, without what it calls in fairtrial."""
    profile.create_stats()
    own: dict[str, float] = {}
    ours = {label: stat for label, stat in profile.stats.items() if "fairtrial/reference/" in label[0]}
    for (file, _, name), (_, _, _, cumulative_s, callers) in ours.items():
        key = f"{Path(file).name} {name}"
        own[key] = own.get(key, 0.0) + cumulative_s
        for label, (_, _, _, within_s) in callers.items():
            if label in ours:
                caller = f"{Path(label[0]).name} {label[2]}"
                own[caller] = own.get(caller, 0.0) - within_s
    return own


def main(name: str, rows: str, *arguments: str) -> object:
    model, _ = load(model_size="tiny", max_model_len=int(rows), overlays=overlay(name))
    if arguments[0] == "profile":
        profile = cProfile.Profile()
        profile.runcall(prefill, model, dice(1, int(arguments[1])))
        return own_seconds(profile)
    least = []
    for length in map(int, arguments):
        seconds = []
        for _ in range(3):
            begun = time.thread_time()
            prefill(model, dice(1, length))
            seconds.append(time.thread_time() - begun)
        least.append(min(seconds))
    return least


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
