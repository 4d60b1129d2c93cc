from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.canonical import canonical
from fairtrial.errors import EvidenceError, Refused
from fairtrial.ledger import NAME, Ledger, read, utc_text
from fairtrial.store import Directory


class Ticks:
    """A clock that moves by a millisecond whenever it is asked."""

    def __init__(self) -> None:
        self.ns = 0

    def utc(self) -> float:
        return 1_796_000_000 + self.monotonic_ns() / 1e9

    def monotonic_ns(self) -> int:
        self.ns += 1_000_000
        return self.ns


class Full(Directory):
    """A directory whose disk takes no more appends while ``full`` is set."""

    full = False

    def append(self, name: str, content: bytes) -> None:
        if self.full:
            # The kernel's own answer of a full device, without filling one.
            Path("/dev/full").write_bytes(content)
        super().append(name, content)


def chain(count: int) -> bytes:
    content = b""
    prev = ""
    for seq in range(1, count + 1):
        line = canonical({"seq": seq, "at": "x", "mono_ns": seq, "prev": prev, "kind": "step", "é": seq})
        prev = hashlib.sha256(line).hexdigest()
        content += line + b"\n"
    return content


def test_a_record_has_number_times_chain_kind_and_fields(tmp_path: Path) -> None:
    store = Directory.create(tmp_path / "out")
    ledger = Ledger.create(store, Ticks())
    first = ledger.append("hold.begin", registration_sha256="ab")
    second = ledger.append("hold.end", hosts=("a", "b"))
    lines = store.read(NAME).splitlines()
    assert first == {
        "seq": 1,
        "at": "2026-11-30T00:53:20.001Z",
        "mono_ns": 2_000_000,
        "prev": "",
        "kind": "hold.begin",
        "registration_sha256": "ab",
    }
    assert second["prev"] == hashlib.sha256(lines[0]).hexdigest()
    assert second["hosts"] == ["a", "b"]
    assert read(store.read(NAME)) == ledger.records == [first, second]
    assert lines == [canonical(first), canonical(second)]


def test_times_are_utc_with_milliseconds() -> None:
    assert utc_text(1.9996) == "1970-01-01T00:00:02.000Z"
    assert utc_text(1_796_000_000) == "2026-11-30T00:53:20.000Z"


def test_a_second_ledger_is_refused_and_a_missing_one_is_no_window(tmp_path: Path) -> None:
    store = Directory.create(tmp_path / "out")
    with pytest.raises(EvidenceError, match=r"ledger\.jsonl: missing"):
        Ledger.open(store, Ticks())
    Ledger.create(store, Ticks()).append("hold.begin")
    with pytest.raises(Refused, match=r"ledger\.jsonl: there already"):
        Ledger.create(store, Ticks())


def test_a_field_may_not_replace_what_the_ledger_writes(tmp_path: Path) -> None:
    ledger = Ledger.create(Directory.create(tmp_path / "out"), Ticks())
    with pytest.raises(ValueError, match="seq"):
        ledger.append("hold.begin", seq=7)


def test_what_json_cannot_hold_is_not_written(tmp_path: Path) -> None:
    store = Directory.create(tmp_path / "out")
    ledger = Ledger.create(store, Ticks())
    with pytest.raises(ValueError, match="JSON"):
        ledger.append("sample", value=float("nan"))
    with pytest.raises(TypeError):
        ledger.append("sample", value=object())
    ledger.append("sample", value=1.5)
    assert [record["value"] for record in read(store.read(NAME))] == [1.5]
    assert len(ledger.records) == 1


def test_a_restore_continues_the_ledger_of_a_dead_runner(tmp_path: Path) -> None:
    store = Directory.create(tmp_path / "out")
    Ledger.create(store, Ticks()).append("start.begin")
    again = Ledger.open(Directory.open(tmp_path / "out"), Ticks())
    assert [record["kind"] for record in again.records] == ["start.begin"]
    again.append("restore.begin")
    assert [record["seq"] for record in read(store.read(NAME))] == [1, 2]


def test_a_torn_last_line_is_cut_off_and_the_record_says_so(tmp_path: Path) -> None:
    store = Directory.create(tmp_path / "out")
    Ledger.create(store, Ticks()).append("start.begin")
    store.append(NAME, b'{"at":"20')
    ledger = Ledger.open(store, Ticks())
    torn = ledger.append("restore.begin") and ledger.records[1]
    assert torn["kind"] == "torn"
    assert torn["bytes"] == 9
    assert torn["sha256"] == hashlib.sha256(b'{"at":"20').hexdigest()
    assert read(store.read(NAME)) == ledger.records
    assert len(ledger.records) == 3


def test_a_ledger_torn_in_its_first_line_begins_anew(tmp_path: Path) -> None:
    store = Directory.create(tmp_path / "out")
    store.append(NAME, b"{")
    assert [record["kind"] for record in Ledger.open(store, Ticks()).records] == ["torn"]
    assert read(store.read(NAME))[0]["prev"] == ""


@given(st.integers(0, len(chain(4))))
def test_cut_anywhere_a_ledger_reads_up_to_the_last_whole_line(size: int) -> None:
    content = chain(4)[:size]
    assert len(read(content)) == content.count(b"\n")


def test_a_last_line_with_blocks_that_were_never_written_is_torn() -> None:
    assert len(read(chain(2) + b'{"at":"x",' + bytes(20) + b"}\n")) == 2
    assert len(read(chain(2) + bytes(4096))) == 2


@given(st.integers(0, len(chain(4)) - 1), st.integers(1, 255))
def test_a_changed_byte_is_never_read_as_the_same_ledger(position: int, change: int) -> None:
    content = bytearray(chain(4))
    content[position] ^= change
    try:
        records = read(bytes(content))
    except EvidenceError:
        return
    assert records != read(chain(4))


