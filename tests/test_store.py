from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fairtrial.backends.simulated import Memory
from fairtrial.errors import Refused
from fairtrial.store import PARTIAL, RESERVE, RESERVE_BYTES, Directory, Store

# Every implementation of the store passes the contract below.
WORLDS: dict[str, Callable[[Path], Store]] = {
    "directory": lambda path: Directory.create(path / "out"),
    "memory": lambda path: memory(),
}


def memory() -> Memory:
    """As ``SimulatedControl.create`` makes one."""
    store = Memory()
    store.write(RESERVE, b"")
    return store


@pytest.fixture(params=sorted(WORLDS))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return WORLDS[request.param](tmp_path)


def test_what_was_written_is_read_back_whole(store: Store) -> None:
    store.write("arms/off/identity.json", b"one")
    store.write("arms/off/identity.json", b"2")
    assert store.read("arms/off/identity.json") == b"2"


def test_appended_pieces_stand_one_after_the_other(store: Store) -> None:
    store.append("a/cells.jsonl", b"one\n")
    store.append("b.jsonl", b"other\n")
    store.append("a/cells.jsonl", b"two\n")
    store.close()
    store.append("a/cells.jsonl", b"three\n")
    assert store.read("a/cells.jsonl") == b"one\ntwo\nthree\n"


def test_append_goes_on_after_write_remove_and_truncate_of_the_same_file(store: Store) -> None:
    store.append("x", b"old")
    store.write("x", b"new")
    store.append("x", b"+")
    assert store.read("x") == b"new+"
    store.truncate("x", 2)
    store.append("x", b"!")
    assert store.read("x") == b"ne!"
    store.remove("x")
    store.append("x", b"again")
    assert store.read("x") == b"again"


def test_names_are_sorted_and_hold_every_file(store: Store) -> None:
    for name in ("b", "a/z", "a/b/c"):
        store.write(name, b"")
    assert store.names() == ["a/b/c", "a/z", "b", RESERVE]
    assert store.exists("a/z")
    assert not store.exists("a")
    assert not store.exists("b/z")


