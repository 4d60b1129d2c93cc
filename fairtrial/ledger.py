"""The ledger of a window: what is about to be done and what was seen, on disk before anything else happens.

One canonical JSON object a line: ``seq`` (1, 2, ...: the line's number), ``at`` (UTC), ``mono_ns``, ``prev``
(SHA-256 of the line before without its newline, ``""`` on the first), ``kind``, and the fields of that kind.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Protocol

from fairtrial.canonical import canonical, sha256
from fairtrial.errors import EvidenceError, Refused
from fairtrial.store import Store, report_unwritten

NAME = "ledger.jsonl"

Record = dict[str, Any]

_OWN = {"seq": int, "at": str, "mono_ns": int, "prev": str, "kind": str}


class Clock(Protocol):
    """Where a ledger's times come from."""

    def utc(self) -> float:
        """Return seconds since 1970, UTC."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds that never go back within one run."""


class Ledger:
    """Appends records to one file of a store, each fsynced before ``append`` returns.

    ``records`` holds all of them, those of an earlier runner too. With ``lenient`` set (a restore), a record that
    cannot be written goes to standard error, and is written before the next that can.
    """

    def __init__(self, store: Store, clock: Clock, *, name: str, lenient: bool) -> None:
        self.records: list[Record] = []
        self.lenient = lenient
        self._store = store
        self._clock = clock
        self._name = name
        self._seq = 0
        self._prev = ""
        self._unwritten: list[Record] = []

    @classmethod
    def create(cls, store: Store, clock: Clock, *, name: str = NAME, lenient: bool = False) -> Ledger:
        """Begin an empty ledger. Raises ``Refused`` if there is one already."""
        if store.exists(name):
            raise Refused(f"{name}: there already; `fairtrial restore` continues a window that was interrupted")
        return cls(store, clock, name=name, lenient=lenient)

    @classmethod
    def open(cls, store: Store, clock: Clock, *, name: str = NAME, lenient: bool = False) -> Ledger:
        """Continue the ledger of a runner that died. A torn last line is cut off, and a record ``torn`` says so.

        Raises ``EvidenceError`` if there is no ledger, or if it is damaged before its last line.
        """
        if not store.exists(name):
            raise EvidenceError(f"{name}: missing; name the OUT folder of a window that has begun")
        content = store.read(name)
        ledger = cls(store, clock, name=name, lenient=lenient)
        ledger.records = read(content, file=name)
        whole = _whole(content)
        ledger._seq = len(ledger.records)
        ledger._prev = sha256(whole.split(b"\n")[-2]) if whole else ""
        if torn := content[len(whole) :]:
            try:
                store.truncate(name, len(whole))
            except OSError as error:
                if not lenient:
                    raise
                report_unwritten(f"{name}: a torn last line could not be cut off", error)
            ledger.append("torn", bytes=len(torn), sha256=sha256(torn))
        return ledger

    def append(self, kind: str, **fields: Any) -> Record:
        """Write one record, and return it as ``read`` will.

        Raises ``ValueError`` or ``TypeError`` for what JSON cannot hold, ``OSError`` if the store cannot take it.
        """
        if taken := fields.keys() & _OWN.keys():
            raise ValueError(f"{kind}: fields {sorted(taken)} are the ledger's own; give them other names")
        at = {"at": utc_text(self._clock.utc()), "mono_ns": self._clock.monotonic_ns()}
        record: Record = {**at, "kind": kind, **fields}
        try:
            while self._unwritten:
                # what a full disk did not take comes first: without it the next record could not follow
                self._write(self._unwritten[0])
                self._unwritten.pop(0)
            record = self._write(record)
        except (OSError, ValueError, TypeError) as error:
            if not self.lenient:
                raise
            shown = f"{self._name}: a record of kind {kind}"
            try:
                shown = canonical(record).decode()
            except (ValueError, TypeError):
                pass
            else:
                self._unwritten.append(record)
            report_unwritten(shown, error)
        self.records.append(record)
        return record

    def _write(self, fields: Record) -> Record:
        line = canonical({"seq": self._seq + 1, "prev": self._prev, **fields})
        record = _parsed(line)
        self._store.append(self._name, line + b"\n")
        self._seq += 1
        self._prev = sha256(line)
        return record


def read(content: bytes, *, file: str = NAME) -> list[Record]:
    """Return the records of a ledger; a torn last line is left out, for its ``append`` never returned.

    Raises ``EvidenceError`` with file and line for a line that is no record, a gap in ``seq``, a broken chain.
    """
    records: list[Record] = []
    prev = ""
    for number, line in enumerate(_whole(content).split(b"\n")[:-1], start=1):
        record = _record(line, f"{file}:{number}")
        if record["seq"] != number:
            raise _damage(f"{file}:{number}", f"seq is {record['seq']}, expected {number}: records are missing")
        if record["prev"] != prev:
            raise _damage(f"{file}:{number}", "prev is not the SHA-256 of the line before: one of them changed")
        records.append(record)
        prev = sha256(line)
    return records


def utc_text(utc_s: float) -> str:
    """Return seconds since 1970 as ISO 8601 UTC with milliseconds, such as ``2026-11-29T15:14:07.123Z``."""
    moment = datetime.fromtimestamp(round(utc_s * 1000) / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _whole(content: bytes) -> bytes:
    whole = content[: content.rfind(b"\n") + 1]
    # After a power cut a block that was never written reads as zeros, even before a newline that was.
    last = whole.rfind(b"\n", 0, -1) + 1
    return whole[:last] if b"\0" in whole[last:] else whole


@lru_cache(maxsize=1 << 14)
def _parsed(line: bytes) -> Record:
    """A line as its record: parsed once, however often one process reads its ledger. Nobody changes a record."""
    record = json.loads(line)
    unchanged = canonical(record) == line
    if not isinstance(record, dict) or not all(type(record.get(key)) is kind for key, kind in _OWN.items()):
        raise TypeError(f"not a record: it needs {', '.join(_OWN)}")
    if not unchanged:
        raise TypeError("not in canonical form: it was edited")
    return record


def _record(line: bytes, where: str) -> Record:
    try:
        return _parsed(line)
    except (ValueError, RecursionError):
        raise _damage(where, "not a JSON record") from None
    except TypeError as error:
        raise _damage(where, str(error)) from None


def _damage(where: str, what: str) -> EvidenceError:
    return EvidenceError(f"{where}: {what}; use an unchanged copy of this folder, if there is one")
