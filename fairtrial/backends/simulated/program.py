"""The host program itself, loaded over ``posix``: the very modules that run on a real host, on a simulated kernel.

Two things stand in for what only a real kernel has: a started process is a simulated one, and the copy of the program
in the state folder is a name.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from fairtrial import switch
from fairtrial.backends.simulated import posix
from fairtrial.backends.simulated.kernel import Host, Pipe, Process

PACKAGE = "fairtrial_host_program_simulated"
ORDER: tuple[str, ...] = (
    "state",
    "procs",
    "actor",
    "setting",
    "spawn",
    "arming",
    "asking",
    "terms",
    "servers",
    "proving",
    "play",
)
ORDER += ("opener", "looking", "daemon", "__main__")

POLL_S = 0.5
"""How often the simulated switch looks: less often than the real one, for nothing depends on it but real time here."""

Start = Callable[[Host, Process], None]
"""What a started process does, by its arguments."""


class Programs:
    """What can be started on the simulated hosts: the host program, and whatever ``server`` makes of the rest."""

    def __init__(self, server: Start) -> None:
        self.server = server

    def start(self, process: Process) -> None:
        """Let a process run what its arguments say."""
        host = process.host
        command = host.commands.get(process.argv[0])
        if command is not None:
            host.run(process, lambda: host.exit(process, command(process)))
            return
        at = next((i for i, word in enumerate(process.argv) if word.endswith("host.pyz")), None)
        if at is None:
            self.server(host, process)
            return
        words = list(process.argv[at + 1 :])
        host.run(process, lambda: host.exit(process, _main(words)))


def _main(words: list[str]) -> int:
    try:
        status: int = modules()["__main__"].main(words)
    except SystemExit as ended:
        return int(ended.code or 0)
    return status


@cache
def modules() -> dict[str, ModuleType]:
    """The host program's modules, once."""
    package = ModuleType(PACKAGE)
    package.__path__ = []
    sys.modules[PACKAGE] = package
    found: dict[str, ModuleType] = {}
    stands = {**vars(builtins), "__import__": _import, "open": posix.builtin_open}
    for name in ORDER:
        source = Path(switch.__file__).parent / f"{name}.py"
        module = ModuleType(f"{PACKAGE}.{name}")
        module.__package__ = PACKAGE
        module.__file__ = f"/host.pyz/switch/{name}.py"
        module.__dict__["__builtins__"] = stands
        sys.modules[module.__name__] = module
        setattr(package, name, module)
        exec(compile(source.read_bytes(), str(source), "exec", dont_inherit=True), module.__dict__)
        if name == "spawn":
            module.__dict__.update(spawn=_spawn, ungivable=lambda setting: [])
        if name == "daemon":
            module.__dict__["POLL_S"] = POLL_S
        if name == "arming":
            module.__dict__.update(copy_program=lambda state: state.write("host.pyz", b"the host program"))
        found[name] = module
    return found


def _import(name: str, *rest: Any) -> Any:
    level = rest[3] if len(rest) > 3 else 0
    if level == 0 and name in posix.MODULES:
        return posix.MODULES[name]
    return builtins.__import__(name, *rest)


def _spawn(
    argv: list[str],
    environ: dict[str, str],
    cwd: str,
    log: str | None,
    entered: Callable[[int, int], None] = lambda pid, start: None,
    setting: object = None,
) -> tuple[int, int, list[str]]:
    """``spawn.spawn``: enter the process, let it be written down, then let it run."""
    parent = posix.process()
    host = parent.host
    trouble = []
    if log is not None and log not in host.inodes:
        try:
            host.make(log, 0o100600)
        except OSError as error:
            trouble.append(f"log: {error}")
            log = None
    child = host.spawn(tuple(argv), dict(environ), cwd, ppid=parent.pid, log=log, stdin=Pipe(host.clock, ended=True))
    try:
        entered(child.pid, child.start)
        parent.check()
    except BaseException:
        # The child waits at a gate until it is entered; without its parent it runs nothing.
        host.exit(child, 75)
        raise
    host.happened.append(("start", (child.pid, tuple(argv))))
    programs(host).start(child)
    return child.pid, child.start, trouble


def programs(host: Host) -> Programs:
    """The programs of a host."""
    found: Programs = host.programs
    return found
