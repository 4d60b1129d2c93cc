"""The core takes values and gives values: no clock, no disk, no host. Its modules are scanned."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PACKAGE

FORBIDDEN = {"os", "pathlib", "subprocess", "socket", "time", "random", "asyncio"} | {
    *("threading", "multiprocessing", "select", "selectors", "signal", "shutil", "tempfile", "io", "datetime", "uuid"),
    *("secrets", "urllib.request", "http", "ssl", "getpass", "platform", "locale", "glob"),
}
CALLS = {"open", "input", "print", "exec", "eval", "__import__"}
CORE = [
    *("experiment", "window", "decide", "guards", "identity", "stream", "restoration", "plan", "rule", "canonical"),
    "errors",
    "secrets",
    *sorted(f"reading/{path.stem}" for path in (PACKAGE / "reading").glob("*.py")),
]


def path_of(module: str) -> Path:
    found = PACKAGE / f"{module}.py"
    return found if found.exists() else PACKAGE / module / "__init__.py"


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            if module.split(".")[0] == "fairtrial":
                yield from (f"{module}.{name.name}" for name in node.names)


def parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def test_the_scan_finds_every_way_to_import() -> None:
    source = "import os.path\ndef f():\n    from time import time\n    from fairtrial import store\n"
    assert set(imported(ast.parse(source))) == {"os.path", "time", "fairtrial", "fairtrial.store"}


def test_the_core_is_all_there() -> None:
    assert len(CORE) >= 17
    assert all(path_of(module).exists() for module in CORE)


@pytest.mark.parametrize("module", CORE)
def test_a_core_module_touches_no_world(module: str) -> None:
    tree = ast.parse(path_of(module).read_text())
    touched = {name for name in imported(tree) if FORBIDDEN & set(parents(name))}
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS
    }
    assert touched == set()
    assert called == set()


@pytest.mark.parametrize("module", CORE)
def test_a_core_module_loads_no_other_part_of_the_engine(module: str) -> None:
    core = {f"fairtrial.{name.replace('/', '.').removesuffix('.__init__')}" for name in CORE} | {"fairtrial"}
    found = set()
    for name in imported(ast.parse(path_of(module).read_text())):
        assert not name.startswith("."), "name the whole module, so that this scan sees it"
        parts = name.split(".")
        if parts[0] == "fairtrial" and path_of("/".join(parts[1:])).exists():
            found.add(name)
    assert found <= core
