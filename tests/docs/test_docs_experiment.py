"""``docs/experiment.md`` names every key of an experiment file, with its default, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fairtrial.experiment import schema
from fairtrial.reading import MATCH_THRESHOLDS

DOCS = Path(__file__).parents[2] / "docs"


def tables(text: str) -> dict[str, dict[str, str]]:
    """Heading without its brackets -> key -> default, of every table that has keys."""
    found: dict[str, dict[str, str]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ").strip("`[]")
        elif row := re.match(r"\| `(\w+)` \| ([^|]+) \|", line):
            found.setdefault(heading, {})[row[1]] = row[2].strip()
    return found


ENTRY = {"texts": "VERDICT", "estimates": "STEP"}
"""How the documentation calls the free key of a table of tables, where that is not NAME."""


def described(name: str = "Top level", node: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Heading -> JSON Schema object, of every table that an experiment may have."""
    node = node or schema()
    found = {name: node}
    for key, value in node["properties"].items():
        path = key if name == "Top level" else f"{name}.{key}"
        for variant in [value, *value.get("anyOf", [])]:
            entries = [*variant.get("patternProperties", {}).values(), variant.get("additionalProperties")]
            places = [(path, variant), (path, variant.get("items"))]
            places += [(f"{path}.{ENTRY.get(key, 'NAME')}", entry) for entry in entries]
            for place, target in places:
                if isinstance(target, dict) and "$ref" in target:
                    found |= described(place, schema()["$defs"][target["$ref"].rpartition("/")[2]])
    return found


def test_every_key_of_the_schema_is_named_under_its_table_and_no_other() -> None:
    documented = tables((DOCS / "experiment.md").read_text())
    expected = {heading: set(node["properties"]) for heading, node in described().items()}
    assert {heading: set(keys) for heading, keys in documented.items()} == expected


def test_every_default_is_the_one_of_the_schema() -> None:
    documented = tables((DOCS / "experiment.md").read_text())
    wrong = []
    for heading, node in described().items():
        for key, value in node["properties"].items():
            said = documented[heading][key]
            required = key in node.get("required", [])
            if "$ref" in value or any("$ref" in variant for variant in value.get("anyOf", [])):
                due = {"required"} if required else {"see below", "none"}
            elif required:
                due = {"required"}
            elif value.get("default") is None:
                due = {"none"}
            else:
                due = {f"`{json.dumps(value['default'])}`"}
            if said not in due:
                wrong.append((heading, key, said, due))
    assert wrong == []


def test_the_default_thresholds_are_the_rules_own() -> None:
    text = (DOCS / "experiment.md").read_text()
    line = text[text.index("Thresholds: ") :].split("\n\n")[0]
    said = {name: float(value) for name, value in re.findall(r"`(\w+)` ([0-9.]*[0-9])", line)}
    limits = MATCH_THRESHOLDS.as_json()
    limits.pop("probe_tokens")
    assert said == limits
