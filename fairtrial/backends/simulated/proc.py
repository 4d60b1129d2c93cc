"""What a simulated host shows below /proc, to the process that asks."""

from __future__ import annotations

import errno
import re

from fairtrial.backends.simulated.clock import owner
from fairtrial.backends.simulated.kernel import Process, fault

PROC = re.compile(r"/proc/(self|\d+)(?:/(.*))?")
LISTENING = 1 << 20
"""Where the inode numbers of listening sockets begin; those of connections lie above."""
CONNECTED = 1 << 21


def process() -> Process:
    """The process that calls. Raises ``Killed`` where it is gone."""
    found: Process = owner()
    found.check()
    return found


def of(word: str) -> Process:
    if word == "self":
        return process()
    found = process().host.processes.get(int(word))
    if found is None:
        raise fault(errno.ENOENT, f"/proc/{word}")
    return found


def content(path: str) -> bytes:
    """The content of a file of /proc."""
    host = process().host
    match = PROC.fullmatch(path)
    if match:
        one, name = of(match[1]), match[2]
        if name == "stat":
            words = f"{one.ppid} {one.pgid} {one.sid}" + " 0" * 15 + f" {one.start} 0 {one.held_b // 4096}"
            return f"{one.pid} (x) {'T' if one.frozen else 'S'} {words} 0".encode()
        if name == "cmdline":
            return b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in one.argv)
        if name == "environ":
            return b"".join(
                f"{key}={value}".encode("utf-8", "surrogateescape") + b"\0" for key, value in one.environ.items()
            )
        if name == "smaps_rollup":
            return f"Pss_Anon: {one.held_b // 1024} kB\nPss_Shmem: 0 kB\n".encode()
        if name == "cgroup":
            return b"0::/user.slice\n"
    elif path == "/proc/meminfo":
        values = {
            "MemTotal": host.memory_b,
            "MemAvailable": host.available_b,
            "SwapTotal": host.memory_b,
            "SwapFree": host.memory_b - host.swap_used_b,
        }
        return "".join(f"{name}: {value // 1024} kB\n" for name, value in values.items()).encode()
    elif path == "/proc/sys/kernel/random/boot_id":
        return host.boot_id.encode() + b"\n"
    elif path == "/proc/locks":
        lines = [
            f"{number}: FLOCK  ADVISORY  WRITE {who.pid} 00:01:{inode} 0 EOF\n"
            for number, (inode, (_, who)) in enumerate(host.locks.items(), start=1)
        ]
        return "".join(lines).encode()
    elif path in ("/proc/net/tcp", "/proc/net/tcp6"):
        return _tcp() if path.endswith("tcp") else b"header\n"
    raise fault(errno.ENOENT, path)


def _tcp() -> bytes:
    lines = ["header"]
    host = process().host

    def line(local: int, remote: int, state: int, inode: int) -> None:
        near = f"0100007F:{local:04X}"
        far = f"{'0100007F' if remote else '00000000'}:{remote:04X}"
        lines.append(f" 0: {near} {far} {state:02X} 0:0 0:0 0 0 0 {inode} 1")

    for one in host.processes.values():
        for port in one.ports:
            line(port, 0, 0x0A, LISTENING + port)
    for connection in host.connections:
        line(connection.port, connection.local_port, 0x01, CONNECTED + 2 * connection.local_port)
        if connection.client is not None:
            line(connection.local_port, connection.port, 0x01, CONNECTED + 2 * connection.local_port + 1)
    return "\n".join(lines).encode() + b"\n"


def sockets(one: Process) -> dict[str, str]:
    """The descriptors of a process that are sockets, as its /proc/PID/fd shows them."""
    numbers = [LISTENING + port for port in one.ports]
    for connection in one.host.connections:
        if connection.server is one:
            numbers.append(CONNECTED + 2 * connection.local_port)
        if connection.client is one:
            numbers.append(CONNECTED + 2 * connection.local_port + 1)
    return {str(100 + at): f"socket:[{number}]" for at, number in enumerate(numbers)}
