"""What ``run``, ``register``, ``restore`` and ``stop`` do around the runner: files, folders, who we are."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairtrial import __version__, undo
from fairtrial import plan as dry
from fairtrial.canonical import sha256
from fairtrial.control import Control, Here
from fairtrial.decide import State, Status, Stop
from fairtrial.errors import EvidenceError, Refused, StepFailed, Superseded
from fairtrial.evidence import SUMS, next_restore, reseal, unseal
from fairtrial.experiment import Experiment, load
from fairtrial.guards import NS
from fairtrial.ledger import NAME as LEDGER
from fairtrial.ledger import Ledger, utc_text
from fairtrial.progress import Lines, Progress, tell
from fairtrial.restoration import document
from fairtrial.runner import Runner
from fairtrial.secrets import Secrets
from fairtrial.store import Directory, Store, report_unwritten
from fairtrial.summary import load_evidence
from fairtrial.switch import bundle
from fairtrial.ticks import Interrupted
from fairtrial.window import bounds, hold_s, steps

REGISTRATION = "fairtrial.registration/1"
STOP = "STOP"
POLL_S = 0.2
HERE = Here()


def open_experiment(path: Path) -> tuple[Experiment, bytes]:
    """Read an experiment file. Raises ``Refused`` when it cannot be read, ``ExperimentError`` for its faults."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}: name an experiment file (TOML)") from None
    return load(content, file=str(path)), content


def registration(experiment: Experiment, *, folder: Path, registered: bool, at_s: float) -> dict[str, Any]:
    """The registration: the whole experiment, its hash, the commit it lies in, and the time."""
    return {
        "schema": REGISTRATION,
        "sha256": experiment.sha256,
        "experiment": experiment.dump(),
        "commit": _commit(folder),
        "at": utc_text(at_s),
        "registered": registered,
        "fairtrial": __version__,
    }


