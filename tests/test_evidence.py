from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fairtrial import ledger
from fairtrial.canonical import sha256
from fairtrial.errors import Refused
from fairtrial.evidence import SUMS, Commands, next_restore, reseal, seal, unseal, verify
from fairtrial.ledger import Ledger
from fairtrial.secrets import Screen, Secrets
from fairtrial.store import PARTIAL, RESERVE, Directory

REGISTRATION = b'{"experiment":"e"}'


class Ticks:
    """A clock that moves by a millisecond whenever it is asked."""

    def __init__(self) -> None:
        self.ns = 0

    def utc(self) -> float:
        return 1_796_000_000 + self.monotonic_ns() / 1e9

    def monotonic_ns(self) -> int:
        self.ns += 1_000_000
        return self.ns


@pytest.fixture
def store(tmp_path: Path) -> Directory:
    """What a runner that was killed has left: nothing is sealed, the reserve is there."""
    store = Directory.create(tmp_path / "out")
    store.write("registration.json", REGISTRATION)
    records = Ledger.create(store, Ticks())
    records.append("begin", registration_sha256=sha256(REGISTRATION))
    records.append("release.begin")
    store.append("arms/off/cells.jsonl", b'{"rep":1}\n')
    store.write("summary.json", b"{}")
    return store


def found(path: Path, given: str | None = None) -> list[tuple[str, str]]:
    return [(problem.kind, problem.name) for problem in verify(path, given).problems]


def test_a_sealed_folder_holds_and_the_seal_is_the_hash_of_the_sums(store: Directory) -> None:
    sealed_as = seal(store)
    assert sealed_as == sha256(store.read(SUMS))
    assert not store.exists(RESERVE)
    verification = verify(store.path, sealed_as)
    assert verification.problems == ()
    assert verification.seal == sealed_as
    assert [line[66:] for line in store.read(SUMS).decode().splitlines()] == [
        "arms/off/cells.jsonl",
        "ledger.jsonl",
        "registration.json",
        "summary.json",
    ]


def test_sha256sum_reads_the_seal_too(store: Directory) -> None:
    store.write("arms/off/traces/a\\b\nc", b"odd")
    seal(store)
    assert found(store.path) == []
    subprocess.run(["sha256sum", "--quiet", "--strict", "-c", SUMS], cwd=store.path, check=True, timeout=30)


def test_names_that_are_no_text_are_sealed_too(store: Directory) -> None:
    odd = os.fsdecode(b"arms/off/caf\xe9")
    (store.path / odd).write_bytes(b"odd")
    seal(store)
    assert found(store.path) == []
    (store.path / odd).unlink()
    assert found(store.path) == [("missing", odd)]
    assert "caf\\udce9" in str(verify(store.path).problems[0])


def test_what_a_killed_runner_had_not_written_whole_is_no_evidence(store: Directory) -> None:
    (store.path / ("summary.json" + PARTIAL)).write_bytes(b"{")
    seal(store)
    assert found(store.path) == []
    assert not store.exists("summary.json" + PARTIAL)


def test_a_killed_runner_leaves_the_one_problem_unsealed(store: Directory) -> None:
    store.append(ledger.NAME, b'{"torn')
    (store.path / ("summary.json" + PARTIAL)).write_bytes(b"{")
    assert found(store.path) == [("unsealed", SUMS)]
    assert verify(store.path).seal is None
    assert "fairtrial restore" in str(verify(store.path).problems[0])


def test_a_runner_killed_before_its_first_record_leaves_unsealed_alone(tmp_path: Path) -> None:
    store = Directory.create(tmp_path / "out")
    assert found(store.path) == [("unsealed", SUMS)]
    Ledger.create(store, Ticks())
    store.append(ledger.NAME, b'{"torn')
    assert found(store.path) == [("unsealed", SUMS)]


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["summary.json", "arms/off/cells.jsonl"])
def test_one_changed_byte_is_named(store: Directory, name: str) -> None:
    seal(store)
    change_a_byte(store.path / name)
    assert found(store.path) == [("changed", name)]


