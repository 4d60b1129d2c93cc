"""What /proc says: processes and their marks, listeners and peers of ports, memory, who holds a file lock."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from typing import NamedTuple

from .state import Json

MARK = "FAIRTRIAL_WINDOW"
PAGE = os.sysconf("SC_PAGE_SIZE")
LISTEN, ESTABLISHED = 0x0A, 0x01

Key = tuple[int, int]


class Stat(NamedTuple):
    """One line of /proc/PID/stat: ``start`` in clock ticks since boot tells a pid from its next owner."""

    pid: int
    start: int
    state: str
    ppid: int
    pgid: int
    sid: int
    rss_b: int

    @property
    def key(self) -> Key:
        """What names the process for ever within this boot."""
        return self.pid, self.start


def _bytes(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def stat(pid: int) -> Stat | None:
    """Return a process that runs; None for one that is gone, a zombie among them."""
    text = _bytes(f"/proc/{pid}/stat")
    if not text:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    state = fields[0].decode()
    if state in "ZXx":
        return None
    return Stat(
        pid=pid,
        start=int(fields[19]),
        state=state,
        ppid=int(fields[1]),
        pgid=int(fields[2]),
        sid=int(fields[3]),
        rss_b=int(fields[21]) * PAGE,
    )


def pids() -> list[int]:
    """Return the pids of the host."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def table() -> dict[int, Stat]:
    """Return every process that runs, by pid."""
    found = (stat(pid) for pid in pids())
    return {one.pid: one for one in found if one is not None}


def alive(pid: int, start: int) -> bool:
    """Whether that very process runs."""
    found = stat(pid)
    return found is not None and found.start == start


def argv(pid: int) -> list[str]:
    """Return a process's arguments; empty for a kernel thread or one that is gone."""
    text = _bytes(f"/proc/{pid}/cmdline") or b""
    parts = text.split(b"\0")
    return [os.fsdecode(part) for part in (parts[:-1] if parts[-1] == b"" else parts)]


def environ(pid: int) -> dict[str, str] | None:
    """Return the environment a process was started with, or None where it cannot be read."""
    text = _bytes(f"/proc/{pid}/environ")
    if text is None:
        return None
    pairs = (os.fsdecode(part).partition("=") for part in text.split(b"\0") if b"=" in part)
    return {name: value for name, _, value in pairs}


def link(pid: int, name: str) -> str | None:
    """Return the target of /proc/PID/NAME, or None."""
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return None


def shown(one: Stat) -> Json:
    """Return a process as results show it."""
    try:
        uid = os.stat(f"/proc/{one.pid}").st_uid
    except OSError:
        uid = -1
    return {
        "pid": one.pid,
        "start": one.start,
        "argv": argv(one.pid),
        "pgid": one.pgid,
        "sid": one.sid,
        "uid": uid,
        "ppid": one.ppid,
        "rss_b": one.rss_b,
    }


def named(one: Json) -> str:
    """Return a process in a few words, without arguments that may hold a secret."""
    if one["pid"] is None:
        return "a process that cannot be seen (another user's, or in another container)"
    words = one["argv"]
    return f"pid {one['pid']} ({os.path.basename(words[0]) if words else 'no arguments'})"


def ancestors() -> set[int]:
    """Return this process and all above it."""
    found: set[int] = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        one = stat(pid)
        pid = one.ppid if one else 0
    return found


def step(words: list[str]) -> Json | None:
    """Return {mode, state, window, term} where the arguments are those of a host program, else None."""
    at = next((i for i, word in enumerate(words) if os.path.basename(word) == "host.pyz"), None)
    if at is None or at + 2 >= len(words):
        return None
    options = dict(zip(words[at + 2 :: 2], words[at + 3 :: 2], strict=False))
    if "--state" not in options:
        return None
    term = options.get("--term", "0")
    return {
        "mode": words[at + 1],
        "state": os.path.abspath(options["--state"]),
        "window": options.get("--window"),
        "term": int(term) if term.isdigit() else 0,
    }


