"""Which part may load which, and how large a part may be."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE
from test_core_is_pure import imported

ROOT = PACKAGE.parent
LINES = 400
LARGER = {"experiment.py", "conduct.py", "stream.py", "reference/api.py"}
"""Modules that have outgrown the limit. Take one away when it has shrunk; add none."""

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "overlays" not in path.parts)


CAMPAIGN = sorted(path for path in (ROOT / "offload").rglob("*.py") if "tests" not in path.parts)


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT))


def loads(path: Path) -> set[str]:
    return set(imported(ast.parse(path.read_text())))


def loaded_by(code: str) -> set[str]:
    """The modules that a new interpreter has loaded after some code."""
    shown = f"{code}\nimport sys\nprint(*sorted(sys.modules))"
    environ = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", shown], env=environ, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.split())


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name not in ("switch",)], ids=name_of)
def test_the_engine_never_loads_a_campaign_nor_its_own_reference_server(path: Path) -> None:
    found = loads(path)
    assert not {name for name in found if name.split(".")[0] == "offload"}
    if "reference" not in path.relative_to(PACKAGE).parts:
        assert not {name for name in found if name.startswith("fairtrial.reference")}


@pytest.mark.parametrize("path", [path for path in MODULES if path.parent.name == "switch"], ids=name_of)
def test_the_host_program_loads_the_standard_library_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {name.name.split(".")[0] for name in node.names} <= sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1 or str(node.module).split(".")[0] in {*sys.stdlib_module_names, "__future__"}


def test_the_command_line_needs_no_extra() -> None:
    found = loaded_by("import fairtrial.cli")
    assert "fairtrial.runner" in found
    assert not found & {"numpy", "starlette", "uvicorn", "jinja2", "altair", "scipy", "fairtrial.reference"}


def test_a_plan_loads_only_the_core() -> None:
    found = loaded_by("import fairtrial.plan")
    assert not {
        name
        for name in found
        if re.match(r"fairtrial\.(runner|backends|client|store|conduct|switch|forward|undo|demo|reference)", name)
    }


def test_the_campaigns_reading_loads_only_the_core() -> None:
    found = loaded_by("import offload.launch.windows.pf1_window, offload.up2_checks")
    core = {"errors", "canonical", "reading"}
    assert {name.split(".")[1] for name in found if name.startswith("fairtrial.")} == core
    assert not found & {"argparse", "asyncio", "h11", "pydantic", "random", "socket", "subprocess"}


def test_the_campaigns_driver_loads_no_runner() -> None:
    found = loaded_by("import offload.prefill_cause2.match_requests")
    assert "fairtrial.client.request" in found
    assert not {name for name in found if re.match(r"fairtrial\.(runner|measure|experiment|conduct|reference)", name)}


def test_no_module_is_larger_than_the_limit_but_those_that_are_known_to_be() -> None:
    large = {name_of(path) for path in (*MODULES, *CAMPAIGN) if len(path.read_text().splitlines()) > LINES}
    assert large - LARGER == set()


def test_no_name_says_nothing() -> None:
    """Domain nouns: a name that fits anything names nothing."""
    empty = {"manager", "helper", "helpers", "util", "utils", "task", "job", "session", "data", "info"}
    for path in (*MODULES, *CAMPAIGN):
        names = {path.stem}
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                    names.add(node.name)
                case ast.arg():
                    names.add(node.arg)
                case ast.Name(ctx=ast.Store()):
                    names.add(node.id)
        for name in names:
            words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
            if name != "server_info":  # vLLM's own name for it
                assert empty.isdisjoint(word.lower() for word in words), f"{name_of(path)}: {name}"
