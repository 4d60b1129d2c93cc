"""Every error that fairtrial raises on purpose, named by who must act next.

FairtrialError
├── ExperimentError   the author of the experiment: file and keys, all faults at once
├── Refused           whoever asked: a precondition does not hold; nothing was touched
├── StepFailed        whoever runs the host: a step of the window failed there
├── NotRestored       a person, now: production is not proved to be back
└── EvidenceError     whoever reads: evidence is missing, damaged or off-protocol (file and line)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class FairtrialError(Exception):
    """Base of all errors raised on purpose. ``str()`` is a message for a person: what, where, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of an experiment file: the dotted key it lies at, and what is wrong and would be right."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


class ExperimentError(FairtrialError):
    """An experiment cannot be used. Carries every fault, each with its key."""

    def __init__(self, file: str, faults: Sequence[Fault]) -> None:
        self.file = file
        self.faults = tuple(faults)
        lines = "\n".join(f"  {fault}" for fault in self.faults)
        count = f"{len(self.faults)} fault" + ("s" if len(self.faults) != 1 else "")
        super().__init__(f"{file}: {count}\n{lines}")


class Refused(FairtrialError):
    """A precondition does not hold, and nothing was touched. Exit status 2."""


class StepFailed(FairtrialError):
    """A step of the window failed on a host: the window stops and restores."""


class NotRestored(FairtrialError):
    """Production is not proved to be back. Exit status 4; the message ends with the commands to type."""


class EvidenceError(FairtrialError):
    """Evidence is missing, damaged, or off-protocol: no verdict can be read from it."""


class Superseded(FairtrialError):
    """Another restorer owns this window and its evidence now: this process writes nothing more."""