def steps(folder: str) -> list[Json]:
    """Return the host programs that run on a state folder, this one not among them."""
    found = []
    for pid in pids():
        told = step(argv(pid))
        one = stat(pid) if told and pid != os.getpid() else None
        if told and one and told["state"] == folder:
            found.append(shown(one) | told)
    return found


def marked(window: str | None, patterns: Iterable[str] = ()) -> dict[int, Stat]:
    """Return what runs with a window's mark (None: any window's), or with arguments that fit a pattern.

    Host programs, this process and its ancestors are not among them.
    """
    needle = f"\0{MARK}=".encode() + (b"" if window is None else window.encode() + b"\0")
    wanted = [re.compile(pattern) for pattern in patterns]
    above = ancestors()
    found = {}
    for pid in pids():
        if pid in above:
            continue
        text = _bytes(f"/proc/{pid}/environ")
        fits = text is not None and needle in b"\0" + text + b"\0"
        words = argv(pid) if fits or wanted else []
        if not fits and not any(pattern.search(" ".join(words)) for pattern in wanted):
            continue
        one = stat(pid)
        if one is not None and step(words) is None:
            found[pid] = one
    return found


def tree(roots: Iterable[Key], running: dict[int, Stat]) -> dict[int, Stat]:
    """Return the roots that run, their descendants, and the members of the groups and sessions that they lead.

    A group outlives its leader, and its number is not given again while it has a member: so members are found after
    the leader is gone, but not when its pid belongs to another process now.
    """
    led: set[int] = set()
    found: dict[int, Stat] = {}
    for pid, start in roots:
        one = running.get(pid)
        if one is not None and one.start != start:
            continue
        led.add(pid)
        if one is not None:
            found[pid] = one
    for one in running.values():
        if one.pgid in led or one.sid in led:
            found[one.pid] = one
    grown = True
    while grown:
        below = {one.pid: one for one in running.values() if one.ppid in found and one.pid not in found}
        grown = bool(below)
        found.update(below)
    return found


