"""Fixtures that several files share: the demo's experiment as a value, and one real quick window for the whole run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomllib

import fairtrial
from fairtrial.experiment import Experiment, parse

PACKAGE = Path(fairtrial.__file__).parent
WAIT_S = 240
"""How long another window on this machine may take: a host carries one at a time."""


def free_ports() -> int:
    """A port that is free, with a free one after it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            if port < 65000:
                return port


@pytest.fixture
def raw() -> dict[str, Any]:
    """The demo's experiment file, as a value that a test may change."""
    return tomllib.loads((PACKAGE / "demo.toml").read_text())


@pytest.fixture
def experiment(raw: dict[str, Any]) -> Experiment:
    """The demo's experiment."""
    return parse(raw, file="demo.toml")


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``fairtrial`` for real, in a folder and with a state folder of this test."""

    def run(*arguments: object, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        state = {"FAIRTRIAL_STATE": str(tmp_path / "state")}
        return subprocess.run(
            [sys.executable, "-m", "fairtrial", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, **state, **(environ or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture(scope="session")
def quick_demo(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """``fairtrial demo --quick`` as it ended; its last argument is the folder of its evidence."""
    folder = tmp_path_factory.mktemp("quick")
    environ = {**os.environ, "FAIRTRIAL_STATE": str(folder / "state")}
    deadline = time.monotonic() + WAIT_S
    while True:
        port = free_ports()
        argv = [sys.executable, "-m", "fairtrial", "demo", "--quick", "--port", str(port), "--out", str(folder / "out")]
        ended = subprocess.run(argv, env=environ, cwd=folder, capture_output=True, text=True, timeout=300)
        other_window = ended.returncode == 2 and "carries a window's mark" in ended.stderr
        if not other_window or time.monotonic() > deadline:
            break
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.fixture(scope="session")
def quick_window(quick_demo: subprocess.CompletedProcess[str]) -> Path:
    """The evidence of one real quick window. Read it; copy it before changing anything."""
    return Path(quick_demo.args[-1])


@pytest.fixture
def window_copy(quick_window: Path, tmp_path: Path) -> Path:
    """A copy of that evidence, to be changed."""
    return shutil.copytree(quick_window, tmp_path / "out")