def test_a_removed_file_is_named(store: Directory) -> None:
    seal(store)
    (store.path / "summary.json").unlink()
    assert found(store.path) == [("missing", "summary.json")]


def test_an_added_file_a_link_and_a_pipe_are_named(store: Directory) -> None:
    seal(store)
    (store.path / "arms/report.html").write_text("x")
    (store.path / "link").symlink_to(store.path / "arms")
    (store.path / RESERVE).write_bytes(b"")
    os.mkfifo(store.path / "pipe")
    assert found(store.path) == [
        ("extra", "link"),
        ("extra", "pipe"),
        ("extra", "arms/report.html"),
        ("extra", RESERVE),
    ]


def test_a_link_in_place_of_a_file_is_not_that_file(store: Directory) -> None:
    seal(store)
    (store.path / "summary.json").rename(store.path.parent / "elsewhere")
    (store.path / "summary.json").symlink_to(store.path.parent / "elsewhere")
    assert found(store.path) == [("extra", "summary.json"), ("missing", "summary.json")]


def reversed_lines(sums: bytes) -> bytes:
    return b"".join(reversed(sums.splitlines(keepends=True)))


EDITS: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda sums: sums[:-1],
    "a line that is none": lambda sums: sums + b"hello\n",
    "reversed": reversed_lines,
    "a line twice": lambda sums: sums.splitlines(keepends=True)[0] + sums,
}


@pytest.mark.parametrize("edit", sorted(EDITS))
def test_an_edited_seal_is_named(store: Directory, edit: str) -> None:
    sealed_as = seal(store)
    (store.path / SUMS).write_bytes(EDITS[edit](store.read(SUMS)))
    assert found(store.path) == [("changed", SUMS)]
    assert found(store.path, sealed_as) == [("changed", SUMS), ("seal", SUMS)]


def test_sealing_changed_evidence_again_does_not_pass_for_the_first_seal(store: Directory) -> None:
    sealed_as = seal(store)
    store.write("summary.json", b'{"verdict":"CONFIRMED"}')
    assert seal(store) != sealed_as
    assert found(store.path) == []
    assert found(store.path, sealed_as) == [("seal", SUMS)]


def test_a_broken_chain_is_found_under_a_new_seal_too(store: Directory) -> None:
    lines = store.read(ledger.NAME).splitlines(keepends=True)
    store.write(ledger.NAME, lines[1])
    assert found(store.path) == [("unsealed", SUMS), ("ledger", ledger.NAME)]
    seal(store)
    assert found(store.path) == [("ledger", ledger.NAME)]
    assert "ledger.jsonl:1: seq is 2" in str(verify(store.path).problems[0])


def test_a_sealed_folder_without_a_ledger_is_no_windows(store: Directory) -> None:
    store.remove(ledger.NAME)
    seal(store)
    assert found(store.path) == [("ledger", ledger.NAME)]


def test_another_registration_than_the_ledgers_is_found(store: Directory) -> None:
    store.write("registration.json", b'{"experiment":"f"}')
    seal(store)
    assert found(store.path) == [("registration", "registration.json")]
    store.remove("registration.json")
    seal(store)
    assert found(store.path) == [("registration", "registration.json")]


def test_verify_changes_nothing_and_needs_a_folder(store: Directory) -> None:
    seal(store)
    before = {name: store.read(name) for name in store.names()}
    verify(store.path)
    assert {name: store.read(name) for name in store.names()} == before
    with pytest.raises(Refused, match="no such folder"):
        verify(store.path / "summary.json")