def send(pid: int, start: int, number: int) -> None:
    """Signal that very process; one that is gone is left alone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if alive(pid, start):
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def held_b(found: Iterable[Stat]) -> int:
    """Return the bytes that processes give back when they end: anonymous and shared pages, shared ones once."""
    total = 0
    for one in found:
        text = (_bytes(f"/proc/{one.pid}/smaps_rollup") or b"").decode()
        parts = re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", text, re.MULTILINE)
        total += sum(map(int, parts)) * 1024 if parts else one.rss_b
    return total


def memory() -> Json:
    """Return {available_b, total_b, swap_used_b} of /proc/meminfo."""
    text = (_bytes("/proc/meminfo") or b"").decode()
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    return {
        "available_b": kib["MemAvailable"] * 1024,
        "total_b": kib["MemTotal"] * 1024,
        "swap_used_b": (kib["SwapTotal"] - kib["SwapFree"]) * 1024,
    }


class Socket(NamedTuple):
    """One line of /proc/net/tcp or tcp6."""

    local: str
    local_port: int
    remote: str
    remote_port: int
    state: int
    inode: int


def _address(text: str) -> tuple[str, int]:
    digits, _, port = text.partition(":")
    raw = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
    if len(raw) == 16 and raw[:12] == b"\0" * 10 + b"\xff\xff":
        raw = raw[12:]
    if len(raw) == 4:
        return ".".join(map(str, raw)), int(port, 16)
    return ":".join(raw[i : i + 2].hex().lstrip("0") or "0" for i in range(0, 16, 2)), int(port, 16)


def sockets(ports: set[int]) -> list[Socket]:
    """Return the TCP sockets, of IPv4 and IPv6, that have one of the ports at either end."""
    wanted = {f"{port:04X}" for port in ports}
    found = []
    for name in ("tcp", "tcp6"):
        lines = (_bytes(f"/proc/net/{name}") or b"").decode().splitlines()[1:]
        for line in lines:
            fields = line.split()
            if fields[1][-4:] in wanted or fields[2][-4:] in wanted:
                local, remote = _address(fields[1]), _address(fields[2])
                found.append(Socket(*local, *remote, int(fields[3], 16), int(fields[9])))
    return found


class Owners:
    """Finds which processes hold which socket; remembers, so that a look costs no scan of every descriptor."""

    def __init__(self) -> None:
        self._places: dict[int, list[tuple[int, str]]] = {}

    def forget(self) -> None:
        """Look everywhere again at the next question: a socket may have got a further owner."""
        self._places = {}

    def of(self, inodes: set[int]) -> dict[int, list[int]]:
        """Return the pids that hold each socket inode, lowest first."""
        inodes = {inode for inode in inodes if inode}
        if any(not self._still(inode) for inode in inodes):
            self._scan(inodes)
        return {inode: sorted({pid for pid, _ in self._places.get(inode, [])}) for inode in inodes}

    def _still(self, inode: int) -> bool:
        places = self._places.get(inode)
        return bool(places) and all(link(pid, f"fd/{fd}") == f"socket:[{inode}]" for pid, fd in places or [])

    def _scan(self, inodes: set[int]) -> None:
        names = {f"socket:[{inode}]": inode for inode in inodes}
        self._places = {inode: [] for inode in inodes}
        for pid in pids():
            try:
                fds = os.listdir(f"/proc/{pid}/fd")
            except OSError:
                continue
            for fd in fds:
                inode = names.get(link(pid, f"fd/{fd}") or "")
                if inode is not None:
                    self._places[inode].append((pid, fd))


def listeners(port: int) -> list[Stat]:
    """Return the processes that listen on a port, the first started first."""
    inodes = {one.inode for one in sockets({port}) if one.state == LISTEN and one.local_port == port}
    owners = Owners().of(inodes)
    found = {pid: stat(pid) for group in owners.values() for pid in group}
    return sorted((one for one in found.values() if one is not None), key=lambda one: (one.start, one.pid))


def listens(port: int) -> bool:
    """Whether anything listens on a port, in this network namespace, whoever owns it."""
    return any(one.state == LISTEN and one.local_port == port for one in sockets({port}))


def address(port: int) -> str:
    """Return where to reach what listens on a port from this host."""
    found = [one.local for one in sockets({port}) if one.state == LISTEN and one.local_port == port]
    if not found or any(one == "0.0.0.0" for one in found):
        return "127.0.0.1"
    return "::1" if found[0] == "0:0:0:0:0:0:0:0" else found[0]


def ports(wanted: Iterable[int], owners: Owners | None = None) -> Json:
    """Return {port: {listeners: [process], peers: [{local_port, remote, remote_port, pid}]}}.

    A peer's ``pid`` is the process at its far end, where that end is on this host; null where it is not.
    """
    owners = owners or Owners()
    numbers = set(wanted)
    found = sockets(numbers)
    far = {(one.local, one.local_port, one.remote, one.remote_port): one.inode for one in found}
    heard = [one for one in found if one.state == LISTEN and one.local_port in numbers]
    talks = [one for one in found if one.state == ESTABLISHED and one.local_port in numbers]
    ends = {one: far.get((one.remote, one.remote_port, one.local, one.local_port), 0) for one in talks}
    pids_of = owners.of({one.inode for one in heard} | set(ends.values()))
    view: Json = {}
    for port in sorted(numbers):
        who = {pid for one in heard if one.local_port == port for pid in pids_of.get(one.inode, [])}
        running = [one for one in map(stat, sorted(who)) if one is not None]
        view[str(port)] = {
            "listening": any(one.local_port == port for one in heard),
            "listeners": [shown(one) for one in running],
            "peers": [
                {
                    "local_port": port,
                    "remote": one.remote,
                    "remote_port": one.remote_port,
                    "pid": next(iter(pids_of.get(ends[one], [])), None),
                }
                for one in talks
                if one.local_port == port
            ],
        }
    return view


def lockers(path: str) -> list[int]:
    """Return the pids that took a flock on a file and still have it, as /proc/locks tells."""
    try:
        inode = os.stat(path).st_ino
    except OSError:
        return []
    found = []
    for line in (_bytes("/proc/locks") or b"").decode().splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[1] == "FLOCK" and int(fields[5].rsplit(":", 1)[1]) == inode:
            found.append(int(fields[4]))
    return found
