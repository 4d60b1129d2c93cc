"""Loads the mixture of experts, each file from where it is mounted, and hashes the very bytes that it compiles."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import cast

from fairtrial.canonical import sha256
from fairtrial.errors import Refused
from fairtrial.reference.shape import Mixture

BASE = Path(__file__).parent / "moe"
TARGETS = ("moe/router.py", "moe/dispatch.py", "moe/experts.py")
"""The files that an overlay can replace; beside them it may add files that these import."""

_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mounted:
    """A loaded mixture of experts.

    ``sources`` is target -> SHA-256 of the bytes that were compiled, ``added`` is target -> what the file's own
    ``report()`` says (``None`` without one) for each file that is not production's.
    """

    mixture: Callable[..., Mixture]
    sources: Mapping[str, str]
    added: Mapping[str, Callable[[], Mapping[str, object]] | None]


class _Loader(SourceFileLoader):
    """Compiles a file's bytes, never a cached bytecode of them, and writes their hash down."""

    def __init__(self, fullname: str, path: str, target: str, sources: dict[str, str]) -> None:
        super().__init__(fullname, path)
        self._target = target
        self._sources = sources

    def get_code(self, fullname: str) -> CodeType | None:
        content = self.get_data(self.path)
        self._sources[self._target] = sha256(content)
        return self.source_to_code(content, self.path)


class _Finder(MetaPathFinder):
    def __init__(self, package: str, files: Mapping[str, Path], sources: dict[str, str]) -> None:
        self._files = {f"{package}.{Path(target).stem}": (target, path) for target, path in files.items()}
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._files:
            return None
        name, file = self._files[fullname]
        loader = _Loader(fullname, str(file), name, self._sources)
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


def mount(overlays: Mapping[str, Path]) -> Mounted:
    """Load production's mixture of experts with ``overlays`` (target -> file) mounted over it.

    Raises ``Refused`` for a target that is none, a file that is not there, one that does not load, and an added
    file that no mounted file imports (a mistyped target would else go unnoticed).
    """
    for target, path in overlays.items():
        if Path(target).parent.as_posix() != "moe" or not Path(target).stem.isidentifier():
            raise Refused(
                f"overlay {target}: no such target; use {', '.join(TARGETS)}, or moe/NAME.py for an added file"
            )
        if not path.is_file():
            raise Refused(f"overlay {target}: {path} is not a file; give the path of the file to mount")
    files = {target: BASE.parent / target for target in TARGETS} | dict(overlays)
    # Every mount is a package of its own, so that two of them never share a module.
    package = f"{__package__}.moe_{next(_numbers)}"
    parent = ModuleType(package)
    parent.__path__ = []
    sys.modules[package] = parent
    sources: dict[str, str] = {}
    finder = _Finder(package, files, sources)
    sys.meta_path.insert(0, finder)
    try:
        module = importlib.import_module(f"{package}.experts")
        mixture = cast("Callable[..., Mixture]", module.Experts)
    except (ImportError, SyntaxError, AttributeError) as error:
        raise Refused(f"overlays {sorted(overlays)} do not load: {error}; correct the named file") from error
    finally:
        sys.meta_path.remove(finder)
    unused = sorted(set(overlays) - set(sources))
    if unused:
        raise Refused(
            f"overlay {', '.join(unused)}: nothing imports it; mount the files that do, or correct the target"
        )
    added = {
        target: getattr(sys.modules[f"{package}.{Path(target).stem}"], "report", None)
        for target in sorted(set(overlays) - set(TARGETS))
    }
    return Mounted(mixture=mixture, sources=dict(sorted(sources.items())), added=added)
