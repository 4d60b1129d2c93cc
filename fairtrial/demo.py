"""``fairtrial demo``: a production on this machine, one window on it, and the verdict.

The experiment is ``demo.toml``. A story changes what an arm *is*, never what the reading sees.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tomllib

from fairtrial import conduct
from fairtrial.canonical import canonical, sha256
from fairtrial.errors import ExperimentError, Refused
from fairtrial.experiment import Experiment, Host, parse
from fairtrial.progress import Lines, Progress
from fairtrial.switch import procs

PACKAGE = Path(__file__).parent
LABEL = "FAIRTRIAL_DEMO"
"""The variable that marks a production which a demo brought up."""

STATE = "FAIRTRIAL_STATE"
"""The variable that names another state folder for the demo and ``fairtrial status``: a test holds nobody's host."""

MAX_MODEL_LEN = 262144
START_LIMIT_S = 20.0

Patch = Callable[[dict[str, Any]], None]


def _refuted(raw: dict[str, Any]) -> None:
    """The fix's files are mounted, and nobody turns the switch on."""
    raw["arms"][2]["environment"] = {}


def _state(raw: dict[str, Any]) -> None:
    """The cause's files are mounted, and nothing is traced."""
    raw["arms"][1]["environment"] = {}


def _unsafe(raw: dict[str, Any]) -> None:
    """The fix drops experts: as fast, and other answers."""
    raw["arms"][2]["overlay"] = "unsafe"


def _as_it_is(raw: dict[str, Any]) -> None:
    """The experiment of ``demo.toml``."""


STORIES: Mapping[str, Patch] = {"confirmed": _as_it_is, "refuted": _refuted, "state": _state, "unsafe": _unsafe}


def _quick(raw: dict[str, Any]) -> None:
    """Tiny cells and short waits, for kill tests: too short to be read with confidence."""
    raw["name"] = "demo-quick"
    raw["question"] += " (--quick: cells too short for a verdict to be trusted)"
    raw["protocol"]["cells"][0] |= {"prompt_tokens": 64, "output_tokens": 2}
    raw["protocol"]["cells"][1] |= {"prompt_tokens": 512, "output_tokens": 4}
    raw["checks"]["greedy"] |= {"prompt_tokens": 16, "output_tokens": 8}
    raw["checks"]["probe"] = {"tokens": 257}
    raw["waits"] = {"idle_s": 0.5, "still_s": 0.5, "settle_s": 1, "lease_s": 4}
    raw["production"] |= {"grace_s": 2}
    raw["reading"]["thresholds"] |= {"spread_max": 0.6, "band": 0.6}
    for step, seconds in {"requests": 1, "off.requests": 2, "checks": 1, "reference": 1, "restore.prove": 2.5}.items():
        raw["estimates"][step] = {"seconds": seconds, "basis": "this demo with --quick on two cores"}


def experiment(*, story: str = "confirmed", port: int = 8001, quick: bool = False) -> Experiment:
    """The demo's experiment: production on ``port``, arms on the next."""
    raw = tomllib.loads((PACKAGE / "demo.toml").read_text())
    raw["production"]["port"] = port
    raw["hosts"]["here"]["state"] = state_folder()
    for arm in raw["arms"]:
        arm["port"] = port + 1
    STORIES[story](raw)
    if quick:
        _quick(raw)
    used = {arm["overlay"] for arm in raw["arms"] if "overlay" in arm}
    raw["overlays"] = {name: raw["overlays"][name] for name in sorted(used)}
    # Staged trees stay and are never overwritten: another version's lie elsewhere.
    version = sha256(canonical([file for name in used for file in raw["overlays"][name]["files"]]))[:12]
    for overlay in raw["overlays"].values():
        overlay["generated"] = f"/var/tmp/fairtrial-demo-{os.getuid()}/{version}"
    return parse(raw, file="demo.toml")


def state_folder() -> str:
    """The host's state folder: the one of all users, unless a test names another."""
    return os.environ.get(STATE) or Host().state


def default_out() -> Path:
    """A folder named after now, in the current one."""
    return Path(f"demo-{time.strftime('%Y%m%dT%H%M%S')}")


