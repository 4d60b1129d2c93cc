"""README's own experiment runs as it is shown; links of every page lead somewhere; no page names a machine."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

from fairtrial.experiment import load
from fairtrial.switch import procs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
BUSY_S = 240
"""How long another window on this machine may take: a machine carries one at a time."""


def section(heading: str) -> str:
    below = README[README.index(f"\n## {heading}\n") + 4 :]
    return below.split("\n## ")[0]


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", section("Your own experiment"), re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def port() -> Iterator[int]:
    """A free port with a free one after it. What still listens there in the end is ended, by pid."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            found = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", found + 1))
                break
            except (OSError, OverflowError):
                continue
    yield found
    for one in procs.listeners(found):
        os.kill(one.pid, signal.SIGKILL)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_experiment_of_the_readme_runs_by_the_commands_of_the_readme(tmp_path: Path, port: int) -> None:
    written = block("toml").replace("8001", str(port)).replace("8002", str(port + 1))
    short = "[waits]\nidle_s = 0.5\nstill_s = 0.5\nsettle_s = 1\nlease_s = 10\n"
    written = written.replace("[hosts.here]", f'{short}\n[hosts.here]\nstate = "{tmp_path}/state"', 1)
    (tmp_path / "context.toml").write_text(written)
    start, *commands = block("sh").replace("8001", str(port)).strip().splitlines()
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def run(line: str) -> subprocess.CompletedProcess[str]:
        shell = ["bash", "-c", line]
        return subprocess.run(shell, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180)

    assert start.endswith("&")
    run(f"{start.removesuffix('&')} >production.log 2>&1 &")
    deadline = time.monotonic() + 30
    while not listens(port):
        assert time.monotonic() < deadline, (tmp_path / "production.log").read_text()
        time.sleep(0.05)

    ended = {}
    for line in commands:
        deadline = time.monotonic() + BUSY_S
        while True:
            done = run(line)
            if "carries a window's mark" not in done.stderr or time.monotonic() > deadline:
                break
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        ended[line.split()[1]] = done.stdout

    assert "ARMS" in ended["plan"]
    assert "production: proved to be back" in ended["run"]
    medians = {
        row[1]: float(row[2]) for row in re.finditer(r"^(as-it-is|short) .*? {3,}(\d+\.\d+) ", ended["run"], re.M)
    }
    assert medians["short"] < medians["as-it-is"]
    assert "every hash holds" in ended["verify"]
    assert ended["read"] == ended["run"]
    assert listens(port)


def test_the_experiment_of_the_readme_is_the_smallest() -> None:
    whole = tomllib.loads(block("toml"))
    assert load(block("toml").encode(), file="README.md").name == "context"
    assert set(whole) == {
        "schema", "name", "question", "purpose", "hosts", "server", "production", "arms", "protocol", "reading",
    }  # fmt: skip


def test_every_make_target_that_is_shown_exists_and_every_target_is_explained() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert set(re.findall(r"^\| `make (\w+)` \|", contributing, re.MULTILINE)) == targets
    assert set(re.findall(r"`make (\w+)`", README)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    named = re.findall(r"`((?:fairtrial|examples|benchmarks|tests)/[\w./-]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_a_path_of_one_machine(page: Path) -> None:
    assert re.findall(r"(?<!\w)/(?:home|root|work|Users|tmp)/\S*", page.read_text()) == []
