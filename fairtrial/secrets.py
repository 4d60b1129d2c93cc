"""What may not be written down: secrets, which are replaced; texts sent or received, whose lines are dropped."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from urllib.parse import quote, unquote

SECRET_WORDS = frozenset(
    {"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASS"}
    | {"CREDENTIAL", "CREDENTIALS", "AUTH", "COOKIE", "DSN"}
)
LONG_CHARACTERS = 8
RUN_CHARACTERS = 24
RUN_IDS = 5

_NOTHING = re.compile(r"(?!)")
_URL_PASSWORD = re.compile(r"""://[^\s/?#:@"']*:(?!‹secret )(?P<value>[^\s/?#"']+)@""")

# Where a value stands in text: after NAME= with or without quotes, as "NAME": "value", after --name, as
# "--name", "value"; quotes may be escaped (\"), and quoted text ends at the very quote that it began with.
_QUOTE = r"""\\{0,4}["']"""
_UNTIL = r"(?!‹secret\ )(?:(?!(?P=%s))(?:\\.|[^\\\n]))*"
_PLACE = rf"""
    (?P<outer>{_QUOTE})?
    (?<![A-Za-z0-9_-]) (?P<name>(?P<option>-)?(?:%s)) (?![A-Za-z0-9_-])
    (?:
        (?(outer) = (?P<whole>{_UNTIL % "outer"}) (?=(?P=outer)) | (?!))
      | = \[? (?P<q>{_QUOTE}) (?P<quoted>{_UNTIL % "q"})
      | = (?!\[?{_QUOTE}|‹secret\ ) (?P<bare>[^\s"']+)
      | {_QUOTE} \s* (?(option)[:,]|:) \s* \[? \s* (?P<r>{_QUOTE}) (?P<member>{_UNTIL % "r"})
      | (?(option) [ \t]+ (?!‹secret\ ) (?P<next>[^\s"'-][^\s"']*) | (?!))
    )
"""
_GROUPS = ("whole", "quoted", "bare", "member", "next")

_ESCAPE = re.compile(r"""((?:\\x[0-9a-fA-F]{2})+)|\\u([0-9a-fA-F]{4})|\\([nrtbf"'/\\])""")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_ESCAPED_TIMES = 3
_NUMBER = re.compile(r"(?<![0-9])[0-9]{1,9}(?![0-9])")
_NUMBERS = re.compile(rf"{_NUMBER.pattern}(?:[\s,\[\]()]+{_NUMBER.pattern}){{{RUN_IDS - 1},}}")


