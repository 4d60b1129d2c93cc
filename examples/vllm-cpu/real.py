"""The windows of this folder on real vLLM: brings production up, runs them one after another, ends production.

.work/venv, made by setup.sh, serves; the Python that runs this file needs fairtrial. Nothing else should run on
the machine. Evidence goes to --out, one folder a window.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent.absolute()
PORT = 8011
READY_LIMIT_S = 180.0
EXPECTED = {"aa": None, "window": "CONFIRMED", "fp8": "UNSAFE"}


def serve() -> subprocess.Popen[bytes]:
    """Start production: vLLM on the CPU, as the head of a process group of its own."""
    work = HERE / ".work"
    argv = [
        *(str(work / "venv" / "bin" / name) for name in ("python", "vllm")),
        "serve",
        str(work / "smollm2-135m"),
        *("--served-model-name", "smollm2-135m", "--host", "127.0.0.1", "--port", str(PORT)),
        *("--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "8"),
        *("--enforce-eager", "--enable-prompt-tokens-details"),
    ]
    environ = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(work),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        # Without it the engine's processes overwrite their environment, and a window's mark in it.
        "SPT_NOENV": "1",
    }
    with (work / "production.log").open("ab") as log:
        return subprocess.Popen(
            argv, env=environ, cwd=work, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def wait_ready(process: subprocess.Popen[bytes]) -> None:
    """Wait for /health; raises ``SystemExit`` when production ends or takes too long."""
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"production ended (exit {process.returncode}): see {HERE}/.work/production.log")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    sys.exit(f"production was not ready within {READY_LIMIT_S:g} s: see {HERE}/.work/production.log")


def end(group: int) -> None:
    """End production's process group, whoever leads it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def listener() -> int | None:
    """The pid that listens on production's port now: the window starts production anew."""
    from fairtrial.switch import procs

    return next((one.pid for one in procs.listeners(PORT)), None)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=Path("real"))
    arguments.add_argument("windows", nargs="*", default=list(EXPECTED), metavar="WINDOW")
    given = arguments.parse_args()
    fairtrial = [sys.executable, "-m", "fairtrial"]
    process = serve()
    failed = []
    try:
        wait_ready(process)
        for name in given.windows:
            out = given.out / name
            registration = HERE / f"{name}.registration.json"
            registered = ["--registration", registration] if registration.exists() else []
            run = [*fairtrial, "run", HERE / f"{name}.toml", "--execute", "--out", out, *registered]
            code = subprocess.run(run).returncode
            sealed = subprocess.run([*fairtrial, "verify", out]).returncode
            read = subprocess.run([*fairtrial, "read", out, "--json"], capture_output=True, text=True).stdout
            expected = EXPECTED.get(name)
            if code != 0 or sealed != 0 or (expected and f'"verdict": "{expected}"' not in read):
                failed.append(f"{name}: exit {code}, verify {sealed}, expected {expected or 'no verdict'}")
    finally:
        pid = listener()
        end(os.getpgid(pid) if pid is not None else process.pid)
    print("\n".join(failed) if failed else f"{len(given.windows)} windows as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
