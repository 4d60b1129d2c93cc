from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomllib
from conftest import PACKAGE
from hypothesis import given
from hypothesis import strategies as st

from fairtrial import plan
from fairtrial.canonical import canonical, sha256
from fairtrial.errors import ExperimentError, Refused
from fairtrial.experiment import Experiment, load, parse, schema

DEMO = tomllib.loads((PACKAGE / "demo.toml").read_text())

Command = Callable[..., Any]
Place = Sequence[str | int]


def put(value: Any, place: Place, new: object) -> None:
    """Set what lies at a place; lists and tables on the way are there already or are made."""
    for part in place[:-1]:
        value = value.setdefault(part, {}) if isinstance(value, dict) else value[part]
    value[place[-1]] = new


def changed(place: Place, new: object) -> dict[str, Any]:
    raw = copy.deepcopy(DEMO)
    put(raw, place, new)
    return raw


def keys(raw: dict[str, Any]) -> list[str]:
    """The keys of all faults of an experiment; none: it is sound."""
    try:
        parse(raw, file="x.toml")
    except ExperimentError as error:
        return [fault.key for fault in error.faults]
    return []


def places(value: object, prefix: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a value, the value itself left out."""
    parts: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, below in parts:
        yield (*prefix, part)
        yield from places(below, (*prefix, part))


TEN = {
    "arms.0.arguments.eager": (("arms", 0, "arguments"), {"eager": True}),
    "arms.1.name": (("arms", 1, "name"), "off"),
    "bounds.abort_min": (("bounds",), {"submit_min": 10, "abort_min": 9}),
    "guards.cadence_s": (("guards", "cadence_s"), 60),
    "name": (("name",), "Not A Name"),
    "overlays.fix.files.1.sha256": (("overlays", "fix", "files", 1, "sha256"), "abc"),
    "production.host": (("production", "host"), "elsewhere"),
    "protocol.cells.1.prompt_tokens": (("protocol", "cells", 1, "prompt_tokens"), 0),
    "server.colour": (("server", "colour"), "red"),
    "site.close.0": (("site",), {"close": [["reboot"]]}),
    "waits.lease_s": (("waits", "lease_s"), 0),
}
"""More than ten faults, of single values and across parts, by the keys that they are to be named with."""


def test_every_fault_is_named_at_once_with_its_key() -> None:
    raw = copy.deepcopy(DEMO)
    for place, new in TEN.values():
        put(raw, place, new)
    with pytest.raises(ExperimentError) as caught:
        parse(raw, file="x.toml")
    assert [fault.key for fault in caught.value.faults] == sorted(TEN)
    text = str(caught.value)
    assert text.splitlines()[0] == f"x.toml: {len(TEN)} faults"
    assert all(re.search(rf"^  {re.escape(key)}: \S", text, re.MULTILINE) for key in TEN)


def test_the_command_line_names_every_fault_and_exits_2(command: Command, tmp_path: Path) -> None:
    text = (PACKAGE / "demo.toml").read_text()
    broken = {
        'name = "demo"': 'name = "Demo!"',
        'model = "reference"': 'model = ""',
        'host = "here"': 'host = "there"',
        "token_ids = [0, 256]": "token_ids = [256, 0]",
        "limit_s = 60": "limit_s = -1",
        "tokens = 513": "tokens = 0",
        "settle_s = 2": "settle_s = 0",
        "memory_min_gib = 0.5": "memory_min_gib = nothing",
        'rule = "match"': 'rule = "guess"',
        "stop_limit_s = 20": "stop_limit_s = 91",
    }
    for old, new in broken.items():
        assert old in text
        text = text.replace(old, new.replace("nothing", '"much"'), 1)
    (tmp_path / "x.toml").write_text(text)
    for words in (["plan"], ["register"], ["run"], ["run", "--execute", "--out", tmp_path / "out"]):
        ended = command(words[0], tmp_path / "x.toml", *words[1:])
        assert ended.returncode == 2
        assert ended.stdout == ""
        assert "Traceback" not in ended.stderr
        named = re.findall(r"^  (\S+): ", ended.stderr, re.MULTILINE)
        # Whether ids are in order is seen only where the protocol is otherwise sound.
        assert named == [
            "checks.probe.tokens",
            "guards.memory_min_gib",
            "name",
            "production.stop_limit_s",
            "protocol.limit_s",
            "reading.rule",
            "server.model",
            "waits.settle_s",
        ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("place", "good", "bad"),
    [
        (("schema",), ["fairtrial.experiment/1"], ["fairtrial.experiment/2", None]),
        (("name",), ["a", "0-a", "a" * 40], ["", "-a", "A", "a" * 41, "a\n", "a/b", 1]),
        (("question",), ["?"], ["", 1]),
        (("purpose",), ["p"], [""]),
        (("hosts",), [], [{}, {"here": {}, "there": {}}, {"Here": {}}]),
        (("hosts", "here", "state"), ["/x"], ["x", ""]),
        (("hosts", "here", "switch"), ["none", "process"], ["systemd"]),
        (("hosts", "here", "gpu"), [False], [True]),
        (("hosts", "here", "backend"), ["local"], ["ssh"]),
        (("server", "model"), ["m"], [""]),
        (("server", "completions"), ["/c"], ["c", "/a b", "/a?b", "/a#b"]),
        (("server", "counters_wait_s"), [0, 0.5], [-0.1]),
        (("server", "mount_argument"), ["--m={target}:{source}"], ["--m={target}", "--m={source}"]),
        (("production", "port"), [1, 65535], [0, 65536, "80", 80.5, True]),
        (("production", "start_limit_s"), [0.1, 1], [0, -1, "1"]),
        (("production", "stop_limit_s"), [0.1, 90], [0, 90.1]),
        (("production", "grace_s"), [0.1, 80], [0, 80.1]),
        (("overlays", "fix", "generated"), ["/g"], ["g"]),
        (("overlays", "fix", "files"), [], [[]]),
        (
            ("overlays", "fix", "files", 0, "target"),
            ["a", "/a/b"],
            ["", "../a", "/a/../b", "a//b", "./a", "moe/fence.py"],
        ),
        (("overlays", "fix", "files", 0, "sha256"), ["0" * 64], ["0" * 63, "A" * 64, "0" * 65]),
        (("arms",), [], [[]]),
        (("arms", 0, "port"), [1, 65535], [0, 65536]),
        (("arms", 0, "arguments"), [{"--a": True, "-b": "1", "--c": None}], [{"a": "1"}, {"--a": 1}]),
        (("arms", 0, "environment"), [{"A": "1", "B": None}], [{"A": 1}]),
        (("arms", 0, "tells"), [[{"log": "^a+$"}]], [[{"log": "("}], [{"log": ""}]]),
        (("arms", 0, "checks"), [["a", "aa"], []], [["a"], ["c"]]),
        (("arms", 1, "overlay"), ["fix", None], ["none-such"]),
        (("protocol", "token_ids"), [[0, 1]], [[0, 0], [-1, 5], [5, 1], [0], [0, 1, 2], [0.5, 2]]),
        (("protocol", "limit_s"), [0.1], [0]),
        (("protocol", "coldness"), ["unproved"], ["hoped"]),
        (("protocol", "cells", 0, "prompt_tokens"), [1], [0, 1.5]),
        (("protocol", "cells", 0, "output_tokens"), [1], [0]),
        (("protocol", "cells", 0, "name"), ["w"], ["long", ""]),
        (("protocol", "cells", 1, "timed"), [], [False]),
        (("checks", "greedy", "prompts"), [1], [0]),
        (("checks", "greedy", "output_tokens"), [1, 300], [0, 301]),
        (("checks", "greedy", "file"), [], ["prompts.jsonl"]),
        (("checks", "probe", "tokens"), [1], [0]),
        (("checks", "probe", "mass_min"), [0.1, 1], [0, 1.1]),
        (("checks", "probe", "entropy_min_nats"), [0], [-0.1]),
        (("checks",), [], [None]),
        (("waits", "idle_s"), [0.1], [0]),
        (("waits", "lease_s"), [1, 3600], [0.9, 3601]),
        (("guards", "cadence_s"), [0.1, 5], [0, 5.1]),
        (("guards", "swap_growth_max_mib"), [0], [-1]),
        (("bounds",), [{"submit_min": 1, "abort_min": 2}, {"arm_min": 1}], [{"submit_min": 2, "abort_min": 2}]),
        (("reading", "cell"), [], ["none-such", "warm-up"]),
        (("reading", "off"), [], ["none-such", None, "fix"]),
        (("reading", "rule"), ["none"], ["ab"]),
        (("reading", "thresholds"), [{}, {"band": 1, "reps": 2, "greedy_total": 6}], [{"colour": 1}]),
        (("reading", "thresholds", "band"), [0.1, 1], [0, -1, "1", 10**400]),
        (("reading", "thresholds", "reps"), [2], [3, 2.5]),
        (("reading", "thresholds", "top_n"), [20], [20.5]),
        (("reading", "thresholds", "greedy_total"), [6], [5, 6.0]),
        (("reading", "texts"), [{}], [{"MAYBE": {"meaning": "", "next": ""}}]),
        (("estimates", "start", "seconds"), [0], [-1]),
        (("site",), [{"close": [["/bin/true", "x"]]}], [{"close": [[]]}, {"close": [["true"]]}]),
        (("secrets",), [["X"]], ["X", [1]]),
        (("arms", 0, "reps"), [], [0, 1]),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_every_field_has_its_limits_and_a_fault_names_the_key(
    place: Place, good: list[object], bad: list[object]
) -> None:
    for value in good:
        assert keys(changed(place, value)) == [], value
    for value in bad:
        found = keys(changed(place, value))
        assert found, value
        part = str(place[0])
        assert all(key.split(".")[0] in (part, "arms", "reading", "(file)") for key in found), (value, found)


@pytest.mark.parametrize("key", ["schema", "name", "question", "purpose", "hosts", "server", "production", "arms"])
def test_what_is_missing_is_named(key: str) -> None:
    raw = copy.deepcopy(DEMO)
    del raw[key]
    assert key in keys(raw)


def test_rule_match_needs_three_different_arms_of_equal_reps() -> None:
    assert keys(changed(("reading", "cause"), "off")) == ["reading"]
    raw = changed(("arms", 2, "reps"), 2)
    assert keys(raw) == ["arms.2.reps"]
    raw["reading"] = {"rule": "none", "cell": "long"}
    assert keys(raw) == []
    assert parse(raw, file="x").reps(parse(raw, file="x").arms[2], parse(raw, file="x").protocol.cells[1]) == 2


def test_an_overlay_needs_a_way_to_tell_the_process() -> None:
    raw = copy.deepcopy(DEMO)
    del raw["server"]["mount_argument"]
    assert keys(raw) == ["arms.1.overlay", "arms.2.overlay"]


def test_the_hash_does_not_depend_on_the_order_of_keys_or_on_spelling() -> None:
    def backwards(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: backwards(value[key]) for key in reversed(value)}
        return [backwards(part) for part in value] if isinstance(value, list) else value

    first, second = parse(DEMO, file="a"), parse(backwards(DEMO), file="b")
    assert list(DEMO) != list(backwards(DEMO))
    assert first.registration() == second.registration()
    assert first.sha256 == second.sha256 == sha256(first.registration())
    spelled = (PACKAGE / "demo.toml").read_text().replace("settle_s = 2", "settle_s = 2.0").encode()
    assert load(spelled, file="c").sha256 == first.sha256
    assert load(spelled.replace(b"settle_s = 2.0", b"settle_s = 2.5"), file="c").sha256 != first.sha256


def test_a_registration_reads_back_as_the_same_experiment() -> None:
    experiment = parse(DEMO, file="a")
    again = parse(json.loads(experiment.registration()), file="registration")
    assert again == experiment
    assert again.registration() == experiment.registration()
    assert experiment.registration() == canonical(json.loads(experiment.registration()))


def test_canonical_bytes_are_sorted_tight_and_utf_8() -> None:
    assert canonical({"b": [1, 2.5, None], "a": "é"}) == '{"a":"é","b":[1,2.5,null]}'.encode()
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))


def test_the_demo_pins_what_its_overlays_are() -> None:
    assert DEMO["overlays"].keys() == {path.parent.name for path in PACKAGE.glob("reference/overlays/*/sums.json")}
    for name, overlay in DEMO["overlays"].items():
        folder = PACKAGE / "reference" / "overlays" / name
        pinned = {
            file["target"]: {"base_sha256": file.get("base_sha256"), "sha256": file["sha256"]}
            for file in overlay["files"]
        }
        assert pinned == json.loads((folder / "sums.json").read_text())
        for file in overlay["files"]:
            assert sha256((PACKAGE / file["source"]).read_bytes()) == file["sha256"]
            if "base_sha256" in file:
                assert sha256((PACKAGE / "reference" / file["target"]).read_bytes()) == file["base_sha256"]
            assert Path(file["source"]).parent == Path("reference/overlays") / name


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"name = ", "is not TOML"),
        (b'name = "\xff"', "is not UTF-8"),
        (b"x = 1979-05-27", "JSON cannot"),
        (b"x = nan", "JSON cannot"),
        (b"x = inf", "JSON cannot"),
        (b"x = " + b"9" * 5000, "is not TOML"),
        (b"x = " + b"[" * 20000, "too deeply"),
        (b"a = 1\na = 2", "is not TOML"),
        (b"", "Field required"),
    ],
)
def test_what_is_no_experiment_file_is_said(content: bytes, says: str) -> None:
    with pytest.raises(ExperimentError, match=says):
        load(content, file="x.toml")


def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path, command: Command) -> None:
    from fairtrial.conduct import open_experiment

    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(Refused, match="name an experiment file"):
            open_experiment(path)
        ended = command("plan", path)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert str(path) in ended.stderr
        assert "Traceback" not in ended.stderr


def names(part: type[Any]) -> set[str]:
    return {field.alias or name for name, field in part.model_fields.items()}


def test_the_schema_describes_every_part_and_takes_the_demo(command: Command) -> None:
    document = json.loads(command("plan", PACKAGE / "demo.toml", "--schema").stdout)
    assert document == json.loads(json.dumps(schema()))
    assert document["properties"].keys() == names(Experiment)
    assert document["additionalProperties"] is False
    assert list(violations(DEMO, document, document)) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("name",), "Demo!"),
        (("colour",), "red"),
        (("production", "port"), 0),
        (("arms", 0, "checks"), ["c"]),
        (("protocol", "token_ids"), [0]),
        (("overlays", "fix", "files", 0, "sha256"), "x"),
        (("server", "metrics"), 1),
        (("waits", "idle_s"), 0),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(place: Place, value: object) -> None:
    raw = changed(place, value)
    assert keys(raw)
    assert list(violations(raw, schema(), schema()))


KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def violations(value: Any, rule: dict[str, Any], document: dict[str, Any], at: str = "$") -> Iterator[str]:
    """Where a value breaks a JSON Schema: the keywords that ours uses; any other is a fault of this test."""
    for word, wanted in rule.items():
        match word:
            case "$ref":
                yield from violations(value, document["$defs"][wanted.rpartition("/")[2]], document, at)
            case "type" if wanted in ("integer", "number"):
                if isinstance(value, bool) or not isinstance(value, int if wanted == "integer" else (int, float)):
                    yield f"{at}: no {wanted}"
            case "type":
                if not isinstance(value, KINDS[wanted]):
                    yield f"{at}: no {wanted}"
            case "properties" if isinstance(value, dict):
                for name, below in wanted.items():
                    if name in value:
                        yield from violations(value[name], below, document, f"{at}.{name}")
            case "additionalProperties" if isinstance(value, dict):
                for name in value.keys() - rule.get("properties", {}).keys():
                    if wanted is False:
                        yield f"{at}.{name}: not known"
                    elif isinstance(wanted, dict):
                        yield from violations(value[name], wanted, document, f"{at}.{name}")
            case "patternProperties" if isinstance(value, dict):
                for pattern, below in wanted.items():
                    for name in value:
                        if re.search(pattern, name):
                            yield from violations(value[name], below, document, f"{at}.{name}")
            case "propertyNames" if isinstance(value, dict):
                for name in value:
                    yield from violations(name, wanted, document, f"{at}.{name}")
            case "required" if isinstance(value, dict):
                yield from (f"{at}.{name}: missing" for name in wanted if name not in value)
            case "minProperties" if isinstance(value, dict) and len(value) < wanted:
                yield f"{at}: too few"
            case "maxProperties" if isinstance(value, dict) and len(value) > wanted:
                yield f"{at}: too many"
            case "items" if isinstance(value, list):
                for index, below in enumerate(value):
                    yield from violations(below, wanted, document, f"{at}.{index}")
            case "prefixItems" if isinstance(value, list):
                for index, (below, one) in enumerate(zip(value, wanted, strict=False)):
                    yield from violations(below, one, document, f"{at}.{index}")
            case "minItems" if isinstance(value, list) and len(value) < wanted:
                yield f"{at}: too few"
            case "maxItems" if isinstance(value, list) and len(value) > wanted:
                yield f"{at}: too many"
            case "minLength" if isinstance(value, str) and len(value) < wanted:
                yield f"{at}: too short"
            case "pattern" if isinstance(value, str) and not re.search(wanted, value):
                yield f"{at}: does not fit {wanted}"
            case "minimum" if isinstance(value, int | float) and value < wanted:
                yield f"{at}: under {wanted}"
            case "exclusiveMinimum" if isinstance(value, int | float) and value <= wanted:
                yield f"{at}: not over {wanted}"
            case "maximum" if isinstance(value, int | float) and value > wanted:
                yield f"{at}: over {wanted}"
            case "enum" if value not in wanted:
                yield f"{at}: none of {wanted}"
            case "const" if value != wanted:
                yield f"{at}: not {wanted}"
            case "anyOf":
                if all(list(violations(value, one, document, at)) for one in wanted):
                    yield f"{at}: fits none"
            case _:
                assert word in KEYWORDS, word


KEYWORDS = {"$defs", "default", "description", "title", "properties", "additionalProperties", "patternProperties"} | {
    *("propertyNames", "required", "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems"),
    *("minLength", "pattern", "minimum", "exclusiveMinimum", "maximum", "enum", "const"),
}

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS, lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3)
)
PLACES = list(places(DEMO))


def sound_or_faulty(raw: Any) -> None:
    """An experiment that is read can be planned; one that cannot is refused with its faults, never otherwise."""
    try:
        experiment = parse(raw, file="x.toml")
    except ExperimentError as error:
        faults = error.faults
    else:
        assert plan.text(experiment)
        assert parse(json.loads(experiment.registration()), file="x").sha256 == experiment.sha256
        return
    assert faults
    assert all(fault.message for fault in faults)


@given(st.dictionaries(st.sampled_from(sorted(Experiment.model_fields)) | st.text(max_size=8), JSON, max_size=8))
def test_no_value_whatever_gives_anything_but_an_experiment_error(raw: dict[str, Any]) -> None:
    sound_or_faulty(raw)


@given(st.lists(st.tuples(st.sampled_from(PLACES), JSON), min_size=1, max_size=4))
def test_no_change_of_a_sound_experiment_gives_anything_but_an_experiment_error(
    changes: list[tuple[Place, object]],
) -> None:
    raw = copy.deepcopy(DEMO)
    for place, new in changes:
        try:
            put(raw, place, new)
        except (TypeError, IndexError, AttributeError, KeyError):
            # An earlier change took this place away.
            continue
    sound_or_faulty(raw)


NUMBERS = [place for place in PLACES if isinstance(place[-1], str) and place[-1] not in ("seconds",)]


@given(
    st.sampled_from(NUMBERS),
    st.sampled_from([0, -1, 1, 10**30 + 1, 10**400, 1e-300, 1e300, 0.1, True, "", "x", [], {}]),
)
def test_edges_of_every_field_give_an_experiment_or_its_faults(place: Place, value: object) -> None:
    sound_or_faulty(changed(place, value))


@given(st.binary(max_size=64) | st.text(max_size=64).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_bytes_give_anything_but_an_experiment_error(content: bytes) -> None:
    with pytest.raises(ExperimentError):
        load(content, file="x.toml")
