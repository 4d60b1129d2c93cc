"""The evidence folder of a window: its command records, its seal, and the verification of both.

``SHA256SUMS`` is what ``sha256sum -c`` reads: one line a file, sorted by name. The seal is that file's SHA-256.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fairtrial import ledger
from fairtrial.canonical import canonical, sha256
from fairtrial.errors import EvidenceError, Refused
from fairtrial.ledger import utc_text
from fairtrial.secrets import Screen, Secrets
from fairtrial.store import PARTIAL, Directory, Store, files_below, report_unwritten

SUMS = "SHA256SUMS"
REGISTRATION = "registration.json"

_LINE = re.compile(r"(\\?)([0-9a-f]{64}) [ *](.+)")
_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}
_RESTORE = re.compile(r"restore/([1-9][0-9]*)/")

ProblemKind = Literal["changed", "missing", "extra", "unsealed", "seal", "ledger", "registration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that does not hold: its kind, the name below the folder, and what to make of it."""

    kind: ProblemKind
    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.name!r}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What ``verify`` found: without problems, everything holds. ``seal`` is ``None`` for an unsealed folder."""

    problems: tuple[Problem, ...]
    seal: str | None


def seal(store: Store) -> str:
    """Write the hashes of all files, last of all, and return the seal: 64 hex digits.

    Gives up the reserve, and removes what a killed runner had not written whole.
    """
    store.release_reserve()
    for name in store.names():
        if name.endswith(PARTIAL):
            store.remove(name)
    sums = b"".join(_line(store.digest(name), name) for name in store.names() if name != SUMS)
    store.write(SUMS, sums)
    return sha256(sums)


def next_restore(store: Store) -> int:
    """Return the number of a new restore, 1 for the first: it keeps what it writes below ``restore/N/``."""
    return max(_restores(store.names()), default=0) + 1


def unseal(store: Store, number: int) -> None:
    """Take a seal off before a restore writes; it is kept as ``restore/N/SHA256SUMS.before``."""
    if store.exists(SUMS):
        store.write(f"restore/{number}/{SUMS}.before", store.read(SUMS))
        store.remove(SUMS)


def reseal(store: Store) -> str:
    """Seal after a restore. A seal that is still on is kept beside that restore. Returns the new seal."""
    newest = next_restore(store) - 1
    if newest == 0 or store.exists(f"restore/{newest}/{SUMS}.before"):
        newest += 1
    unseal(store, newest)
    return seal(store)


def verify(path: Path, seal: str | None = None) -> Verification:
    """Hash everything below a window's folder again, and compare it with its seal, its ledger, its registration.

    ``seal`` is the hash that a host's last record keeps. A folder whose runner was killed has the one problem
    ``unsealed`` if nothing else is wrong. Raises ``Refused`` if there is no such folder.
    """
    if not path.is_dir():
        raise Refused(f"{path}: no such folder; name the OUT folder of a window")
    others = sorted(name for name, regular in files_below(path) if not regular)
    return verify_store(Directory(path), seal, others)


def verify_store(store: Store, seal: str | None = None, others: Sequence[str] = ()) -> Verification:
    """``verify``, of a store; ``others`` are the names in it that are no regular files."""
    files = set(store.names())
    problems = [
        Problem(kind="extra", name=name, message="no regular file; a window writes none of these") for name in others
    ]
    sealed_as = None
    if SUMS in files:
        content = store.read(SUMS)
        sealed_as = sha256(content)
        problems += _sum_problems(store, files, content)
        if seal is not None and not hmac.compare_digest(seal.strip().lower().encode(), sealed_as.encode()):
            message = f"the seal is {sealed_as}, not the one given: other evidence, or sealed again since"
            problems.append(Problem(kind="seal", name=SUMS, message=message))
    else:
        message = "the runner did not finish; run `fairtrial restore` on this folder, which seals it"
        problems.append(Problem(kind="unsealed", name=SUMS, message=message))
    problems += _ledger_problems(store, files)
    return Verification(problems=tuple(problems), seal=sealed_as)


class Commands:
    """Keeps every command as ``cmd/NNNN-name.json``, without secrets, prompts and answers.

    ``lenient`` (a restore): what cannot be written goes to standard error and stops nothing.
    """

    def __init__(self, store: Store, *, secrets: Secrets, screen: Screen, lenient: bool = False) -> None:
        self.lenient = lenient
        self._store = store
        self._secrets = secrets
        self._screen = screen
        numbers = (re.match(r"cmd/([0-9]+)-", name) for name in store.names())
        self._last = max((int(number[1]) for number in numbers if number), default=0)

    def keep(
        self,
        name: str,
        *,
        argv: Sequence[str],
        host: str,
        start_utc_s: float,
        end_utc_s: float,
        exit_status: int | None,
        stdout: str,
        stderr: str,
    ) -> str:
        """Write one command down, and return the file's name. ``exit_status`` ``None``: it was never learnt.

        Raises ``OSError`` if the store cannot take it.
        """
        self._last += 1
        file = f"cmd/{self._last:04d}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.json"
        kept_stdout, stdout_dropped = self._screen.lines(stdout)
        kept_stderr, stderr_dropped = self._screen.lines(stderr)
        kept_argv = ["‹text›" if self._screen.lines(argument)[1] else argument for argument in argv]
        record: Mapping[str, object] = {
            "argv": [_encodable(argument) for argument in self._secrets.argv(kept_argv)],
            "host": host,
            "start": utc_text(start_utc_s),
            "end": utc_text(end_utc_s),
            "exit": exit_status,
            "stdout": _encodable(self._secrets.clean(kept_stdout)),
            "stderr": _encodable(self._secrets.clean(kept_stderr)),
            "lines_dropped": {"stdout": stdout_dropped, "stderr": stderr_dropped},
        }
        try:
            self._store.write(file, canonical(record) + b"\n")
        except OSError as error:
            if not self.lenient:
                raise
            report_unwritten(f"{file}: {name} on {host}, exit {exit_status}", error)
        return file


def _encodable(text: str) -> str:
    # Bytes that are no UTF-8 arrive as lone surrogates, which no file can hold.
    return text.encode("utf-8", "backslashreplace").decode()


def _restores(names: Iterable[str]) -> Iterator[int]:
    return (int(match[1]) for name in names if (match := _RESTORE.match(name)))


def _line(digest: str, name: str) -> bytes:
    shown = "".join(_ESCAPES.get(character, character) for character in name)
    escaped = "\\" if shown != name else ""
    return f"{escaped}{digest}  {shown}\n".encode("utf-8", "surrogateescape")


def _sums(content: bytes) -> Iterator[tuple[str, str]]:
    lines = content.decode("utf-8", "surrogateescape").split("\n")
    if lines.pop():
        raise EvidenceError(f"{SUMS}:{len(lines) + 1}: the line has no end")
    originals = {shown: character for character, shown in _ESCAPES.items()}
    for number, line in enumerate(lines, start=1):
        if not (match := _LINE.fullmatch(line)):
            raise EvidenceError(f"{SUMS}:{number}: not a hash and a name")
        escaped, digest, name = match.groups()
        if escaped:
            name = re.sub(r"\\.", lambda pair: originals.get(pair[0], pair[0]), name)
        yield name, digest


def _sum_problems(store: Store, files: set[str], content: bytes) -> Iterator[Problem]:
    try:
        sums = list(_sums(content))
    except EvidenceError as error:
        yield Problem(kind="changed", name=SUMS, message=f"{error}; the seal was edited, nothing rests on it")
        return
    if b"".join(_line(digest, name) for name, digest in sorted(dict(sums).items())) != content:
        yield Problem(kind="changed", name=SUMS, message="lines out of order, or twice: the seal was edited")
    listed = dict(sums)
    for name in sorted(listed.keys() | files - {SUMS}):
        if name not in listed:
            yield Problem(kind="extra", name=name, message="not under the seal; it was added later")
        elif name not in files:
            yield Problem(kind="missing", name=name, message="under the seal, but not there")
        elif (now := _digest_or_reason(store, name)) != listed[name]:
            yield Problem(kind="changed", name=name, message=f"sealed as {listed[name]}, now {now}")


def _digest_or_reason(store: Store, name: str) -> str:
    try:
        return store.digest(name)
    except OSError as error:
        return f"unreadable ({error.strerror})"


def _ledger_problems(store: Store, files: set[str]) -> Iterator[Problem]:
    if SUMS in files and ledger.NAME not in files:
        yield Problem(kind="ledger", name=ledger.NAME, message="missing: no window writes a seal without one")
    for name in sorted(files):
        if name != ledger.NAME and not re.fullmatch(rf"restore/[0-9]+/{re.escape(ledger.NAME)}", name):
            continue
        try:
            records = ledger.read(store.read(name), file=name)
        except EvidenceError as error:
            yield Problem(kind="ledger", name=name, message=str(error))
            continue
        if name == ledger.NAME and records:
            yield from _registration_problems(store, files, records[0].get("registration_sha256"))


def _registration_problems(store: Store, files: set[str], recorded: object) -> Iterator[Problem]:
    now = _digest_or_reason(store, REGISTRATION) if REGISTRATION in files else "missing"
    if recorded != now:
        message = f"the ledger's first record says {recorded}, the file is {now}"
        yield Problem(kind="registration", name=REGISTRATION, message=message)
