"""The host program, run as a host runs it: its own process, the standard library alone, real files and processes."""

from __future__ import annotations

import ast
import fcntl
import io
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty.rig import SERVER as FAULTY
from faulty.rig import Rig

from fairtrial.canonical import canonical, sha256
from fairtrial.identity import unrestorable
from fairtrial.switch import bundle, procs, setting
from fairtrial.switch.state import BLOCK, boottime_ns, write_block

Json = dict[str, Any]
WINDOW = f"test-switch-{os.getpid()}"
PYTHON = [sys.executable, "-S", "-E"]
PROGRAM = Path(__file__).parent.parent / "fairtrial" / "switch"

SERVER = """
import http.server, os, signal, sys, time
port, ways = int(sys.argv[1]), sys.argv[2:]
if "deaf" in ways:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "slow-end" in ways:
    def slow(*_):
        time.sleep(0.7)
        os._exit(0)
    signal.signal(signal.SIGTERM, slow)
if "child" in ways and os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        n = 1 if "busy" in ways else 0
        self.answer(b"" if self.path == "/health" else b'run{a="b"} %d\\nwait 0.0\\n' % n)
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b'{"choices": [{"text": "SECRET ANSWER", "finish_reason": %s}]}'
                    % (b"null" if "mute" in ways else b'"length"'))
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer.allow_reuse_address = True
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def until(look: Callable[[], object], limit_s: float = 10.0) -> None:
    """Wait until ``look`` gives something true; fail after the limit."""
    end = time.monotonic() + limit_s
    while not look():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)


def start_of(pid: int) -> int:
    """Return a process's start time, in clock ticks since boot."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()[19])


def runs(pid: int) -> bool:
    """Whether a process runs, zombies not counted."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except FileNotFoundError:
        return False


def listening(port: int) -> bool:
    """Whether something accepts connections on a port."""
    with socket.socket() as link:
        return link.connect_ex(("127.0.0.1", port)) == 0


class Host:
    """One state folder, and how to call the host program on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.program = folder / "host.pyz"
        self.program.write_bytes(bundle())
        self.server = folder / "server.py"
        self.server.write_text(SERVER)
        self.opened: list[subprocess.Popen[bytes]] = []
        self.pids: set[int] = set()

    def argv(self, mode: str, term: int = 0, window: str = WINDOW) -> list[str]:
        words = [*PYTHON, str(self.program), mode, "--state", str(self.state), "--window", window]
        return [*words, "--term", str(term)]

    def open(self, mode: str, args: Json, term: int = 0, window: str = WINDOW) -> subprocess.Popen[bytes]:
        one = subprocess.Popen(
            self.argv(mode, term, window), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.opened.append(one)
        assert one.stdin is not None
        one.stdin.write(json.dumps(args).encode() + b"\n")
        one.stdin.flush()
        return one

    def call(self, mode: str, args: Json, term: int = 0, window: str = WINDOW) -> tuple[int, list[Json]]:
        one = self.open(mode, args, term, window)
        out, _ = one.communicate(timeout=30)
        lines = [json.loads(line) for line in out.splitlines()]
        self.pids.update(line["pid"] for line in lines if line.get("verb") in ("start", "install") and "pid" in line)
        return one.returncode, lines

    def play(self, *verbs: Json, term: int = 0, **args: Any) -> tuple[int, list[Json]]:
        return self.call("play", {"verbs": list(verbs), **args}, term)

    def one(self, verb: Json, term: int = 0) -> Json:
        """Play one verb, which must succeed, and return its line."""
        status, lines = self.play(verb, term=term)
        assert status == 0, lines
        return lines[0]

    def record(self, window: str = WINDOW) -> Json:
        return {
            "schema": "fairtrial.hold/1",
            "window": window,
            "purpose": "a test",
            "owner": "the tests",
            "control_host": os.uname().nodename,
            "pid": os.getpid(),
            "start": start_of(os.getpid()),
            "since": "2026-11-29T12:00:00Z",
            "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "out": "/nowhere",
            "hosts": ["one"],
            "registration_sha256": "0" * 64,
        }

    def hold(self, lease_s: float = 60.0, **changed: Any) -> subprocess.Popen[bytes]:
        """Take the hold; return the opener, after its first answer."""
        one = self.open("hold", {"hold": self.record() | changed, "lease_s": lease_s})
        assert answer(one)["held"]
        # the copy that was compiled at the hold starts faster; here it must outlive the release
        compiled = self.folder / "compiled" / "host.pyz"
        compiled.parent.mkdir(exist_ok=True)
        compiled.write_bytes((self.state / "host.pyz").read_bytes())
        self.program = compiled
        return one

    def run_out(self) -> None:
        """Let the lease have run out now: what a runner does that no longer renews, without the waiting."""
        with (self.state / "lease").open("r+b") as lease:
            fcntl.flock(lease, fcntl.LOCK_EX)
            value = json.loads(lease.read(BLOCK)[:-64])
            write_block(lease.fileno(), value | {"deadline_ns": boottime_ns()})

    def last(self) -> Json:
        found: Json = json.loads((self.state / "last.json").read_text())
        return found

    def files(self) -> set[str]:
        return {one.name for one in self.state.iterdir()}

    def serve(self, port: int, *ways: str, mark: bool = False) -> subprocess.Popen[bytes]:
        """Start a server that is not the host program's, as a leader of its session."""
        environ = ENVIRON | ({"FAIRTRIAL_WINDOW": WINDOW} if mark else {})
        one = subprocess.Popen(self.words(port, *ways), env=environ, cwd=self.folder, start_new_session=True)
        self.opened.append(one)
        until(lambda: listening(port))
        return one

    def words(self, port: int, *ways: str) -> list[str]:
        return [*PYTHON, str(self.server), str(port), *ways]

    def server_of(self, what: str, port: int, *ways: str) -> Json:
        return {
            "verb": "start",
            "what": what,
            "argv": self.words(port, *ways),
            "environ": ENVIRON,
            "cwd": str(self.folder),
            "log": str(self.folder / f"{what}.log"),
            "port": port,
            "limit_s": 5,
        }

    def proof_of(self, port: int, *ways: str, settle_s: float = 0.2, limit_s: float = 6) -> Json:
        return {
            "verb": "prove",
            "port": port,
            "argv": self.words(port, *ways),
            "environ_sha256": sha256(canonical(ENVIRON)),
            "cwd": str(self.folder),
            "ready": "/health",
            "generation": {"path": "/v1/completions", "body": {"prompt": [1, 2], "max_tokens": 1}},
            "settle_s": settle_s,
            "limit_s": limit_s,
        }

    def restore(self, port: int, *, lease_s: float = 1.0, **changed: Any) -> Json:
        """Return a restore.json that brings production back on a port."""
        return {
            "schema": "fairtrial.restore/1",
            "window": WINDOW,
            "lease_s": lease_s,
            "beat_s": 0.2,
            "retry_s": 0.5,
            "lock_limit_s": 3,
            "steps": {
                "restore.end": [END_WINDOW],
                "restore.start": [self.server_of("production", port)],
                "restore.prove": [self.proof_of(port)],
            },
        } | changed

    def arm(self, restore: Json) -> int:
        """Install and arm the switch; return its pid."""
        status, lines = self.play(
            {"verb": "install", "restore": restore}, {"verb": "ask", "nonce": "n1"}, {"verb": "arm"}
        )
        assert status == 0, lines
        assert lines[1]["restore_sha256"] == sha256(canonical(restore))
        return int(lines[0]["pid"])


ENVIRON = {"PATH": os.environ["PATH"], "WHO": "production"}
END_WINDOW: Json = {"verb": "end", "what": "window", "grace_s": 0.3, "limit_s": 10}


def answer(one: subprocess.Popen[bytes]) -> Json:
    """Return the next line of a program that goes on running."""
    assert one.stdout is not None
    assert select.select([one.stdout], [], [], 10)[0], "no answer"
    found: Json = json.loads(one.stdout.readline())
    return found


def silent(one: subprocess.Popen[bytes], wait_s: float) -> bool:
    """Whether a program says nothing for a while."""
    assert one.stdout is not None
    return not select.select([one.stdout], [], [], wait_s)[0]


def say(one: subprocess.Popen[bytes], line: str) -> Json:
    """Send a line and return the answer."""
    assert one.stdin is not None
    one.stdin.write(line.encode() + b"\n")
    one.stdin.flush()
    return answer(one)


def close(one: subprocess.Popen[bytes]) -> int:
    """Close a program's input and return its exit status."""
    one.communicate(timeout=10)
    return one.returncode


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    # whatever this test started names its own folder in its arguments
    needle = os.fsencode(str(tmp_path))
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                found = needle in Path(f"/proc/{name}/cmdline").read_bytes()
                if found:
                    os.kill(int(name), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                pass
    for one in made.opened:
        one.wait(10)
        for pipe in (one.stdin, one.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass


@pytest.fixture
def port() -> int:
    return free_port()


def free_port() -> int:
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        found: int = link.getsockname()[1]
        return found


def actor(kind: str = "restore", pid: int | None = None) -> Json:
    pid = pid or os.getpid()
    return {
        "kind": kind,
        "pid": pid,
        "start": start_of(pid),
        "host": os.uname().nodename,
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    }


def another() -> Json:
    """Return an actor that lives and is not the test itself."""
    return actor(pid=os.getppid())


# -- the program ---------------------------------------------------------------------------------------------------


def test_the_zip_is_the_same_bytes_every_time() -> None:
    assert bundle() == bundle()
    assert {"__main__.py", "switch/__main__.py"} <= set(zipfile.ZipFile(io.BytesIO(bundle())).namelist())


def test_the_program_imports_the_standard_library_and_itself_alone() -> None:
    for source in PROGRAM.glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(), feature_version=(3, 10))):
            if isinstance(node, ast.Import):
                assert {name.name.split(".")[0] for name in node.names} <= sys.stdlib_module_names, source
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] in sys.stdlib_module_names, source