def run(*, story: str, out: Path, port: int, keep: bool, quick: bool, progress: Progress | None = None) -> int:
    """Bring production up, run the window, end production; return the window's exit status."""
    lines = progress or Lines()
    if find_spec("numpy") is None or find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise Refused('the demo needs its extra: pip install "fairtrial[demo]"')
    window = experiment(story=story, port=port, quick=quick)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"{out} is there and not an empty folder: name another with --out")
    _restore_dead_demo(lines)
    code: int | None = None
    bring_up(port, quick, lines)
    try:
        code = conduct.run_experiment(window, base=PACKAGE, out=out, progress=lines)
    except (Refused, ExperimentError, KeyboardInterrupt):
        # Ctrl-C comes through only where no window runs: within one it is a signal like others.
        code = 2
        raise
    finally:
        # What is not proved stays as it is, for a person to look at.
        if keep or code not in (0, 2, 3):
            lines.say(f"production stays: 127.0.0.1:{port}")
        else:
            end_production(port, lines)
    return code


def _restore_dead_demo(lines: Progress) -> None:
    """A demo that was killed left its HOLD: bring its production back first, as ``fairtrial restore`` would."""
    state = Path(state_folder())
    for path in [state / "hold.json", *sorted(state.glob("term-*.json"))]:
        try:
            hold = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if str(hold.get("purpose", "")).startswith("fairtrial demo:") and Path(str(hold.get("out"))).is_dir():
            lines.say(f"an earlier demo left its HOLD ({hold['window']}): restoring it first")
            conduct.restore(Path(hold["out"]), progress=lines)


def command(port: int, quick: bool) -> list[str]:
    """How the demo's production is started."""
    return [
        sys.executable,
        "-m",
        "fairtrial.reference",
        "--port",
        str(port),
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--model-size",
        "tiny" if quick else "demo",
    ]


def bring_up(port: int, quick: bool, lines: Progress) -> None:
    """Start production, or use one that an earlier demo left. What it started does not outlive its failure.

    Raises ``Refused`` when anything else listens on the port, or on the arms'.
    """
    argv = command(port, quick)
    for listener in _listeners(port):
        environ = procs.environ(listener["pid"]) or {}
        if environ.get(LABEL) != "production":
            shown = " ".join(listener["argv"][:3])[:60]
            raise Refused(
                f"port {port} is in use by pid {listener['pid']} ({shown}): end it, or choose another: fairtrial demo "
                f"--port {port + 100}"
            )
        if listener["argv"] == argv:
            lines.say(f"an earlier demo left its production on port {port} (pid {listener['pid']}): using it")
            return
        lines.say(f"an earlier demo left another production on port {port} (pid {listener['pid']}): ending it")
        end_production(port, lines)
    for listener in _listeners(port + 1):
        shown = " ".join(listener["argv"][:3])[:60]
        raise Refused(
            f"port {port + 1}, where the arms run, is in use by pid {listener['pid']} ({shown}): end it, or choose "
            f"another: fairtrial demo --port {port + 100}"
        )
    folder = Path(f"/var/tmp/fairtrial-demo-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    environ = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(PACKAGE.parent), LABEL: "production"}
    with (folder / "production.log").open("ab") as log:
        process = subprocess.Popen(
            argv, env=environ, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    lines.say(f"production: the reference server on 127.0.0.1:{port} (pid {process.pid})")
    try:
        _wait_for(process, port, folder / "production.log")
    except BaseException:
        process.kill()
        process.wait()
        raise


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Refused(f"production ended at once (exit {process.returncode}): look into {log}")
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise Refused(f"production did not listen on port {port} within {START_LIMIT_S:g} s: look into {log}")


def end_production(port: int, lines: Progress) -> None:
    """End the production that carries the demo's label on this port."""
    for listener in _listeners(port):
        pid = int(listener["pid"])
        if (procs.environ(pid) or {}).get(LABEL) != "production":
            continue
        descriptor = os.pidfd_open(pid)
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                signal.pidfd_send_signal(descriptor, number)
                deadline = time.monotonic() + 5
                while _listeners(port) and time.monotonic() < deadline:
                    time.sleep(0.02)
                if not _listeners(port):
                    break
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)
        lines.say(f"production ended (pid {pid})")


def _listeners(port: int) -> list[dict[str, Any]]:
    return [procs.shown(one) for one in procs.listeners(port)]