def test_a_restore_after_the_seal_keeps_the_old_one_and_seals_again(store: Directory) -> None:
    first = seal(store)
    sums = store.read(SUMS)
    number = next_restore(store)
    assert number == 1
    unseal(store, number)
    assert found(store.path) == [("unsealed", SUMS)]
    records = Ledger.create(store, Ticks(), name=f"restore/{number}/ledger.jsonl")
    records.append("restore.begin")
    second = reseal(store)
    assert store.read("restore/1/SHA256SUMS.before") == sums
    assert second != first
    assert found(store.path, second) == []
    assert next_restore(store) == 2


def test_reseal_alone_keeps_the_seal_beside_its_own_restore(store: Directory) -> None:
    seal(store)
    store.write("restore/1/cmd/0001-x.json", b"{}")
    reseal(store)
    reseal(store)
    assert [name for name in store.names() if name.endswith(".before")] == [
        "restore/1/SHA256SUMS.before",
        "restore/2/SHA256SUMS.before",
    ]
    assert found(store.path) == []


def test_reseal_where_a_restore_wrote_nothing_is_the_first_restore(store: Directory) -> None:
    seal(store)
    reseal(store)
    assert store.exists("restore/1/SHA256SUMS.before")


def test_a_restore_of_a_killed_runner_has_no_seal_to_keep(store: Directory) -> None:
    unseal(store, next_restore(store))
    assert next_restore(store) == 1
    reseal(store)
    assert found(store.path) == []
    assert not store.exists("restore/1/SHA256SUMS.before")


def test_the_ledger_of_a_restore_is_checked_too(store: Directory) -> None:
    store.write("restore/1/ledger.jsonl", b"{}\n")
    seal(store)
    assert found(store.path) == [("ledger", "restore/1/ledger.jsonl")]


def keep(commands: Commands, *, argv: list[str], stdout: str = "", exit_status: int | None = 0) -> str:
    return commands.keep(
        "off-524.start it",
        argv=argv,
        host="head",
        start_utc_s=0.0,
        end_utc_s=1.5,
        exit_status=exit_status,
        stdout=stdout,
        stderr="",
    )


def test_a_command_is_kept_without_secrets_and_texts(store: Directory) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    secrets = Secrets(b"k" * 32)
    secrets.learn({"API_KEY": "sk-0123456789"}, [])
    commands = Commands(store, secrets=secrets, screen=Screen([text, [5, 6, 7, 8, 9]]))
    stdout = f"ready\nprompt: {text}\nids [5, 6, 7, 8, 9]\nkey sk-0123456789 \udcff\n"
    file = keep(commands, argv=["serve", "--api-key", "short", text], stdout=stdout, exit_status=None)
    assert file == "cmd/0001-off-524.start-it.json"
    record = json.loads(store.read(file))
    mark = secrets.argv(["--api-key", "short"])[1]
    assert record == {
        "argv": ["serve", "--api-key", mark, "‹text›"],
        "host": "head",
        "start": "1970-01-01T00:00:00.000Z",
        "end": "1970-01-01T00:00:01.500Z",
        "exit": None,
        "stdout": f"ready\nkey {secrets.clean('sk-0123456789')} \\udcff\n",
        "stderr": "",
        "lines_dropped": {"stdout": 2, "stderr": 0},
    }


def test_commands_of_a_later_process_are_numbered_on(store: Directory) -> None:
    for number in (1, 2, 3):
        commands = Commands(store, secrets=Secrets(b"k"), screen=Screen())
        assert keep(commands, argv=["true"]).startswith(f"cmd/000{number}-")


def test_in_a_restore_a_command_that_cannot_be_kept_stops_nothing(
    store: Directory, capsys: pytest.CaptureFixture[str]
) -> None:
    store.write("cmd", b"a file where the folder should be")
    commands = Commands(store, secrets=Secrets(b"k"), screen=Screen())
    with pytest.raises(FileExistsError):
        keep(commands, argv=["true"])
    commands.lenient = True
    keep(commands, argv=["true"])
    assert capsys.readouterr().err == (
        "fairtrial: not written (File exists): cmd/0002-off-524.start-it.json: off-524.start it on head, exit 0\n"
    )