class Secrets:
    """Knows secrets by the names they stand under, and replaces them by an HMAC-SHA256 under the window's key.

    Values of 8 characters and more are replaced wherever they occur, shorter ones where their name stands. Equal
    values under one name give equal marks, so that what was replaced can still be compared. ``extra_names`` are
    whole names, in any case, with dashes or underscores.
    """

    def __init__(self, key: bytes, extra_names: Iterable[str] = ()) -> None:
        self._key = key
        self._extra = frozenset(_plain(name) for name in extra_names)
        self._names: dict[str, str] = {}
        self._forms: dict[str, str] = {}
        self._long = _NOTHING
        words = "|".join(sorted(SECRET_WORDS))
        secret = rf"(?=(?:[A-Za-z0-9]*+[_-]++)*?(?:{words})(?![A-Za-z0-9]))[A-Za-z0-9_-]++"
        extra = ("-?" + re.escape(name).replace("_", "[_-]") for name in sorted(self._extra))
        self._place = re.compile(_PLACE % "|".join([secret, *extra]), re.VERBOSE | re.IGNORECASE)

    def named(self, name: str) -> bool:
        """Return whether the value of an environment variable or argument of this name is a secret."""
        plain = _plain(name)
        return plain in self._extra or not SECRET_WORDS.isdisjoint(plain.split("_"))

    def learn(self, environ: Mapping[str, str], argv: Sequence[str]) -> None:
        """Learn the secrets of one process, to be replaced from now on wherever they occur."""
        for name, value in environ.items():
            if self.named(name):
                self._learn(name, value)
            self._learn_places(value)
        for before, argument in zip(["", *argv], argv, strict=False):
            assignment = self._assignment(argument)
            if assignment:
                self._learn(*assignment)
            elif self._announces(before, argument):
                self._learn(before, argument)
            if not assignment or re.fullmatch("-[a-z]*c", before):
                self._learn_places(argument)
        longest_first = sorted(self._forms, key=len, reverse=True)
        self._long = re.compile("|".join(map(re.escape, longest_first))) if longest_first else _NOTHING

    def clean(self, text: str) -> str:
        """Return a text without secrets: learnt ones anywhere, others after their name (``NAME=``) or in a URL."""
        text = self._long.sub(self._mark_form, text)
        text = _replaced(text, self._places(text), self._mark)
        return _replaced(text, _url_passwords(text), self._mark)

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which secrets are marks; equal values under one name have equal marks."""
        return {
            name: self._mark(name, value) if self.named(name) else self.clean(value) for name, value in environ.items()
        }

    def argv(self, argv: Sequence[str]) -> list[str]:
        """Return arguments in which secrets are marks: of ``--api-key X``, ``--api-key=X``, ``-e API_KEY=X``."""
        cleaned = []
        for before, argument in zip(["", *argv], argv, strict=False):
            if assignment := self._assignment(argument):
                name, value = assignment
                cleaned.append(argument[: len(argument) - len(value)] + self._mark(name, value))
            elif self._announces(before, argument):
                cleaned.append(self._mark(before, argument))
            else:
                cleaned.append(self.clean(argument))
        return cleaned

    def _announces(self, before: str, argument: str) -> bool:
        return before.startswith("-") and "=" not in before and self.named(before) and not argument.startswith("-")

    def _assignment(self, argument: str) -> tuple[str, str] | None:
        pieces = argument.split("=")
        for number, name in enumerate(pieces[:-1], start=1):
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                return None
            if self.named(name):
                return name, "=".join(pieces[number:])
        return None

    def _learn_places(self, text: str) -> None:
        for name, start, end in self._places(text):
            self._learn(name, text[start:end])
        for name, start, end in _url_passwords(text):
            self._learn(name, text[start:end])
            self._learn(name, unquote(text[start:end]))

    def _learn(self, name: str, value: str) -> None:
        # Lines too: a key of many lines may be cut up by whoever prints it.
        for part in (value, *value.splitlines()):
            if len(part) >= LONG_CHARACTERS and part not in self._names and not part.startswith("‹secret "):
                self._names[part] = name
                for form in _forms(part):
                    self._forms.setdefault(form, part)

    def _places(self, text: str) -> Iterator[tuple[str, int, int]]:
        for found in self._place.finditer(text):
            group = next(group for group in _GROUPS if found[group] is not None)
            yield found["name"], *found.span(group)

    def _mark_form(self, found: re.Match[str]) -> str:
        value = self._forms[found[0]]
        return self._mark(self._names[value], value)

    def _mark(self, name: str, value: str) -> str:
        digest = hmac.new(self._key, value.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
        return f"‹secret {name.strip('-')} hmac:{digest[:16]}›"


class Screen:
    """Drops the lines that hold a run of 24 characters, or of 5 token ids, of anything sent or received.

    ``sent`` holds texts and lists of token ids. Runs are found across line ends too, and in text escaped as JSON
    or Python does. What is shorter than a run is not known by it.
    """

    def __init__(self, sent: Iterable[str | Sequence[int]] = ()) -> None:
        # Hashes, not the runs themselves, which would hold a prompt of 150,000 ids five times over.
        self._runs: set[int] = set()
        self._id_runs: set[int] = set()
        for item in sent:
            if isinstance(item, str):
                self.learn_text(item)
            else:
                self.learn_ids(item)

    def learn_text(self, text: str) -> None:
        """Add a text that was sent or received."""
        self._runs.update(hash(text[at : at + RUN_CHARACTERS]) for at in range(len(text) - RUN_CHARACTERS + 1))

    def learn_ids(self, ids: Sequence[int]) -> None:
        """Add the token ids of something that was sent or received, in order."""
        self._id_runs.update(_id_runs(ids))

    def lines(self, text: str) -> tuple[str, int]:
        """Return the lines that may be kept, each as it was, and the number of those dropped."""
        lines = text.split("\n")
        dropped = self.held(lines)
        return "\n".join(line for number, line in enumerate(lines) if number not in dropped), len(dropped)

    def held(self, lines: Sequence[str]) -> set[int]:
        """Return the numbers of the lines that hold a run, or a part of one that goes on in the next."""
        text = "\n".join(lines)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line) + 1)
        dropped: set[int] = set()
        for start, end in self._held(text):
            dropped.update(range(bisect_right(starts, start) - 1, bisect_right(starts, end - 1)))
        for number, line in enumerate(lines):
            if "\\" in line and number not in dropped and self._holds_escaped(line):
                dropped.add(number)
        return dropped

    def _held(self, text: str) -> Iterator[tuple[int, int]]:
        if self._runs:
            for start in range(len(text) - RUN_CHARACTERS + 1):
                run = text[start : start + RUN_CHARACTERS]
                if hash(run) in self._runs:
                    yield start + len(run) - len(run.lstrip("\n")), start + len(run)
        if self._id_runs:
            for numbers in _NUMBERS.finditer(text):
                found = list(_NUMBER.finditer(text, *numbers.span()))
                for first, run_hash in enumerate(_id_runs([int(number[0]) for number in found])):
                    if run_hash in self._id_runs:
                        yield found[first].start(), found[first + RUN_IDS - 1].end()

    def _holds_escaped(self, line: str) -> bool:
        for _ in range(_ESCAPED_TIMES):
            plain = _unescaped(line)
            if plain == line:
                break
            if any(self._held(plain)):
                return True
            line = plain
        return False


def _plain(name: str) -> str:
    return name.strip("-").replace("-", "_").upper()


def _forms(value: str) -> set[str]:
    quoted = json.dumps(value)[1:-1]
    return {
        value,
        quoted,
        json.dumps(quoted)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        repr(value)[1:-1],
        quote(value, safe="", errors="surrogatepass"),
    }


def _url_passwords(text: str) -> Iterator[tuple[str, int, int]]:
    return (("URL", *found.span("value")) for found in _URL_PASSWORD.finditer(text))


def _replaced(text: str, places: Iterable[tuple[str, int, int]], mark: Callable[[str, str], str]) -> str:
    pieces = []
    kept = 0
    for name, start, end in places:
        if end > start:
            pieces += [text[kept:start], mark(name, text[start:end])]
            kept = end
    return "".join([*pieces, text[kept:]])


def _id_runs(ids: Sequence[int]) -> Iterator[int]:
    return (hash(tuple(ids[at : at + RUN_IDS])) for at in range(len(ids) - RUN_IDS + 1))


def _unescaped(line: str) -> str:
    plain = _ESCAPE.sub(_character, line)
    # JSON writes what lies beyond U+FFFF as two escapes.
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _character(escape: re.Match[str]) -> str:
    if escape[1]:
        content = bytes.fromhex(escape[1].replace("\\x", ""))
        try:
            return content.decode()
        except UnicodeDecodeError:
            return content.decode("latin-1")
    if escape[2]:
        return chr(int(escape[2], 16))
    return _CONTROLS.get(escape[3], escape[3])