def without_line(number: int) -> bytes:
    lines = chain(4).splitlines(keepends=True)
    return b"".join(lines[: number - 1] + lines[number:])


def edited(line: int, before: bytes, after: bytes) -> bytes:
    lines = chain(4).splitlines(keepends=True)
    assert before in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(before, after)
    return b"".join(lines)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (without_line(1), "x:1: seq is 2, expected 1"),
        (without_line(3), "x:3: seq is 4, expected 3"),
        (edited(2, b'"kind":"step"', b'"kind":"stop"'), "x:3: prev is not the SHA-256"),
        (edited(1, b'"prev":""', b'"prev":"0"'), "x:1: prev is not the SHA-256"),
        (edited(3, b'"seq":3', b'"seq": 3'), "x:3: not in canonical form"),
        (edited(2, b'"seq":2', b'"seq":2,"seq":2'), "x:2: not in canonical form"),
        (edited(2, b'"mono_ns":2', b'"mono_ns":true'), "x:2: not a record"),
        (edited(2, b'"mono_ns":2,', b""), "x:2: not a record"),
        (edited(2, b"2", b"NaN"), "x:2: not a JSON record"),
        (edited(2, b"{", b""), "x:2: not a JSON record"),
        (b"[1]\n" + chain(1), "x:1: not a record"),
        (chain(1) + b"[" * 100_000 + b"\n" + chain(1), "x:2: not a JSON record"),
        (chain(1) + b"\xff\n", "x:2: not a JSON record"),
        (chain(1) + b"\n", "x:2: not a JSON record"),
    ],
)
def test_damage_is_named_by_file_and_line(content: bytes, says: str) -> None:
    with pytest.raises(EvidenceError) as caught:
        read(content, file="x")
    assert str(caught.value).startswith(says)


def test_a_damaged_ledger_is_not_continued_and_not_touched(tmp_path: Path) -> None:
    store = Directory.create(tmp_path / "out")
    store.append(NAME, without_line(2) + b"torn")
    with pytest.raises(EvidenceError, match=r"ledger\.jsonl:2"):
        Ledger.open(store, Ticks())
    assert store.read(NAME) == without_line(2) + b"torn"


def test_a_window_stops_at_a_record_that_cannot_be_written(tmp_path: Path) -> None:
    store = Full.create(tmp_path / "out")
    ledger = Ledger.create(store, Ticks())
    ledger.append("hold.begin")
    store.full = True
    with pytest.raises(OSError, match="No space left"):
        ledger.append("hold.end")
    store.full = False
    ledger.append("hold.end")
    assert read(store.read(NAME)) == ledger.records
    assert len(ledger.records) == 2


def test_in_a_restore_it_goes_to_standard_error_and_is_written_once_it_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Full.create(tmp_path / "out")
    ledger = Ledger.create(store, Ticks(), lenient=True)
    ledger.append("restore.begin")
    store.full = True
    late = ledger.append("restore.stop", host="a")
    assert [record["kind"] for record in read(store.read(NAME))] == ["restore.begin"]
    store.full = False
    lost = ledger.append("restore.claim", seconds=float("nan"))
    kept = ledger.append("restore.end")
    written = read(store.read(NAME))
    assert [record["kind"] for record in written] == ["restore.begin", "restore.stop", "restore.end"]
    assert (written[1]["at"], written[1]["host"], written[2]) == (late["at"], "a", kept)
    assert [record["kind"] for record in ledger.records][1:] == [late["kind"], lost["kind"], kept["kind"]]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"fairtrial: not written (No space left on device): {canonical(late).decode()}"
    assert said[1].startswith("fairtrial: not written (ValueError")


def test_a_command_line_that_is_not_utf_8_is_kept_as_it_was(tmp_path: Path) -> None:
    store = Directory.create(tmp_path / "out")
    kept = Ledger.create(store, Ticks()).append("stop", reason="pid 1 (\udcff\udc80) listens")
    assert read(store.read(NAME)) == [kept]
    assert kept["reason"] == "pid 1 (\udcff\udc80) listens"


def test_a_closed_standard_error_stops_no_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Full.create(tmp_path / "out")
    ledger = Ledger.create(store, Ticks(), lenient=True)
    store.full = True
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    for stream in (full, None):
        monkeypatch.setattr(sys, "stderr", stream)
        ledger.append("restore.claim")
    full.close()
    monkeypatch.setattr(sys, "stderr", full)
    ledger.append("restore.claim")
    monkeypatch.undo()
    assert len(ledger.records) == 3


WRITER = """
import sys, time
from pathlib import Path
from fairtrial.ledger import Ledger
from fairtrial.store import Directory

class Now:
    utc = staticmethod(time.time)
    monotonic_ns = staticmethod(time.monotonic_ns)

ledger = Ledger.create(Directory.create(Path(sys.argv[1])), Now())
while True:
    print(ledger.append("sample", text="x" * 20_000)["seq"], flush=True)
"""


@pytest.mark.parametrize("records", [1, 7, 40])
def test_killed_at_any_instant_a_runner_leaves_every_record_it_was_told_of(tmp_path: Path, records: int) -> None:
    root = Path(__file__).parent.parent
    arguments = [sys.executable, "-c", WRITER, str(tmp_path / "out")]
    with subprocess.Popen(arguments, cwd=root, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(records):
            writer.stdout.readline()
        writer.kill()
        told = [records, *map(int, writer.stdout.read().split())]
    store = Directory.open(tmp_path / "out")
    found = read(store.read(NAME))
    assert len(found) >= told[-1]
    ledger = Ledger.open(store, Ticks())
    ledger.append("restore.begin")
    assert read(store.read(NAME)) == ledger.records
    assert ledger.records[: len(found)] == found