def test_usage_errors_exit_2_and_say_what_is_right(host: Host) -> None:
    for words in (["dance"], ["look", "--state", "/x"], ["look", "--state", "/x", "--window", "a b"]):
        done = subprocess.run([*PYTHON, str(host.program), *words], input=b"{}", capture_output=True, check=False)
        assert done.returncode == 2, words
        assert json.loads(done.stdout)["usage"] is True
    host.hold()
    status, lines = host.play({"verb": "dance"})
    assert status == 2
    assert "prove" in lines[-1]["message"]


def test_a_program_compiled_at_the_hold_is_what_the_state_folder_keeps(host: Host) -> None:
    host.hold()
    host.program = host.state / "host.pyz"
    assert host.play({"verb": "policy"})[0] == 0
    assert "switch/play.pyc" in zipfile.ZipFile(host.program).namelist()


# -- looking -------------------------------------------------------------------------------------------------------


def test_look_makes_nothing_and_tells_ports_peers_marks_and_state(host: Host, port: int) -> None:
    status, (seen,) = host.call("look", {"ports": [port]})
    assert (status, seen["state"]["exists"], host.state.exists()) == (0, False, False)
    server = host.serve(port, mark=True)
    opener = host.hold()
    with socket.create_connection(("127.0.0.1", port)):
        _, (seen,) = host.call("look", {"ports": [port]})
    there = seen["ports"][str(port)]
    assert [one["pid"] for one in there["listeners"]] == [server.pid]
    assert there["listeners"][0]["argv"] == host.words(port)
    assert [one["pid"] for one in there["peers"]] == [os.getpid()]
    assert [one["pid"] for one in seen["marked"]] == [server.pid]
    assert [(one["pid"], one["mode"]) for one in seen["steps"]] == [(opener.pid, "hold")]
    assert seen["state"]["lease"]["live"] is True
    assert seen["state"]["newest"]["name"] == "hold.json"
    assert seen["state"]["hold"] == host.record()


def test_inspect_tells_a_whole_identity(host: Host, port: int) -> None:
    server = host.serve(port, "child")
    for question in ({"port": port}, {"pid": server.pid}):
        status, (seen,) = host.call("inspect", question)
        assert status == 0
        assert (seen["pid"], seen["start"]) == (server.pid, start_of(server.pid))
        assert (seen["argv"], seen["environ"], seen["cwd"]) == (host.words(port, "child"), ENVIRON, str(host.folder))
        assert len(seen["tree"]) == 2
        assert seen["rss_total_b"] >= seen["held_b"] > 0
    assert host.call("inspect", {"port": free_port()})[0] == 1


SLEEP = "import time; time.sleep(60)"


def reason(host: Host, pid: int, log: str | None = None) -> str | None:
    """Why a process could not be production, as preflight asks for it."""
    status, (seen,) = host.call("inspect", {"pid": pid, "log": log})
    assert status == 0, seen
    return unrestorable(seen, host.call("look", {})[1][0]["host"])


