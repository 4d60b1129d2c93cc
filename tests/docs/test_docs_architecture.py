"""ARCHITECTURE.md names every module of the package, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fairtrial"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def first_column(heading: str) -> set[str]:
    below = TEXT[TEXT.index(heading) :]
    rows = below[below.index("|---|") :].split("\n\n")[0].splitlines()[1:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_every_module_and_package_has_its_line() -> None:
    modules = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert first_column("## Where to find what") == modules | packages | {"demo.toml"}


def test_every_module_of_the_host_program_has_its_line() -> None:
    modules = {path.stem for path in (PACKAGE / "switch").glob("*.py")} - {"__init__"}
    assert first_column("The host program, one mode a call") == modules


def test_every_module_of_the_campaign_has_its_line() -> None:
    campaign = ROOT / "offload"
    modules = {path.relative_to(campaign).as_posix() for path in campaign.rglob("*.py") if "tests" not in path.parts}
    assert first_column("## The first campaign") == {name for name in modules if not name.endswith("__init__.py")}