def _commit(folder: Path) -> str | None:
    """The commit of the checkout that holds the experiment; None outside one, or with changes in it."""
    try:
        asked = [["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]]
        head, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head if head and not changes else None


def register(path: Path) -> Path:
    """Write the registration of an experiment beside it, and return its path. Raises ``Refused`` if it is there."""
    experiment, _ = open_experiment(path)
    target = path.with_suffix(".registration.json")
    content = json.dumps(
        registration(experiment, folder=path.parent, registered=True, at_s=time.time()), indent=1, sort_keys=True
    )
    try:
        with target.open("x") as file:
            file.write(content + "\n")
    except FileExistsError:
        raise Refused(f"{target} is there already: a registration is made once; remove it to register anew") from None
    except OSError as error:
        raise Refused(f"{target}: {error.strerror}") from None
    return target


def _registered(experiment: Experiment, path: Path | None) -> bool:
    if path is None:
        return False
    try:
        found = json.loads(path.read_bytes())["sha256"]
    except OSError as error:
        raise Refused(f"--registration {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise Refused(f"--registration {path}: is no registration: make one with fairtrial register") from None
    if found != experiment.sha256:
        raise Refused(
            f"--registration {path}: registered is {found}, this experiment is {experiment.sha256}: "
            "it was changed after it was registered"
        )
    return True


def run(
    path: Path,
    *,
    out: Path,
    registered_in: Path | None = None,
    max_downtime_min: float | None = None,
) -> int:
    """Run the window of an experiment file. ``registered_in``: the registration that was made of it earlier."""
    experiment, _ = open_experiment(path)
    registered = _registered(experiment, registered_in)
    return run_experiment(
        experiment,
        base=path.parent.absolute(),
        out=out,
        registered=registered,
        max_downtime_min=max_downtime_min,
        stop_files=[path.parent.absolute() / STOP],
    )


def run_experiment(
    experiment: Experiment,
    *,
    base: Path,
    out: Path,
    registered: bool = False,
    max_downtime_min: float | None = None,
    stop_files: Sequence[Path] = (),
    progress: Progress | None = None,
    control: Control = HERE,
) -> int:
    """Run a window and return its exit status. Raises ``Refused`` when nothing was touched."""
    window = steps(experiment)
    limits = bounds(experiment, window, max_downtime_min)
    if limits.abort_s < hold_s(window):
        raise Refused(
            f"the plan needs {hold_s(window) / 60:.1f} min of HOLD, the bound leaves {limits.abort_s / 60:.1f}: "
            "give it more (--max-downtime, bounds.abort_min), or make the window smaller"
        )
    out = out.absolute()
    existed = control.exists(out)
    store = control.create(out)
    backend = control.backend(out / "switch" / "host.pyz")
    key = control.random(32)
    record = registration(experiment, folder=base, registered=registered, at_s=backend.utc())
    first = {
        "registration.json": json.dumps(record, indent=1, sort_keys=True).encode(),
        "plan.json": json.dumps(dry.plan(experiment, max_downtime_min), indent=1, sort_keys=True).encode(),
        "switch/host.pyz": bundle(),
        "snapshot/key": key.hex().encode(),
    }
    begun = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(backend.utc()))
    name = f"{experiment.name}-{begun}-{control.random(3).hex()}"
    runner = Runner(
        experiment=experiment,
        window=name,
        out=out,
        base=base,
        control=control,
        backend=backend,
        store=store,
        ledger=Ledger.create(store, backend),
        progress=progress or Lines(),
        secrets=Secrets(key, experiment.secrets),
        acts=undo.ACTS,
        max_downtime_min=max_downtime_min,
        stop_files=[out / STOP, *stop_files],
    )
    runner.actor = control.actor("runner")
    try:
        for file, content in first.items():
            store.write(file, content)
        runner.record(
            "window",
            window=name,
            base=str(base),
            registration_sha256=sha256(first["registration.json"]),
            experiment_sha256=experiment.sha256,
            actor=runner.actor,
            version=__version__,
        )
        store.anchor(LEDGER)
    except OSError as error:
        control.forget(store, out, existed=existed)
        raise Refused(
            f"{out}: no evidence can be kept there: {error.strerror}: mend that disk, or name another"
        ) from None
    try:
        code = runner.run()
    except Refused:
        control.forget(store, out, existed=existed)
        raise
    except Superseded as error:
        return _superseded(runner, str(error))
    if "hold" not in runner.state.begun and runner.state.status is not Status.RELEASED:
        control.forget(store, out, existed=existed)
        tell("fairtrial: stopped before the HOLD: nothing was touched")
    return _report(runner, code)


def _report(runner: Runner, code: int) -> int:
    stop = runner.state.stop
    if code == 4:
        reason = _unproved(runner)
        tell(
            f"fairtrial: PRODUCTION IS NOT PROVED TO BE BACK: {reason}\n"
            f"  {_stays(runner)}. A person must act now:\n"
            f"    fairtrial status {runner.out}\n"
            f"    fairtrial restore {runner.out}\n"
            f"    fairtrial restore {runner.out} --accept REASON    (you vouch for what serves)",
        )
    elif code == 3 and stop is not None and "hold" in runner.state.begun:
        tell(f"fairtrial: stopped in {stop.step} ({stop.kind}): {stop.reason}")
        tell("fairtrial: production is proved to be back")
        tell(f"fairtrial: next: {_next(runner, stop)}")
    if runner.seal is not None:
        tell(f"fairtrial: evidence {runner.out}, seal {runner.seal}")
    return code


def _stays(runner: Runner) -> str:
    switches = any(host.switch != "none" for host in runner.experiment.hosts.values())
    return "The HOLD and the dead-man's switch stay" if switches else "The HOLD stays; there is no dead-man's switch"


def _next(runner: Runner, stop: Stop) -> str:
    arm = next((step.arm for step in runner.steps if step.name == stop.step), None)
    log = f"arms/{arm}/server.log"
    seen = f"look into {runner.out / log}, mend" if runner.store.exists(log) else "mend"
    asked = stop.kind == "signal" or stop.kind == "guard stop file"
    cause = "if that was not meant, " if asked else f"{seen} the cause, then "
    return f"{cause}run the window again into a new folder; its completed cells are in {runner.out}/summary.json"


def _unproved(runner: Runner) -> str:
    failed = [record for record in runner.ledger.records if record.get("kind") == "end" and record.get("reason")]
    return str(failed[-1]["reason"]) if failed else "an undo step did not end well"


def _superseded(runner: Runner, reason: str) -> int:
    """Another actor restores this window: say so, wait for what it finds, write nothing."""
    tell(f"fairtrial: {reason}")
    runner.installed.clear()
    host = runner.experiment.production.host
    deadline_ns = runner.now() + int(undo.longest_restore_s(runner) * NS)
    while runner.now() < deadline_ns:
        looked = undo.look_at(runner, host)["state"]
        last = looked.get("last") or {}
        if last and last.get("window") != runner.window:
            tell(f"fairtrial: {host} was given back, and another window has used it since")
            return 3
        if last.get("state") in ("released", "served", "down"):
            who = last.get("actor") or {}
            told = f"{last['state']} by {who.get('kind', '?')} (pid {who.get('pid', '?')})"
            tell(f"fairtrial: production on {host}: {told}")
            return 4 if last["state"] == "down" else 3
        runner.backend.sleep(POLL_S)
    return 4


def restore(
    path: Path,
    *,
    now: bool = False,
    accept: str | None = None,
    progress: Progress | None = None,
    control: Control = HERE,
) -> int:
    """Bring production back from the evidence of a window, any number of times.

    Returns 0 when production is proved (or accepted), also when the window was released before; 4 when it is not.
    Raises ``Refused`` when the folder is no window's, or its runner lives.
    """
    out = path.absolute()
    try:
        store = control.open(out)
        experiment, state, records = load_evidence(store)
    except (EvidenceError, FileNotFoundError, NotADirectoryError) as error:
        raise Refused(f"{path}: no window's folder: {error}") from None
    if not records:
        raise Refused(f"{path}: its window ended before its first record: nothing was touched, nothing is to restore")
    window = str(records[0]["window"])
    with control.program() as program:
        backend = control.backend(program)
        key = bytes.fromhex(store.read("snapshot/key").decode()) if store.exists("snapshot/key") else control.random(32)
        runner = Runner(
            experiment=experiment,
            window=window,
            out=out,
            base=Path(str(records[0].get("base", out))),
            control=control,
            backend=backend,
            store=store,
            ledger=Ledger(store, backend, name=LEDGER, lenient=True),
            progress=progress or Lines(),
            secrets=Secrets(key, experiment.secrets),
            acts=undo.ACTS if accept is None else {**undo.ACTS, **undo.accepting(accept)},
        )
        runner.actor = control.actor("restore")
        if _released_before(runner, state):
            tell("fairtrial: this window was released before: nothing was touched")
            return 0
        _refuse_live(runner, records, now=now)
        if "hold" not in state.begun:
            _seal_again(store)
            tell("fairtrial: this window stopped before its HOLD: nothing was touched, nothing is to restore")
            return 0
        if state.status is Status.RELEASED and not _held(runner):
            # Its ledger ends with a release, and the host knows it no more: only the seal may be missing.
            _seal_again(store)
            tell("fairtrial: this window was released before: nothing was touched on the host")
            return 0
        with control.heeding(runner.signals.append):
            try:
                undo.acquire(runner, now=now)
            except StepFailed as error:
                raise Refused(str(error)) from None
            except Interrupted as error:
                raise Refused(f"{error}: while another actor's restore was waited for; it goes on") from None
            except Superseded as error:
                tell(f"fairtrial: {error}")
                return 0
            if _released_before(runner, state):
                tell("fairtrial: another restorer proved and released it")
                return 0
            return _restore(runner, store, records, state, accept)


def _restore(
    runner: Runner, store: Store, records: Sequence[Mapping[str, Any]], state: State, accept: str | None
) -> int:
    number = next_restore(store)
    try:
        # A runner that still lives (stopped, cut off) knows the old file: nothing of it can land here any more.
        store.write(LEDGER, store.read(LEDGER))
        unseal(store, number)
    except OSError as error:
        report_unwritten(f"{LEDGER}, {SUMS}: taken over as they are", error)
    store.anchor(LEDGER)
    runner.ledger = Ledger.open(store, runner.backend, lenient=True)
    runner.resume(runner.ledger.records)
    runner.accepted = {"by": runner.actor["owner"], "reason": accept} if accept is not None else None
    for host, declared in runner.experiment.hosts.items():
        if runner.backend.get(host, f"{declared.state}/restore.json") is None:
            runner.documents[host] = document(
                runner.experiment, window=runner.window, host=host, production=None, log="/dev/null"
            )
    runner.load_reference()
    alive = f"pid {records[0].get('actor', {}).get('pid', '?')}"
    runner.record(
        "restorer",
        number=number,
        lenient=True,
        terms=runner.terms,
        actor=runner.actor,
        reason=f"the runner ({alive}) ended in {state.step or 'preflight'} without restoring",
    )
    try:
        code = runner.run()
    except Superseded as error:
        return 0 if _superseded(runner, str(error)) == 3 else 4
    if code != 4:
        production = runner.experiment.production
        told = "accepted" if accept else "production is proved to be back"
        tell(f"fairtrial: {told}: it serves on {production.address}:{production.port}")
        _report(runner, 0)
        return 0
    return _report(runner, 4)


def _seal_again(store: Store) -> None:
    """Seal what has no seal yet. Production is back: a disk that takes none is told, and stops nothing."""
    try:
        if not store.exists(SUMS):
            reseal(store)
    except OSError as error:
        report_unwritten(f"{SUMS}: this evidence has no seal; free space, then run this again", error)


def _held(runner: Runner) -> bool:
    """Whether a host is still held by this window."""
    for host in runner.experiment.hosts:
        state = undo.look_at(runner, host)["state"]
        if state.get("newest") and (state.get("hold") or {}).get("window") == runner.window:
            return True
    return False


def _released_before(runner: Runner, state: State) -> bool:
    """Whether the hosts say that this window was released as proved, and its evidence is sealed."""
    for host in runner.experiment.hosts:
        looked = undo.look_at(runner, host)["state"]
        last = looked.get("last") or {}
        newest = looked.get("newest")
        held = newest is not None and (looked.get("hold") or {}).get("window") == runner.window
        if held or last.get("window") != runner.window or last.get("state") != "released":
            return False
    return runner.store.exists("SHA256SUMS")


def _refuse_live(runner: Runner, records: Sequence[Mapping[str, Any]], *, now: bool) -> None:
    """Refuse while the runner itself lives and its lease does; a dead runner's term is taken at once."""
    owner = records[0].get("actor") or {}
    for host in runner.experiment.hosts:
        state = undo.look_at(runner, host)["state"]
        newest, hold = state.get("newest"), state.get("hold") or {}
        if newest is None:
            if runner.control.alive(owner):
                raise Refused(
                    f"its runner lives (pid {owner.get('pid')} on {owner.get('host')}): fairtrial stop {runner.out}"
                )
            continue
        if hold.get("window") != runner.window:
            continue
        lease = state.get("lease") or {}
        if newest.get("term") == 0 and lease.get("live") and runner.control.alive(hold) and not now:
            raise Refused(
                f"{host}: its runner lives (pid {hold.get('pid')} on {hold.get('control_host')}, {hold.get('owner')}), "
                f"and its lease runs for {float(lease.get('left_s') or 0):.0f} s more: "
                f"fairtrial stop {runner.out}, or --now to take over"
            )


def stop(path: Path) -> int:
    """Write the STOP file of a running window, wait for its end, and say what was restored."""
    out = path.absolute()
    try:
        store = Directory.open(out)
        _, state, records = load_evidence(store)
    except (EvidenceError, FileNotFoundError, NotADirectoryError) as error:
        raise Refused(f"{path}: no window's folder: {error}") from None
    owner = records[0].get("actor") or {} if records else {}
    if state.status is Status.RELEASED:
        print("this window has ended before; production was proved to be back")
        return 0
    if not HERE.alive(owner):
        raise Refused(f"{path}: its runner (pid {owner.get('pid', '?')}) does not run here: fairtrial restore {path}")
    if state.status is not Status.RESTORING:
        (out / STOP).touch(mode=0o600)
    tell(f"fairtrial: asked pid {owner['pid']} to stop; waiting for its restore")
    while HERE.alive(owner):
        time.sleep(POLL_S)
    summary = json.loads(store.read("summary.json")) if store.exists("summary.json") else {}
    proved = summary.get("restored") is True
    print("production is proved to be back" if proved else f"production is NOT proved: fairtrial restore {path}")
    return 0 if proved else 4