def begun(host: Host, argv: list[str], **how: Any) -> int:
    """Start a process as production might be, by default with its output in one file; return its pid."""
    log = (host.folder / "production.log").open("ab")
    one = subprocess.Popen(
        argv, **{"env": ENVIRON, "cwd": host.folder, "stdout": log, "stderr": log, "start_new_session": True} | how
    )
    log.close()
    host.opened.append(one)
    return one.pid


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Pids that are killed at the end, whatever their arguments say."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_production_whose_output_is_one_file_or_nothing_can_be_started_again(host: Host, ended: list[int]) -> None:
    words = [*PYTHON, "-c", SLEEP]
    ended.append(begun(host, words))
    assert reason(host, ended[-1]) is None
    assert host.call("inspect", {"pid": ended[-1]})[1][0]["log"] == str(host.folder / "production.log")
    ended.append(begun(host, words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    assert reason(host, ended[-1]) is None
    assert host.call("inspect", {"pid": ended[-1]})[1][0]["log"] == os.devnull
    # found by name, as a shell finds it
    found = {"PATH": f"/nowhere:{Path(sys.executable).parent}"}
    ended.append(begun(host, [Path(sys.executable).name, *words[1:]], executable=sys.executable, env=found))
    assert reason(host, ended[-1]) is None


@pytest.mark.parametrize("kind", ["pipe", "two files", "deleted", "terminal", "socket"])
def test_production_whose_output_could_not_be_given_back_is_refused_unless_a_file_is_named(
    host: Host, ended: list[int], kind: str
) -> None:
    one, two = (host.folder / "one.log").open("ab"), (host.folder / "two.log").open("ab")
    master, terminal = os.openpty()
    left, right = socket.socketpair()
    out, err = {
        "pipe": (subprocess.PIPE, subprocess.STDOUT),
        "two files": (one, two),
        "deleted": (one, one),
        "terminal": (terminal, terminal),
        "socket": (right, right),
    }[kind]
    ended.append(begun(host, [*PYTHON, "-c", SLEEP], stdout=out, stderr=err))
    if kind == "deleted":
        (host.folder / "one.log").unlink()
    said = reason(host, ended[-1])
    assert said is not None
    assert "under [production]" in said
    assert reason(host, ended[-1], str(host.folder / "named.log")) is None
    assert "is no file" in str(reason(host, ended[-1], str(host.folder)))
    assert "cannot be written" in str(reason(host, ended[-1], str(host.folder / "absent" / "named.log")))
    for opened in (one, two, left, right):
        opened.close()
    os.close(master)
    os.close(terminal)


@pytest.mark.parametrize(
    ("kind", "word"),
    [("folder", "working folder is gone"), ("program", "removed or replaced"), ("name", "names no program")],
)
def test_production_that_could_not_be_started_again_is_refused(
    host: Host, ended: list[int], kind: str, word: str
) -> None:
    folder = host.folder / "own"
    folder.mkdir()
    program = folder / "server"
    shutil.copy(shutil.which("sleep") or "", program)
    name = "a name of its own" if kind == "name" else str(program)
    ended.append(begun(host, [name, "60"], executable=str(program), cwd=folder))
    until(lambda: os.readlink(f"/proc/{ended[-1]}/exe") == str(program))
    if kind == "folder":
        shutil.move(program, host.folder / "server")
        folder.rmdir()
    elif kind == "program":
        program.unlink()
    said = reason(host, ended[-1])
    assert said is not None
    assert word in said


def test_production_of_another_user_is_refused(host: Host, ended: list[int]) -> None:
    if os.geteuid() != 0:
        pytest.fail("this test starts a process of another user: run it as root")
    ended.append(begun(host, [shutil.which("sleep") or "", "60"], user=12345, cwd="/"))
    said = reason(host, ended[-1])
    assert said is not None
    assert "run fairtrial as uid 12345" in said


def test_a_folder_that_others_could_have_written_is_refused(host: Host) -> None:
    elsewhere = host.folder / "elsewhere"
    elsewhere.mkdir()
    host.state.symlink_to(elsewhere)
    status, lines = host.call("hold", {"hold": host.record(), "lease_s": 5})
    assert (status, lines[-1]["untrusted"]) == (1, True)
    host.state.unlink()
    host.state.mkdir()
    host.state.chmod(0o777)
    assert host.call("hold", {"hold": host.record(), "lease_s": 5})[0] == 1
    assert host.files() == set()
    assert "chmod" in host.call("look", {})[1][0]["state"]["why"]


def test_a_folder_of_another_owner_is_refused(host: Host) -> None:
    if os.geteuid() == 0:
        host.state.mkdir()
        os.chown(host.state, 12345, 12345)
    else:
        host.state = Path("/usr")
    status, lines = host.call("hold", {"hold": host.record(), "lease_s": 5})
    assert (status, lines[-1]["untrusted"]) == (1, True)
    assert "run as its owner" in lines[-1]["message"]


# -- hold, lease, terms --------------------------------------------------------------------------------------------


def test_of_eight_openers_at_once_one_holds_and_the_others_name_it(host: Host) -> None:
    openers = [
        host.open("hold", {"hold": host.record(f"{WINDOW}-{n}"), "lease_s": 30}, window=f"{WINDOW}-{n}")
        for n in range(8)
    ]
    answers = [answer(one) for one in openers]
    held = [n for n, line in enumerate(answers) if line.get("held")]
    assert len(held) == 1
    assert all(line["refused"]["window"] == f"{WINDOW}-{held[0]}" for line in answers if not line["ok"])
    assert json.loads((host.state / "hold.json").read_text())["window"] == f"{WINDOW}-{held[0]}"


def test_the_opener_renews_only_when_told_and_ends_with_its_input(host: Host) -> None:
    opener = host.hold()
    block = (host.state / "lease").read_bytes()
    renewed = say(opener, "renew")["renewed"]
    changed = (host.state / "lease").read_bytes()
    assert changed != block
    assert json.loads(changed[:-64])["deadline_ns"] == renewed
    assert silent(opener, 0.3)
    assert (host.state / "lease").read_bytes() == changed
    assert close(opener) == 0
    assert (host.state / "hold.json").exists()


def test_an_opener_whose_term_was_taken_says_lost_and_writes_nothing(host: Host) -> None:
    opener = host.hold()
    host.one({"verb": "take", "from": 0, "actor": another(), "now": True})
    lease = (host.state / "lease").read_bytes()
    assert say(opener, "renew")["lost"] is True
    assert opener.wait(10) == 75
    assert (host.state / "lease").read_bytes() == lease


@pytest.mark.parametrize("damage", [b"", b"x" * 512, None])
def test_a_torn_lease_is_unreadable_and_its_term_may_be_taken(host: Host, damage: bytes | None) -> None:
    host.hold(boot_id="of another machine")
    lease = host.state / "lease"
    lease.write_bytes(lease.read_bytes()[:300] if damage is None else damage)
    assert host.call("look", {})[1][0]["state"]["lease"]["readable"] is False
    assert host.one({"verb": "take", "from": 0, "actor": another()})["why"] == "it has no readable lease"


@pytest.mark.parametrize(
    "changed", [{"boot_id": "of another boot"}, {"deadline_ns": 1 << 62}, {"lease_s": 1e9, "deadline_ns": 1 << 58}]
)
def test_a_lease_of_another_boot_or_absurdly_long_has_run_out(host: Host, changed: Json) -> None:
    host.hold(boot_id="of another machine")
    lease = host.state / "lease"
    value = json.loads(lease.read_bytes()[:-64])
    with lease.open("r+b") as file:
        write_block(file.fileno(), value | changed)
    seen = host.call("look", {})[1][0]["state"]["lease"]
    assert (seen["readable"], seen["live"]) == (True, False)
    assert host.one({"verb": "take", "from": 0, "actor": another()})["why"] == "its lease has run out"


def test_a_live_term_is_not_taken_except_by_its_own_actor_or_now(host: Host) -> None:
    host.hold()
    status, lines = host.play({"verb": "take", "from": 0, "actor": another()})
    assert status == 1
    assert lines[0]["live"]["owner"]["owner"] == "the tests"
    assert lines[0]["live"]["expires_s"] > 30
    assert (host.state / "hold.json").exists()
    own = {"verb": "take", "from": 0, "actor": actor("runner")}
    assert host.one(own)["term"] == 1
    assert host.one(own)["already"] is True
    assert host.play({"verb": "take", "from": 0, "actor": another()})[1][0]["lost"] is True
    assert host.one({"verb": "take", "from": 1, "actor": another(), "now": True})["term"] == 2
    assert (host.last()["state"], host.last()["term"]) == ("restoring", 2)


def test_a_term_is_taken_at_once_when_its_actor_is_dead_or_its_record_says_finished(host: Host) -> None:
    gone = subprocess.Popen(["true"], start_new_session=True)
    dead = {"pid": gone.pid, "start": start_of(gone.pid)}
    gone.wait()
    host.hold(**dead)
    assert "gone" in host.one({"verb": "take", "from": 0, "actor": another()})["why"]
    host.one({"verb": "record", "state": "served"}, term=1)
    assert "served" in host.one({"verb": "take", "from": 1, "actor": actor()})["why"]


def test_a_pid_that_another_process_has_now_is_a_dead_actor(host: Host) -> None:
    host.hold(pid=os.getpid(), start=start_of(os.getpid()) - 1)
    assert "gone" in host.one({"verb": "take", "from": 0, "actor": another()})["why"]


def test_a_young_term_without_any_record_is_live(host: Host) -> None:
    host.hold(boot_id="of another machine")
    for name in ("lease", "last.json"):
        (host.state / name).unlink()
    status, lines = host.play({"verb": "take", "from": 0, "actor": another(), "now": True})
    assert status == 1
    assert 0 < lines[0]["live"]["expires_s"] <= 10


def test_of_two_that_take_at_once_exactly_one_wins(host: Host) -> None:
    host.hold()
    takers = [
        host.open("play", {"verbs": [{"verb": "take", "from": 0, "actor": who, "now": True}]})
        for who in (another(), actor(pid=1), actor("switch", pid=host.opened[0].pid))
    ]
    assert sorted(one.wait(10) for one in takers) == [0, 1, 1]
    assert {"term-1.json", "hold.json"} & host.files() == {"term-1.json"}


def test_renewals_and_takes_exclude_each_other(host: Host) -> None:
    opener = host.hold()
    with (host.state / "lease").open("r+b") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        assert opener.stdin is not None
        opener.stdin.write(b"renew\n")
        opener.stdin.flush()
        taker = host.open("play", {"verbs": [{"verb": "take", "from": 0, "actor": another(), "now": True}]})
        assert silent(opener, 0.3)
        assert silent(taker, 0.3)
    assert answer(taker)["term"] == 1
    answer(opener)
    assert json.loads((host.state / "lease").read_bytes()[:-64])["term"] == 1


def test_a_long_host_name_and_a_long_window_id_fit_the_lease(host: Host) -> None:
    window, name = "w" * 60, "h" * 64
    record = host.record(window) | {"control_host": name, "owner": "o" * 100, "boot_id": "b" * 36}
    assert answer(host.open("hold", {"hold": record, "lease_s": 1.2345}, window=window))["held"]
    who = actor() | {"host": name, "control_host": name, "owner": "o" * 100, "since": "2026-11-29T12:00:00Z"}
    take = {"verbs": [{"verb": "take", "from": 0, "actor": who, "now": True, "lease_s": 1.2345}]}
    status, lines = host.call("play", take, window=window)
    assert (status, lines[0]["term"], "unwritten" in lines[0]) == (0, 1, False)
    _, (seen,) = host.call("look", {}, window=window)
    kept = {key: who[key] for key in ("kind", "pid", "start", "host", "boot_id")}
    assert seen["state"]["lease"]["actor"] == seen["state"]["last"]["actor"] == kept


def test_who_keeps_the_lease_file_for_ever_is_ended_by_who_takes_over(host: Host) -> None:
    host.hold(boot_id="of another machine", lease_s=0.1)
    stuck = host.folder / "stuck" / "host.pyz"
    stuck.parent.mkdir()
    stuck.write_text(
        "import fcntl, sys, time\nfile = open(sys.argv[3] + '/lease')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\nprint(1, flush=True)\ntime.sleep(60)"
    )
    words = [*PYTHON, str(stuck), "renew", "--state", str(host.state), "--window", WINDOW]
    keeper = subprocess.Popen(words, stdout=subprocess.PIPE)
    host.opened.append(keeper)
    answer(keeper)
    assert host.one({"verb": "take", "from": 0, "actor": another()})["term"] == 1
    assert keeper.wait(5) == -signal.SIGKILL


def test_a_stopped_opener_that_wakes_after_a_takeover_has_lost(host: Host) -> None:
    opener = host.hold(lease_s=0.3)
    os.kill(opener.pid, signal.SIGSTOP)
    assert opener.stdin is not None
    opener.stdin.write(b"renew\n")
    opener.stdin.flush()
    until(lambda: not host.call("look", {})[1][0]["state"]["lease"]["live"])
    assert host.one({"verb": "take", "from": 0, "actor": another()})["term"] == 1
    os.kill(opener.pid, signal.SIGCONT)
    assert answer(opener)["lost"] is True


def test_a_taken_term_has_a_renewer_of_its_own(host: Host) -> None:
    host.hold()
    host.one({"verb": "take", "from": 0, "actor": another(), "now": True, "lease_s": 9})
    renewer = host.open("renew", {"lease_s": 30}, term=1)
    say(renewer, "renew")
    assert host.call("look", {})[1][0]["state"]["lease"]["left_s"] > 20
    assert close(renewer) == 0


def test_changing_verbs_of_a_lost_term_change_nothing_and_exit_75(host: Host, port: int) -> None:
    server = host.serve(port, mark=True)
    host.hold()
    host.one({"verb": "take", "from": 0, "actor": another(), "now": True})
    before = host.last()
    for verb in (
        END_WINDOW,
        host.server_of("arm", free_port()),
        {"verb": "record", "state": "proved"},
        {"verb": "lease"},
        {"verb": "arm"},
        {"verb": "off", "what": "hold"},
        {"verb": "off", "what": "switch"},
    ):
        status, lines = host.play(verb)
        assert (status, lines[-1]["lost"]) == (75, True), verb
    assert runs(server.pid)
    assert host.last() == before


def test_another_windows_hold_is_no_fence_of_ours(host: Host) -> None:
    host.hold()
    assert host.call("play", {"verbs": [END_WINDOW]}, window=f"{WINDOW}-2")[0] == 75


# -- end -----------------------------------------------------------------------------------------------------------


def test_end_kills_what_ignores_sigterm_and_children_that_outlive_their_parent(host: Host, port: int) -> None:
    server = host.serve(port, "deaf", "child", mark=True)
    other = host.serve(free_port())
    host.hold()
    line = host.one(END_WINDOW | {"port": port})
    assert len(line["ended"]) == 2
    assert not any(runs(one["pid"]) for one in line["ended"])
    assert not runs(server.pid)
    assert runs(other.pid)
    assert host.one(END_WINDOW | {"port": port})["ended"] == []


def test_end_finds_the_children_of_a_parent_that_is_gone(host: Host, port: int) -> None:
    server = host.serve(port, "child")
    key = [server.pid, start_of(server.pid)]
    (child,) = [one for one in host.call("inspect", {"pid": server.pid})[1][0]["tree"] if one["pid"] != server.pid]
    server.kill()
    server.wait()
    host.hold()
    line = host.one({"verb": "end", "what": "processes", "processes": [key], "grace_s": 0.2})
    assert [one["pid"] for one in line["ended"]] == [child["pid"]]
    assert not runs(child["pid"])


ORPHANED = """
import os, sys, time
if sys.argv[1:] == ["child"]:
    print(os.getpid(), flush=True)
    time.sleep(60)
if os.fork() == 0:
    os.execve(sys.executable, [sys.executable, "-S", "-E", sys.argv[0], "child"], {})
time.sleep(60)
"""


def orphaned(host: Host, port: int) -> tuple[Json, Json, int]:
    """Start an arm, kill its leader; return its start, the start's line, and the child that is left, without a mark."""
    program = host.folder / "orphaned.py"
    program.write_text(ORPHANED)
    start = host.server_of("arm", port) | {"argv": [*PYTHON, str(program)]}
    line = host.one(start)
    log = host.folder / "arm.log"
    until(lambda: log.read_text().endswith("\n"))
    child = int(log.read_text())
    os.kill(line["pid"], signal.SIGKILL)
    until(lambda: not runs(line["pid"]))
    assert Path(f"/proc/{child}/environ").read_bytes() == b""
    return start, line, child


def test_end_finds_an_arms_child_that_lost_its_mark_and_its_leader(host: Host, port: int) -> None:
    host.hold()
    _, _, child = orphaned(host, port)
    assert host.call("look", {})[1][0]["marked"] == []
    assert [one["pid"] for one in host.one(END_WINDOW)["ended"]] == [child]
    assert not runs(child)
    assert host.one(END_WINDOW)["ended"] == []


@pytest.mark.parametrize(("of", "ended"), [("arm", True), ("production", False)])
def test_end_of_the_window_ends_what_a_cut_short_end_of_an_arm_had_named_never_of_production(
    host: Host, port: int, of: str, ended: bool
) -> None:
    server = host.serve(port, "deaf")
    host.hold()
    end = {"verb": "end", "what": "processes", "processes": [[server.pid, start_of(server.pid)]], "of": of}
    step = host.open("play", {"verbs": [end | {"grace_s": 60, "limit_s": 60}]})
    until(lambda: json.loads((host.state / "start.json").read_text())["ending"])
    step.kill()
    step.wait()
    assert [one["pid"] for one in host.one(END_WINDOW)["ended"]] == [server.pid] * ended
    assert runs(server.pid) is not ended


def test_end_leaves_a_pid_that_another_process_has_now(host: Host, port: int) -> None:
    server = host.serve(port)
    host.hold()
    reused = [server.pid, start_of(server.pid) - 1]
    assert host.one({"verb": "end", "what": "processes", "processes": [reused]})["ended"] == []
    assert runs(server.pid)


def test_end_spares_what_it_is_told_to_spare(host: Host, port: int) -> None:
    server = host.serve(port, mark=True)
    host.hold()
    assert host.one(END_WINDOW | {"spare": [[server.pid, start_of(server.pid)]]})["ended"] == []
    assert runs(server.pid)


def test_end_finds_by_pattern_what_has_no_mark(host: Host, port: int) -> None:
    server = host.serve(port)
    host.hold()
    assert host.one(END_WINDOW | {"patterns": [rf"server\.py {port}\b"]})["ended"][0]["pid"] == server.pid


def test_a_busy_server_is_not_ended(host: Host, port: int) -> None:
    names = {"running": ["run"], "waiting": ["wait"]}
    end = {"verb": "end", "what": "processes", "limit_s": 5, "idle": {"port": port, "names": names}}
    server = host.serve(port, "busy")
    host.hold()
    status, lines = host.play(end | {"processes": [[server.pid, start_of(server.pid)]]})
    assert (status, lines[0]["busy"]) == (1, {"running": 1.0, "waiting": 0.0})
    unknown = {"port": port, "names": {"running": ["absent"]}}
    assert host.play(end | {"processes": [[server.pid, start_of(server.pid)]], "idle": unknown})[0] == 1
    assert runs(server.pid)
    server.kill()
    server.wait()
    idle = host.serve(port)
    assert host.one(end | {"processes": [[idle.pid, start_of(idle.pid)]]})["ended"]


def test_end_says_what_still_lives_when_its_limit_is_over(host: Host, port: int) -> None:
    server = host.serve(port, "deaf", mark=True)
    host.hold()
    status, lines = host.play(END_WINDOW | {"grace_s": 60, "limit_s": 0.3})
    assert (status, lines[0]["left"][0]["pid"]) == (1, server.pid)
    assert f"pid {server.pid}" in lines[-1]["message"]


def test_end_waits_until_the_memory_is_back(host: Host) -> None:
    words = [*PYTHON, "-c", "x = bytearray(64 << 20); print(1, flush=True); import time; time.sleep(60)"]
    marked = ENVIRON | {"FAIRTRIAL_WINDOW": WINDOW}
    host.hold()
    # others use this machine: what comes back is theirs to disturb, so only the two ends of the floor are certain
    rule = {"from_b": 32 << 20, "limit_s": 0.5, "still_s": 60}
    floors: list[tuple[Json, int]] = [
        ({"floor_b": 1}, 0),
        ({"floor_b": 1, "production_b": 1}, 0),
        ({"floor_b": 1 << 60}, 1),
        # what production held must be there too, and a stop that no floor is given for waits for the memory itself
        ({"floor_b": 1, "production_b": 1 << 60}, 1),
        ({"floor_b": None, "production_b": 1}, 1),
    ]
    for floor, status in floors:
        hog = subprocess.Popen(words, stdout=subprocess.PIPE, env=marked, start_new_session=True)
        host.opened.append(hog)
        answer(hog)
        ended, lines = host.play(END_WINDOW | {"memory": rule | floor})
        assert ended == status
        assert lines[0]["memory"]["back"] is False
        assert lines[0]["memory"]["waited_s"] > 0.5
        assert lines[0].get("held_b", 64 << 20) >= 64 << 20
        assert not runs(hog.pid)


def test_end_steps_ends_an_opener_that_was_left_behind(host: Host) -> None:
    opener, reader = host.hold(), host.open("read", {"watch": {}})
    answer(reader)
    os.kill(opener.pid, signal.SIGSTOP)
    end = {"verb": "end", "what": "steps", "spare": [[reader.pid, start_of(reader.pid)]], "grace_s": 0.2}
    assert [one["pid"] for one in host.one(end)["ended"]] == [opener.pid]
    assert runs(reader.pid)


# -- start and prove -----------------------------------------------------------------------------------------------


def test_an_arm_carries_the_mark_and_inherits_no_lock_no_descriptor_no_ignored_signal(host: Host, port: int) -> None:
    host.hold()
    line = host.one(host.server_of("arm", port))
    pid = line["pid"]
    until(lambda: listening(port))
    assert f"FAIRTRIAL_WINDOW={WINDOW}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.getsid(pid) == pid
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    assert not [link for link in links if link.startswith((str(host.state), "pipe:"))]
    with (host.state / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    ignored = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("SigIgn")]
    assert int(ignored[0].split()[1], 16) & (1 << 0 | 1 << 1 | 1 << 14) == 0
    assert (host.folder / "arm.log").stat().st_mode & 0o777 == 0o600
    begun = json.loads((host.state / "start.json").read_text())["started"][0]
    assert (begun["what"], begun["pid"], begun["start"]) == ("arm", pid, start_of(pid))
    assert host.one(host.server_of("arm", port)) | {"verb": "start"} == {
        "verb": "start", "what": "arm", "ok": True, "already": True, "pid": pid, "start": begun["start"],
    }  # fmt: skip


def test_a_log_that_exists_keeps_its_mode_and_owner_and_what_it_says(host: Host, port: int) -> None:
    log = host.folder / "arm.log"
    log.write_text("before\n")
    log.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(log, 12345, 12345)
    before = log.stat()
    host.hold()
    host.one(host.server_of("arm", port) | {"argv": [*PYTHON, "-c", "print('after')"]})
    until(lambda: log.read_text() == "before\nafter\n")
    after = log.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_a_log_that_is_no_file_blocks_nothing_and_is_said(host: Host, port: int, kind: str) -> None:
    log = host.folder / "arm.log"
    {"fifo": os.mkfifo, "link": lambda path: path.symlink_to(host.folder / "other"), "folder": Path.mkdir}[kind](log)
    host.hold()
    line = host.one(host.server_of("arm", port))
    assert "log" in line["unwritten"][0]
    assert os.readlink(f"/proc/{line['pid']}/fd/1") == os.devnull
    assert not (host.folder / "other").exists()


def under(change: Callable[[], None]) -> Json:
    """What a child of the test would run under after a change; found out by a child."""
    heard, teller = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            change()
            limits = {
                name: resource.getrlimit(getattr(resource, name))
                for name in dir(resource)
                if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"
            }
            found = {"limits": limits, "affinity": sorted(os.sched_getaffinity(0)), "nice": os.nice(0)}
            os.write(teller, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(teller)
    with open(heard, "rb") as file:
        found: Json = json.loads(file.read())
    os.waitpid(pid, 0)
    return found


def confined() -> None:
    """Run under fewer open files, no core, one processor, at a lower priority."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.nice(3)


@pytest.mark.parametrize("what", ["arm", "production"])
def test_a_server_is_started_under_productions_limits_processors_and_priority(host: Host, port: int, what: str) -> None:
    wanted = under(confined)
    host.hold()
    pid = host.one(host.server_of(what, port) | {"process": wanted})["pid"]
    _, (seen,) = host.call("inspect", {"pid": pid})
    assert seen["process"] == wanted
    assert (seen["process"]["limits"]["RLIMIT_NOFILE"], seen["process"]["nice"]) == ([200, 300], os.nice(0) + 3)
    assert len(seen["process"]["affinity"]) == 1


def test_a_server_is_not_started_under_other_limits_than_those_it_must_have(host: Host, port: int) -> None:
    wanted = under(confined)
    wanted["limits"]["RLIMIT_NOFILE"] = [200, 1 << 40]
    host.hold()
    status, lines = host.play(host.server_of("production", port) | {"process": wanted})
    assert status == 1
    assert "RLIMIT_NOFILE" in lines[0]["message"]
    assert not listening(port)


def test_inspect_says_what_its_own_children_could_not_be_given(host: Host, port: int) -> None:
    server = host.serve(port)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, (seen,) = host.call("inspect", {"pid": server.pid})
    assert seen["ungivable"] == []
    # another user than root, or root without the right, cannot raise what this one is lowered to
    code = (
        "import json, os, resource, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from switch import setting, spawn\n"
        "wanted = setting.of(int(sys.argv[2]))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (99, 100))\n"
        "os.nice(5)\n"
        "os.geteuid() or os.setresuid(12345, 12345, 12345)\n"
        "print(json.dumps(spawn.ungivable(wanted)))\n"
    )
    words = [*PYTHON, "-c", code, str(host.program), str(server.pid)]
    # the program is loaded before the user changes: whose files it lies in does not matter
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    nice = os.nice(0)
    assert json.loads(done.stdout) == [f"RLIMIT_NOFILE {soft}:{hard} (here 99:100)", f"nice {nice} (here {nice + 5})"]


def test_look_says_what_the_host_program_itself_runs_under(host: Host) -> None:
    _, (seen,) = host.call("look", {})
    assert seen["host"]["process"] == under(lambda: None)
    assert (seen["host"]["uid"], seen["host"]["cgroup"]) == (os.geteuid(), Path("/proc/self/cgroup").read_text())


def test_production_gets_its_own_environment_and_no_mark(host: Host, port: int) -> None:
    host.hold()
    pid = host.one(host.server_of("production", port))["pid"]
    assert set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")) - {b""} == {
        f"{name}={value}".encode() for name, value in ENVIRON.items()
    }


def test_production_started_twice_at_once_is_one(host: Host, port: int) -> None:
    host.hold()
    starts = [host.open("play", {"verbs": [host.server_of("production", port)]}) for _ in range(4)]
    lines = [answer(one) for one in starts]
    assert len({line.get("pid") for line in lines}) == 1, lines
    assert sum(line.get("started", False) for line in lines) == 1
    until(lambda: listening(port))
    assert host.one(host.server_of("production", port))["already"] is True


def test_production_under_way_is_known_without_any_record(host: Host, port: int) -> None:
    words = [*PYTHON, "-c", "import time; time.sleep(60)"]
    slow = subprocess.Popen(words, env=ENVIRON, cwd=host.folder, start_new_session=True)
    host.opened.append(slow)
    host.hold()
    try:
        assert host.one(host.server_of("production", port) | {"argv": words})["pid"] == slow.pid
    finally:
        slow.kill()


def test_a_foreign_listener_is_named_and_a_restorer_waits_for_it(host: Host, port: int) -> None:
    foreign = host.serve(port, "other")
    host.hold()
    status, lines = host.play(host.server_of("production", port) | {"limit_s": 0.3})
    assert status == 1
    assert [one["pid"] for one in lines[0]["waiting_for"]] == [foreign.pid]
    host.one({"verb": "take", "from": 0, "actor": another(), "now": True})
    restorer = host.open("play", {"verbs": [host.server_of("production", port)]}, term=1)
    assert silent(restorer, 0.5)
    with (host.state / "lock").open("r+b") as lock:
        until(lambda: not _taken(lock))
    foreign.kill()
    foreign.wait()
    assert answer(restorer)["started"] is True


def _taken(lock: Any) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def test_what_cannot_be_run_is_said(host: Host, port: int) -> None:
    host.hold()
    status, lines = host.play(host.server_of("arm", port) | {"argv": ["/no/such/program"]})
    assert status == 1
    assert "/no/such/program" in lines[0]["message"]


def test_a_step_killed_before_its_child_was_entered_leaves_no_child(host: Host, port: int) -> None:
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1]); from switch.spawn import spawn\n"
        "spawn(sys.argv[2:], {}, '/', None, lambda pid, start: (print(pid, flush=True), signal.pause()))"
    )
    words = [*PYTHON, "-c", code, str(host.program), *host.words(port)]
    step = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    host.opened.append(step)
    assert step.stdout is not None
    child = int(step.stdout.readline())
    step.kill()
    until(lambda: not runs(child))
    assert not listening(port)


def test_prove_sees_identity_readiness_a_generation_and_settles(host: Host, port: int) -> None:
    server = host.serve(port)
    line = host.one(host.proof_of(port))
    assert (line["pid"], line["start"], line["ready"]) == (server.pid, start_of(server.pid), 200)
    assert not host.state.exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"environ_sha256": "0" * 64}, "environment"),
        ({"argv": ["other"]}, "arguments"),
        ({"cwd": "/"}, "working directory"),
        ({"exe": "/usr/bin/other"}, "program"),
        ({"uid": 12345}, "user"),
        ({"process": {"limits": {"RLIMIT_NOFILE": [7, 7]}, "affinity": [], "nice": 0}}, "RLIMIT_NOFILE, affinity"),
        ({"process": {"limits": {}, "affinity": sorted(os.sched_getaffinity(0)), "nice": 19}}, "whose nice"),
        ({"ready": None, "generation": {"path": "/v1/completions", "body": {}}, "port": None}, "generation"),
    ],
)
def test_prove_says_what_is_not_production(host: Host, port: int, change: Json, word: str) -> None:
    ways = ["mute"] if "port" in change else []
    host.serve(port, *ways)
    proof = host.proof_of(port, *ways, limit_s=0.5) | {key: value for key, value in change.items() if value}
    status, lines = host.play(proof)
    assert status == 1
    assert word in lines[-1]["message"]
    assert "SECRET" not in json.dumps(lines)


def test_prove_accepts_program_user_and_setting_as_inspect_saw_them(host: Host, port: int) -> None:
    host.serve(port)
    _, (seen,) = host.call("inspect", {"port": port})
    host.one(host.proof_of(port) | {name: seen[name] for name in ("exe", "uid", "process", "environ", "cwd", "argv")})


def test_prove_fails_while_anything_of_the_window_runs(host: Host, port: int) -> None:
    host.serve(port)
    host.serve(free_port(), mark=True)
    status, lines = host.play(host.proof_of(port, limit_s=0.5))
    assert status == 1
    assert f"of window {WINDOW} runs" in lines[-1]["message"]


def test_a_start_that_died_ends_the_wait_at_once(host: Host, port: int) -> None:
    host.hold()
    dies = host.server_of("production", port) | {"argv": [*PYTHON, "-c", "pass"]}
    host.one(dies)
    began = time.monotonic()
    status, lines = host.play(host.proof_of(port, limit_s=25) | {"argv": dies["argv"]})
    assert status == 1
    assert lines[0]["dead"]["what"] == "production"
    assert time.monotonic() - began < 10


def test_a_stop_that_was_killed_halfway_is_finished_before_production_starts(host: Host, port: int) -> None:
    # it still serves, but has been told to end: to call it running would be a lie within the second
    server = host.serve(port, "slow-end")
    host.hold()
    key = [server.pid, start_of(server.pid)]
    step = host.open("play", {"verbs": [{"verb": "end", "what": "processes", "processes": [key]}]})
    until(lambda: key in json.loads((host.state / "start.json").read_text())["ending"])
    step.kill()
    step.wait()
    host.one({"verb": "take", "from": 0, "actor": another(), "now": True})
    status, lines = host.play(host.server_of("production", port, "slow-end"), host.proof_of(port, "slow-end"), term=1)
    assert status == 0, lines
    assert lines[0]["started"] is True
    assert lines[1]["pid"] != server.pid


def test_children_left_by_a_stop_are_ended_not_taken_for_a_start_under_way(host: Host, port: int) -> None:
    server = host.serve(port, "child")
    tree = host.call("inspect", {"pid": server.pid})[1][0]["tree"]
    server.kill()
    server.wait()
    host.hold()
    start = host.server_of("production", port, "child") | {"grace_s": 0.2}
    line = host.one(start | {"was": [[one["pid"], one["start"]] for one in tree]})
    assert line["started"] is True
    assert not any(runs(one["pid"]) for one in tree)


def test_an_orphan_with_productions_own_arguments_is_no_start_under_way(host: Host, port: int) -> None:
    server = host.serve(port, "child")
    server.kill()
    server.wait()
    host.hold()
    assert host.one(host.server_of("production", port, "child"))["started"] is True


# -- the lock ------------------------------------------------------------------------------------------------------


def test_a_lock_held_too_long_fails_the_runner_and_is_broken_by_a_restorer(host: Host, port: int) -> None:
    host.serve(port, "deaf", mark=True)
    host.hold()
    stuck = host.open("play", {"verbs": [END_WINDOW | {"grace_s": 60, "limit_s": 60}]})
    until(lambda: host.call("look", {})[1][0]["state"]["locked"])
    os.kill(stuck.pid, signal.SIGSTOP)
    status, lines = host.play(END_WINDOW, lock_limit_s=0.3)
    assert (status, lines[0]["locked_by"]) == (1, [stuck.pid])
    host.one({"verb": "take", "from": 0, "actor": another(), "now": True})
    status, lines = host.play(END_WINDOW, term=1, lock_limit_s=0.3)
    assert status == 0, lines
    assert stuck.wait(5) == -signal.SIGKILL
    assert not listening(port)


def test_a_step_whose_term_is_taken_stops_at_once(host: Host, port: int) -> None:
    host.serve(port, "deaf", mark=True)
    host.hold()
    step = host.open("play", {"verbs": [END_WINDOW | {"grace_s": 60, "limit_s": 60}]})
    until(lambda: host.call("look", {})[1][0]["state"]["locked"])
    host.one({"verb": "take", "from": 0, "actor": another(), "now": True})
    assert step.wait(5) == 75


def test_a_restorer_renews_its_own_lease_while_it_waits(host: Host, port: int) -> None:
    host.hold()
    host.one({"verb": "take", "from": 0, "actor": another(), "now": True, "lease_s": 2.0})
    restorer = host.open("play", {"verbs": [{"verb": "lease"}, host.proof_of(port, limit_s=30)]}, term=1)
    first = answer(restorer)["deadline_ns"]
    until(lambda: json.loads((host.state / "lease").read_bytes()[:-64])["deadline_ns"] > first + 900_000_000)
    restorer.kill()


# -- giving the host back ------------------------------------------------------------------------------------------


def test_release_leaves_the_lock_and_the_last_record_alone(host: Host, port: int) -> None:
    opener = host.hold()
    host.arm(host.restore(port))
    status, lines = host.play({"verb": "off", "what": "hold"})
    assert (status, "switch" in lines[-1]["message"]) == (1, True)
    off = {"verb": "off", "what": "switch"}
    first, second = host.one(off), host.one(off)
    assert (len(first["ended"]), first["log"][0]["event"]) == (1, "up")
    assert (second["ended"], second["log"]) == ([], [])
    release = {"verb": "off", "what": "hold", "seal": "5" * 64}
    assert host.one(release)["released"] is True
    assert host.files() == {"lock", "last.json"}
    assert (host.last()["state"], host.last()["seal"], host.last()["out"]) == ("released", "5" * 64, "/nowhere")
    assert host.one(release)["already"] is True
    assert say(opener, "renew")["lost"] is True
    assert host.files() == {"lock", "last.json"}


@pytest.mark.parametrize("left", [{"hold.json"}, {"hold.json", "lease"}, {"hold.json", "restore.json", "start.json"}])
def test_a_release_killed_anywhere_is_finished_by_the_next(host: Host, left: set[str]) -> None:
    host.hold()
    (host.state / "restore.json").write_text("{}")
    for name in host.files() - left - {"lock", "last.json"}:
        (host.state / name).unlink()
    assert host.one({"verb": "off", "what": "hold"})["released"] is True
    assert host.files() == {"lock", "last.json"}
    host.hold()


# -- the reader ----------------------------------------------------------------------------------------------------


def test_the_reader_samples_at_once_and_follows_what_is_watched(host: Host, port: int) -> None:
    host.hold()
    reader = host.open("read", {"watch": {"cadence_s": 60}})
    first = answer(reader)
    assert first["memory"]["available_b"] > 0
    assert (first["hold"]["own"], first["ports"]) == (True, {})
    server = host.serve(port, mark=True)
    watch = {"ports": [port], "processes": {"arm": [server.pid, start_of(server.pid)]}, "cadence_s": 0.05}
    line = say(reader, json.dumps({"watch": watch}))
    assert line["processes"]["arm"] == {"alive": True, "start_ok": True}
    assert line["ports"][str(port)]["listeners"][0]["pid"] == server.pid
    while not line["marked"]:
        line = answer(reader)
    server.kill()
    server.wait()
    while line["processes"]["arm"]["alive"]:
        line = answer(reader)
    assert close(reader) == 0


# -- the switch ----------------------------------------------------------------------------------------------------


def until_served(host: Host) -> None:
    """Wait until the switch says that production is back; what it did instead is in the failure."""
    try:
        until(lambda: host.last()["state"] == "served")
    except AssertionError:
        pytest.fail((host.state / "switch.log").read_text())


def test_an_unarmed_switch_does_nothing(host: Host, port: int) -> None:
    host.hold(lease_s=0.2)
    restore = host.restore(port)
    status, _ = host.play({"verb": "install", "restore": restore}, {"verb": "ask", "nonce": "n"})
    assert status == 0
    until(lambda: not host.call("look", {})[1][0]["state"]["lease"]["live"])
    host.play({"verb": "ask", "nonce": "later"})
    assert "hold.json" in host.files()
    assert not listening(port)


def test_an_armed_switch_waits_for_the_lease_of_a_runner_that_is_dead(host: Host, port: int) -> None:
    host.hold(start=1)
    host.arm(host.restore(port))
    for nonce in ("one", "two", "three"):
        host.one({"verb": "ask", "nonce": nonce})
    assert "hold.json" in host.files()


def test_installed_twice_it_is_one_and_a_new_restore_replaces_it(host: Host, port: int) -> None:
    host.hold()
    restore = host.restore(port)
    pid = host.arm(restore)
    assert host.one({"verb": "install", "restore": restore})["already"] is True
    changed = host.one({"verb": "install", "restore": restore | {"retry_s": 9}})
    assert changed["pid"] != pid
    assert not runs(pid)
    assert (host.state / "restore.json").stat().st_mode & 0o777 == 0o600


def test_when_renewals_stop_the_switch_brings_production_back(host: Host, port: int) -> None:
    opener = host.hold(lease_s=1.0)
    say(opener, "renew")
    host.arm(host.restore(port))
    until_served(host)
    assert listening(port)
    assert (host.last()["term"], host.last()["actor"]["kind"]) == (1, "switch")
    assert "term-1.json" in host.files()
    assert host.play(END_WINDOW)[0] == 75
    # whoever comes next takes the next term, and gives the host back
    status, lines = host.play(
        {"verb": "take", "from": 1, "actor": actor()},
        host.server_of("production", port),
        host.proof_of(port),
        {"verb": "record", "state": "proved"},
        {"verb": "off", "what": "switch"},
        {"verb": "off", "what": "hold"},
    )
    assert status == 0, lines
    assert lines[1]["already"] is True
    assert {"taken", "served"} <= {one.get("event") for one in lines[4]["log"]}
    assert host.files() == {"lock", "last.json"}
    assert listening(port)


def test_the_switch_ends_the_arm_before_production_comes_back(host: Host, port: int) -> None:
    arm = free_port()
    host.hold()
    host.arm(host.restore(port))
    host.one(host.server_of("arm", arm, "deaf"))
    until(lambda: listening(arm))
    host.run_out()
    until_served(host)
    assert listening(port)
    assert not listening(arm)


def test_the_switch_outlives_the_signals_of_a_closing_terminal(host: Host, port: int) -> None:
    host.hold()
    pid = host.arm(host.restore(port))
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert host.one({"verb": "ask", "nonce": "still there"})["pid"] == pid


def test_a_killed_switch_is_told_from_a_live_one(host: Host, port: int) -> None:
    host.hold()
    pid = host.arm(host.restore(port))
    os.kill(pid, signal.SIGKILL)
    until(lambda: not host.call("look", {})[1][0]["state"]["switch"]["alive"])
    assert "term-1.json" not in host.files()
    assert host.one({"verb": "off", "what": "switch"})["ended"] == []


def test_a_switch_killed_while_it_restores_is_followed_by_another_actor(host: Host, port: int) -> None:
    foreign = host.serve(port, "other")
    host.hold(lease_s=0.5)
    pid = host.arm(host.restore(port))
    until(lambda: host.last()["state"] == "restoring")
    os.kill(pid, signal.SIGKILL)
    until(lambda: not runs(pid))
    foreign.kill()
    foreign.wait()
    status, lines = host.play({"verb": "take", "from": 1, "actor": actor()}, {"verb": "lease"}, lock_limit_s=5)
    assert status == 0, lines
    assert "gone" in lines[0]["why"]
    for step in ("restore.end", "restore.start", "restore.prove"):
        status, lines = host.call("play", {"step": step}, term=2)
        assert status == 0, lines
    assert listening(port)


def test_the_switch_tries_again_after_a_restore_that_failed(host: Host, port: int) -> None:
    flag = host.folder / "may"
    restore = host.restore(port)
    then = f"os.path.exists({str(flag)!r}) and os.execve({sys.executable!r}, {host.words(port)!r}, {ENVIRON!r})"
    program = [*PYTHON, "-c", f"import os; {then}"]
    restore["steps"]["restore.start"][0]["argv"] = program
    host.hold(lease_s=0.5)
    host.arm(restore)
    until(lambda: host.last()["state"] == "down")
    assert "gone" in host.last()["detail"]
    assert "term-1.json" in host.files()
    flag.touch()
    until_served(host)
    assert listening(port)


def test_the_switch_waits_for_a_live_restorer_and_takes_over_when_that_one_dies(host: Host, port: int) -> None:
    host.hold()
    host.one({"verb": "take", "from": 0, "actor": another(), "now": True})
    restore = host.restore(port)
    status, lines = host.play(
        {"verb": "install", "restore": restore}, {"verb": "ask", "nonce": "n"}, {"verb": "arm"}, term=1
    )
    assert status == 0, lines
    host.pids.add(lines[0]["pid"])
    host.one({"verb": "ask", "nonce": "later"}, term=1)
    assert "term-2.json" not in host.files()
    host.run_out()
    until_served(host)
    assert host.last()["term"] == 2


def test_a_step_orphaned_in_the_middle_of_the_stop_cannot_start_the_arm(host: Host, port: int) -> None:
    arm = free_port()
    production = host.serve(port, "slow-end")
    key = [production.pid, start_of(production.pid)]
    host.hold()
    restore = host.restore(port)
    restore["steps"]["restore.start"] = [host.server_of("production", port, "slow-end")]
    restore["steps"]["restore.prove"] = [host.proof_of(port, "slow-end")]
    host.arm(restore)
    # the runner is gone: this step runs on by itself, and the lease runs out while it stops production
    orphan = host.open(
        "play",
        {
            "verbs": [
                {"verb": "end", "what": "processes", "processes": [key], "port": port},
                host.server_of("arm", arm),
            ]
        },
    )
    until(lambda: key in json.loads((host.state / "start.json").read_text())["ending"])
    host.run_out()
    until_served(host)
    assert orphan.wait(5) in (0, 75)
    assert listening(port)
    assert not listening(arm)
    assert host.call("look", {})[1][0]["marked"] == []


def test_the_runner_killed_in_the_stop_itself_ends_with_production_served(host: Host, port: int) -> None:
    production = host.serve(port, "slow-end")
    key = [production.pid, start_of(production.pid)]
    host.hold()
    restore = host.restore(port)
    restore["steps"]["restore.start"] = [host.server_of("production", port, "slow-end")]
    restore["steps"]["restore.prove"] = [host.proof_of(port, "slow-end")]
    host.arm(restore)
    step = host.open("play", {"verbs": [{"verb": "end", "what": "processes", "processes": [key]}]})
    until(lambda: key in json.loads((host.state / "start.json").read_text())["ending"])
    step.kill()
    host.run_out()
    until_served(host)
    production.wait(5)
    assert host.one(host.proof_of(port, "slow-end"))["pid"] != production.pid


def remove(folder: Path) -> None:
    """Remove a folder as a person does; a beat may be written meanwhile, and stay."""
    subprocess.run(["rm", "-rf", str(folder)], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("state", ["released", "proved", "served"])
def test_a_hold_that_is_gone_after_production_is_back_ends_the_switch(host: Host, port: int, state: str) -> None:
    host.hold()
    pid = host.arm(host.restore(port))
    host.one({"verb": "record", "state": state})
    (host.state / "hold.json").unlink()
    until(lambda: not runs(pid))
    assert not listening(port)


def test_a_hold_that_is_gone_ends_a_switch_that_was_never_armed(host: Host, port: int) -> None:
    host.hold()
    status, lines = host.play({"verb": "install", "restore": host.restore(port)}, {"verb": "ask", "nonce": "up"})
    assert status == 0, lines
    pid = lines[0]["pid"]
    remove(host.state)
    until(lambda: not runs(pid))
    assert not host.state.exists() or host.files() <= {"beat"}


def test_a_hold_of_another_window_in_its_place_ends_the_switch(host: Host, port: int) -> None:
    host.hold()
    pid = host.arm(host.restore(port))
    # as if the folder had been removed and taken between two looks
    aside = host.folder / "aside.json"
    aside.write_bytes(canonical(host.record(f"{WINDOW}-2")))
    aside.rename(host.state / "hold.json")
    until(lambda: not runs(pid))
    assert not listening(port)


@pytest.mark.parametrize("gone", ["folder", "hold", "folder, after a signal that it ignored"])
def test_a_folder_removed_while_production_is_down_is_made_anew_and_production_restored(
    host: Host, port: int, gone: str
) -> None:
    arm = free_port()
    opener = host.hold()
    restore = host.restore(port)
    pid = host.arm(restore)
    host.one(host.server_of("arm", arm, "deaf"))
    until(lambda: listening(arm))
    if gone == "hold":
        (host.state / "hold.json").unlink()
    else:
        if "signal" in gone:
            os.kill(pid, signal.SIGTERM)
            host.one({"verb": "ask", "nonce": "it goes on"})
        remove(host.state)
    until(lambda: (host.state / "last.json").exists() and host.last()["state"] == "served")
    assert listening(port)
    assert not listening(arm)
    assert (host.last()["term"], host.last()["actor"]["pid"], host.last()["out"]) == (1, pid, "/nowhere")
    assert json.loads((host.state / "term-1.json").read_text()) == host.record()
    assert (host.state / "restore.json").read_bytes() == canonical(restore)
    assert say(opener, "renew")["lost"] is True
    # it rests, and whoever comes next takes the next term and gives the host back
    status, lines = host.play(
        {"verb": "take", "from": 1, "actor": actor()},
        host.proof_of(port),
        {"verb": "record", "state": "proved"},
        {"verb": "off", "what": "switch"},
        {"verb": "off", "what": "hold"},
    )
    assert status == 0, lines
    assert [one["event"] for one in lines[3]["log"] if one["event"] in ("remade", "served")][-2:] == [
        "remade",
        "served",
    ]
    assert host.files() == {"lock", "last.json"}


def test_a_folder_removed_while_the_switch_waits_is_made_anew_with_the_next_term(host: Host, port: int) -> None:
    foreign = host.serve(port, "other")
    host.hold(lease_s=0.5)
    host.arm(host.restore(port))
    until(lambda: host.last()["state"] == "restoring")
    remove(host.state)
    until(lambda: "term-2.json" in (host.files() if host.state.exists() else set()))
    foreign.kill()
    foreign.wait()
    until_served(host)
    assert (host.last()["term"], listening(port)) == (2, True)


# -- a full disk ---------------------------------------------------------------------------------------------------


def fill(file: io.FileIO) -> None:
    while True:
        file.write(b"x" * 4096)


def test_on_a_full_disk_the_switch_still_restores_and_says_so(host: Host, port: int) -> None:
    if os.geteuid() != 0:
        pytest.fail("this test mounts a small tmpfs: run it as root")
    host.state.mkdir(mode=0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "none", str(host.state)], check=True)
    try:
        opener = host.hold()
        pid = host.arm(host.restore(port))
        filler = host.state / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            fill(file)
        assert say(opener, "renew")["renewed"]
        host.run_out()
        until_served(host)
        assert listening(port)
        assert runs(pid)
        filler.unlink()
        status, lines = host.play(
            {"verb": "take", "from": 1, "actor": actor()},
            {"verb": "off", "what": "switch"},
            {"verb": "off", "what": "hold"},
        )
        assert status == 0, lines
        opener.kill()
    finally:
        subprocess.run(["umount", "-l", str(host.state)], check=True)


# -- a whole window ------------------------------------------------------------------------------------------------


def test_production_comes_back_under_what_it_ran_under_with_its_output_where_the_experiment_says(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    words = [sys.executable, str(FAULTY), "--port", str(rig.port), "--max-model-len", "4096"]
    one = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env={"PATH": os.environ["PATH"]},
        start_new_session=True,
        preexec_fn=confined,
    )
    try:
        until(lambda: procs.listens(rig.port))
        rig.argv, rig.pid = words, one.pid
        ran_under = setting.of(one.pid)
        refused = rig.run()
        assert refused.code == 2
        assert "under [production]" in refused.stderr
        rig.assert_untouched()
        experiment = rig.experiment()
        log = tmp_path / "production.log"
        experiment["production"]["log"] = str(log)
        ended = rig.run(experiment, out=tmp_path / "again")
        assert ended.code == 0, ended.stderr
        rig.assert_back()
        back = rig.serving()
        assert back is not None
        assert back != one.pid
        assert setting.of(back) == ran_under
        assert [os.readlink(f"/proc/{back}/fd/{number}") for number in (1, 2)] == [str(log)] * 2
        [rank] = json.loads((ended.out / "arms/off/identity.json").read_text())["ranks"].values()
        snapshot = json.loads((ended.out / "snapshot/here.json").read_text())
        assert rank["process"] == snapshot["process"] == ran_under
    finally:
        if one.poll() is None:
            one.kill()
        one.wait()
        assert one.stdout is not None
        one.stdout.close()
        rig.close()