def test_digest_is_the_sha256_of_the_content(store: Store) -> None:
    store.write("x", b"abc")
    assert store.digest("x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_file_that_is_not_there_is_not_read_removed_or_cut(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.read("x")
    with pytest.raises(FileNotFoundError):
        store.digest("x")
    with pytest.raises(FileNotFoundError):
        store.remove("x")
    with pytest.raises(FileNotFoundError):
        store.truncate("x", 0)


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../x", "./x", "a//b", "a/", "a\0b"])
def test_a_name_that_leaves_the_store_is_refused(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="names no file below a store"):
        store.write(name, b"")
    with pytest.raises(ValueError, match="names no file below a store"):
        store.append(name, b"")
    with pytest.raises(ValueError, match="names no file below a store"):
        store.read(name)


def test_the_mark_of_unfinished_files_is_no_name_to_write(store: Store) -> None:
    with pytest.raises(ValueError, match="not whole yet"):
        store.write("x" + PARTIAL, b"")
    with pytest.raises(ValueError, match="not whole yet"):
        store.append("x" + PARTIAL, b"")


def test_the_reserve_is_given_up_once_and_asking_again_is_fine(store: Store) -> None:
    if isinstance(store, Directory):
        assert len(store.read(RESERVE)) == RESERVE_BYTES
    store.release_reserve()
    assert not store.exists(RESERVE)
    store.release_reserve()


def test_only_the_owner_reads_files_and_enters_folders(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    before = os.umask(0)
    try:
        store = Directory.create(out)
        store.write("a/b/whole", b"")
        store.append("c/d/appended", b"")
    finally:
        os.umask(before)
    for path in [out, *out.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_an_empty_folder_is_taken_and_closed_to_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    Directory.create(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_folder_that_holds_anything_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(Refused, match="not empty"):
        Directory.create(tmp_path)
    assert os.listdir(tmp_path) == ["x"]


def test_a_file_is_no_folder_for_evidence(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(Refused, match="cannot keep evidence"):
        Directory.create(tmp_path / "x")
    with pytest.raises(Refused, match="no such folder"):
        Directory.open(tmp_path / "x")


def test_the_reserve_is_space_and_not_a_hole(tmp_path: Path) -> None:
    Directory.create(tmp_path / "out")
    assert (tmp_path / "out" / RESERVE).stat().st_blocks * 512 >= RESERVE_BYTES


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    store = Directory.create(tmp_path / "out")
    store.write("folder/x", b"")
    with pytest.raises(IsADirectoryError):
        store.write("folder", b"a file cannot replace a folder")
    assert store.names() == ["folder/x", RESERVE]


def test_append_does_not_follow_a_link_out_of_the_folder(tmp_path: Path) -> None:
    store = Directory.create(tmp_path / "out")
    (tmp_path / "outside").write_bytes(b"mine")
    (tmp_path / "out" / "x").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"):
        store.append("x", b"more")
    assert (tmp_path / "outside").read_bytes() == b"mine"
    assert store.names() == [RESERVE]


def test_file_and_folder_are_synced_before_a_change_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Directory.create(tmp_path / "out")
    synced: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), store.path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)

    def syncs(change: Callable[[], None]) -> list[str]:
        synced.clear()
        change()
        return list(synced)

    assert syncs(lambda: store.write("a/x", b"1")) == [".", "a/x" + PARTIAL, "a"]
    assert syncs(lambda: store.append("a/y", b"1")) == ["a", "a/y"]
    assert syncs(lambda: store.append("a/y", b"2")) == ["a/y"]
    assert syncs(lambda: store.truncate("a/y", 1)) == ["a/y"]
    assert syncs(lambda: store.remove("a/y")) == ["a"]


FULL_DISK = """
import json, os, sys
from pathlib import Path
from fairtrial.backends.simulated import Memory
from fairtrial.errors import Refused
from fairtrial.store import Directory, RESERVE

disk = Path(sys.argv[1])

def fill():
    with open(disk / "ballast", "ab", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(4096))
        except OSError:
            pass

def attempt(change):
    try:
        change()
    except OSError as error:
        return error.strerror
    return "ok"

store = Directory.create(disk / "out")
store.append("log", b"first\\n")
store.write("whole", b"old")
fill()
seen = {}
seen["append"] = attempt(lambda: store.append("log", bytes(8192)))
seen["reserve after"] = store.exists(RESERVE)
seen["log bytes"] = len(store.read("log"))
fill()
seen["append on a full disk"] = attempt(lambda: store.append("log", bytes(1 << 20)))
seen["log bytes then"] = len(store.read("log"))
seen["write on a full disk"] = attempt(lambda: store.write("whole", bytes(1 << 20)))
seen["whole"] = store.read("whole").decode()
seen["names"] = store.names()
try:
    Directory.create(disk / "second")
except Refused as error:
    seen["second"] = str(error).replace(str(disk), "DISK")
os.remove(disk / "ballast")
third = Directory.create(disk / "third")
fill()
seen["write"] = attempt(lambda: third.write("whole", bytes(1 << 20)))
seen["third"] = third.names()
print(json.dumps(seen))
"""


def test_a_full_disk_takes_the_reserve_first_and_never_half_a_record(tmp_path: Path) -> None:
    # In a mount namespace of its own: root may make one, others where user namespaces are allowed.
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    mount = 'mount -t tmpfs -o size=11m none "$1" && exec "$2" -c "$3" "$1"'
    ran = subprocess.run(
        [*unshare, "sh", "-c", mount, "sh", str(tmp_path), sys.executable, FULL_DISK],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, f"needs user namespaces, or root: {ran.stderr}"
    full = "No space left on device"
    assert json.loads(ran.stdout) == {
        "append": "ok",
        "reserve after": False,
        "log bytes": 6 + 8192,
        "append on a full disk": full,
        "log bytes then": 6 + 8192,
        "write on a full disk": full,
        "whole": "old",
        "names": ["log", "whole"],
        "second": f"DISK/second: cannot keep evidence there ({full}); name a new or empty folder that you may "
        "write, on a disk with space",
        "write": "ok",
        "third": ["whole"],
    }
