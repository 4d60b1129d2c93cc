"""The undo steps as lists of the host program's verbs: what the runner plays, and the switch plays alone.

The document is compiled once, at step ``switch``, and lies on the host as ``restore.json``. The verbs are those of
``fairtrial.switch``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.experiment import Experiment
from fairtrial.guards import GIB, MIB
from fairtrial.identity import Identity

STILL_B = 256 * MIB
MEMORY_LIMIT_S = 120.0
END_LIMIT_S = 90.0
SCHEMA = "fairtrial.restore/1"


def memory(experiment: Experiment, held_b: int = 0, *, floor: bool = True) -> dict[str, Any]:
    """How memory must come back once a server has stopped (bytes, seconds).

    ``floor``: what has not come back stops nothing where there is enough for the floor and production (``held_b``).
    """
    return {
        "floor_b": int(experiment.guards.memory_floor_gib * GIB) if floor else None,
        "production_b": held_b,
        "limit_s": MEMORY_LIMIT_S,
        "still_s": experiment.waits.still_s,
        "still_b": STILL_B,
    }


def idle(experiment: Experiment) -> dict[str, Any] | None:
    """How the host program sees under its lock that production serves nobody; None: it cannot."""
    if experiment.server.metrics is None:
        return None
    return {
        "host": experiment.production.address,
        "port": experiment.production.port,
        "path": experiment.server.metrics,
        "names": {
            "running": ["vllm:num_requests_running", "llamacpp:requests_processing"],
            "waiting": ["vllm:num_requests_waiting", "llamacpp:requests_deferred"],
        },
    }


def generation(experiment: Experiment) -> dict[str, Any]:
    """One generation of one token: the proof that a server serves."""
    low = experiment.protocol.token_ids[0]
    body = {"model": experiment.server.model, "prompt": [low] * 4, "max_tokens": 1, "temperature": 0}
    return {"path": experiment.server.completions, "body": body}


def document(
    experiment: Experiment,
    *,
    window: str,
    host: str,
    production: Identity | None,
    log: str,
    held_b: int = 0,
    was: Sequence[tuple[int, int]] = (),
) -> Mapping[str, Any]:
    """Compile the restore of one host: of its own part of production, and no other.

    ``was``: the processes that served before, pid and start time: what a broken stop left of them is ended first.
    ``production`` None (nothing is known but that it serves): prove readiness and one generation only.
    """
    serves = experiment.serves(host)
    address = experiment.production.address if serves else experiment.hosts[host].address
    serving: dict[str, Any] = {"host": address, "port": experiment.port(host)}
    if production is not None:
        serving |= {
            "argv": list(production.argv),
            "environ": dict(production.environ),
            "cwd": production.cwd,
            "exe": production.exe,
            "uid": production.uid,
            "process": production.process,
        }
    end = {
        "verb": "end",
        "what": "window",
        "limit_s": END_LIMIT_S,
        "grace_s": experiment.production.grace_s,
        "memory": memory(experiment, held_b),
    }
    start = {
        "verb": "start",
        "what": "production",
        **serving,
        "log": log,
        "limit_s": experiment.production.start_limit_s,
        "was": [[pid, begun] for pid, begun in was],
        "grace_s": experiment.production.grace_s,
    }
    prove = {
        "verb": "prove",
        **serving,
        "ready": experiment.server.ready if serves else None,
        "generation": generation(experiment) if serves else None,
        "settle_s": experiment.waits.settle_s,
        "limit_s": experiment.production.start_limit_s,
    }
    return {
        "schema": SCHEMA,
        "window": window,
        "host": host,
        "lease_s": experiment.waits.lease_s,
        "beat_s": min(1.0, experiment.waits.lease_s / 4),
        "retry_s": experiment.waits.retry_s,
        "steps": {
            "restore.end": [end],
            "restore.start": [start, {"verb": "policy"}] if production is not None else [],
            "restore.prove": [prove],
        },
    }
