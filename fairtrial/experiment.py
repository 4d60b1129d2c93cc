"""The experiment file: everything a window will do, and how it will be read, decided before it runs.

``load`` takes TOML bytes and returns an ``Experiment``, or raises ``ExperimentError`` with every fault and
its key. The registration of an experiment is its canonical bytes (``Experiment.registration``) and their SHA-256.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

import tomllib
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from fairtrial.canonical import canonical, sha256
from fairtrial.errors import ExperimentError, Fault
from fairtrial.reading.thresholds import MATCH_THRESHOLDS, Thresholds
from fairtrial.secrets import Secrets

SCHEMA = "fairtrial.experiment/1"

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Natural = Annotated[int, Field(ge=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
UrlPath = Annotated[str, Field(pattern=r"^/[^\s?#]*$")]


class Part(BaseModel):
    """A frozen part of the file; unknown keys are faults."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Host(Part):
    """A machine that carries a part of production."""

    backend: Literal["local"] = "local"
    address: str = "127.0.0.1"
    """Where the control host reaches its part of production; of the serving host it is ``production.address``."""
    port: Port | None = None
    """Where its part of production (a rank that serves nobody by itself) listens; of the serving host it is
    ``production.port``. An arm's rank takes the same place."""
    state: str = Field(default="/var/tmp/fairtrial", pattern=r"^/")
    switch: Literal["process", "none"] = "process"
    gpu: Literal[False] = False


class Server(Part):
    """How the server is spoken to. Paths are those of vLLM, which others share."""

    model: str = Field(min_length=1)
    completions: UrlPath = "/v1/completions"
    ready: UrlPath = "/health"
    metrics: UrlPath | None = "/metrics"
    tokenize: UrlPath = "/tokenize"
    reported: tuple[UrlPath, ...] = ("/version", "/v1/models")
    sources: UrlPath | None = None
    """Where the server itself says which source files it loaded: ``{"sources": {target: sha256}}``."""
    port_argument: str = "--port"
    context_argument: str | None = "--max-model-len"
    mount_argument: str | None = None
    """How a process is told of a mounted file, such as ``--overlay={target}={source}``."""
    counters_wait_s: Annotated[float, Field(ge=0)] = 2.0
    """How long a finished request may take to show in the server's counters."""

    @field_validator("metrics", "context_argument", mode="before")
    @classmethod
    def _without(cls, value: object) -> object:
        """``false`` says that there is none: TOML has no null."""
        return None if value is False else value


class Production(Part):
    """The service that runs when no window does."""

    host: str
    address: str = "127.0.0.1"
    port: Port
    launcher: Literal["process"] = "process"
    start_limit_s: Positive
    """Three times the measured start: how long a start may take before it has failed."""
    stop_limit_s: Annotated[float, Field(gt=0, le=90)] = 60
    grace_s: Annotated[float, Field(gt=0, le=80)] = 30
    """Between SIGTERM and SIGKILL, for production and for arms."""
    log: str | None = Field(default=None, pattern=r"^/")
    """Where production's output goes once it is started again; none: to the file that it goes to now."""


class OverlayFile(Part):
    """One file that an overlay puts over the server's own."""

    target: str = Field(min_length=1)
    source: str = Field(min_length=1)
    sha256: Sha256
    base_sha256: Sha256 | None = None
    """What it replaces, as production must have loaded it; none: the file is added."""


class Overlay(Part):
    """Files built from known bases, copied to the host only where absent, and mounted over production's."""

    generated: str = Field(pattern=r"^/")
    """The folder on the host that holds staged trees; the overlay lies in it under its own name."""
    files: Annotated[tuple[OverlayFile, ...], Field(min_length=1)]


class Tell(Part):
    """A line of the arm's log that is there if and only if its switch bit."""

    log: str = Field(min_length=1)


class Arm(Part):
    """Production plus declared differences, nothing else. ``false`` takes an argument or a variable away."""

    name: Name
    port: Port
    arguments: dict[str, str | bool | None] = {}
    environment: dict[str, str | Literal[False] | None] = {}
    overlay: str | None = None
    checks: tuple[Literal["a", "aa", "b"], ...] = ()
    """The logit slots that this arm's checks fill; empty: the arm has no checks."""
    tells: tuple[Tell, ...] = ()
    reps: Natural | None = None


class Cell(Part):
    """One shape of request; ``reps`` times, each under a salt of its own."""

    name: Name
    prompt_tokens: Natural
    output_tokens: Natural
    reps: Natural = 1
    timed: bool = True
    logprobs: bool = False


class Protocol(Part):
    """The requests that every arm is sent, in order, byte for byte the same."""

    seed: str = Field(min_length=1)
    token_ids: tuple[int, int]
    """Prompts are drawn from ``low <= id < high``."""
    cells: Annotated[tuple[Cell, ...], Field(min_length=1)]
    limit_s: Positive
    """The longest that one request may take."""
    coldness: Literal["cached_tokens", "unproved"] = "cached_tokens"


class Greedy(Part):
    """Greedy prompts whose answers are compared by hash."""

    prompts: Natural = 6
    prompt_tokens: Natural = 64
    output_tokens: Annotated[int, Field(ge=1, le=300)] = 48
    file: str | None = None
    sha256: Sha256 | None = None


class Probe(Part):
    """The cold prompt whose first-token distribution is compared: a seeded list of dice throws."""

    tokens: Natural
    mass_min: Annotated[float, Field(gt=0, le=1)] = 0.995
    entropy_min_nats: Annotated[float, Field(ge=0)] = 0.3


class Checks(Part):
    greedy: Greedy = Greedy()
    probe: Probe


class Waits(Part):
    """Registered waits, seconds."""

    idle_s: Positive = 5
    idle_limit_s: Positive = 120
    still_s: Positive = 5
    settle_s: Positive = 10
    lease_s: Annotated[float, Field(ge=1, le=3600)] = 120
    retry_s: Positive = 300


class Guards(Part):
    memory_min_gib: Positive = 4
    memory_floor_gib: Positive = 5
    swap_growth_max_mib: Annotated[float, Field(ge=0)] = 256
    cadence_s: Annotated[float, Field(gt=0, le=5)] = 1.0


class Bounds(Part):
    """Limits on the HOLD clock, minutes. None: from the plan's own times."""

    submit_min: Positive | None = None
    abort_min: Positive | None = None
    arm_min: Positive | None = None


class Text(Part):
    meaning: str
    next: str


class Reading(Part):
    """The rule, fixed before the window."""

    rule: Literal["match", "none"]
    cell: str
    off: str | None = None
    cause: str | None = None
    fix: str | None = None
    thresholds: dict[str, float | int] = {}
    texts: dict[Literal["CONFIRMED", "REFUTED", "CAUSE_NOT_REPRODUCED", "UNSAFE", "AMBIGUOUS"], Text] = {}


class Estimate(Part):
    """What one kind of step takes, and what that was measured on."""

    seconds: Annotated[float, Field(ge=0)]
    basis: str


class Site(Part):
    """What the site does last, by its own commands, after production is proved (may be empty)."""

    close: tuple[tuple[str, ...], ...] = ()


class Experiment(Part):
    """A whole experiment. Build it with ``load``, which checks the parts against each other."""

    schema_: Literal["fairtrial.experiment/1"] = Field(alias="schema")
    name: Name
    question: str = Field(min_length=1)
    purpose: str = Field(min_length=1)
    hosts: Annotated[dict[Name, Host], Field(min_length=1)]
    server: Server
    production: Production
    overlays: dict[Name, Overlay] = {}
    arms: Annotated[tuple[Arm, ...], Field(min_length=1)]
    protocol: Protocol
    checks: Checks | None = None
    waits: Waits = Waits()
    guards: Guards = Guards()
    bounds: Bounds = Bounds()
    reading: Reading
    estimates: dict[str, Estimate] = {}
    site: Site = Site()
    secrets: tuple[str, ...] = ()
    """Names that are secret beyond those known by their words."""

    def dump(self) -> dict[str, Any]:
        """The experiment as a JSON value."""
        return self.model_dump(mode="json", by_alias=True)

    def registration(self) -> bytes:
        """The canonical bytes: what is hashed, and what a reader needs to read the window again."""
        return canonical(self.dump())

    @property
    def sha256(self) -> str:
        return sha256(self.registration())

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def serves(self, host: str) -> bool:
        """Whether production and arms are spoken to on this host; on any other a rank of them runs."""
        return host == self.production.host

    @property
    def ranks_first(self) -> tuple[str, ...]:
        """The hosts in the order in which their parts are started: who serves comes last."""
        return tuple(sorted(self.hosts, key=self.serves))

    def port(self, host: str, arm: Arm | None = None) -> int:
        """Where a host's part of an arm listens, or of production."""
        own = self.hosts[host].port
        if self.serves(host) or own is None:
            return arm.port if arm else self.production.port
        return own

    def ports(self, host: str) -> list[int]:
        """Every port of a host that production or an arm listens on."""
        return sorted({self.port(host), *(self.port(host, arm) for arm in self.arms)})

    def reps(self, arm: Arm, cell: Cell) -> int:
        """How often this arm runs this cell: the arm's own count where it names one."""
        return arm.reps if arm.reps is not None and cell.timed else cell.reps


THRESHOLDS = (
    "spread_max",
    "speedup_max",
    "band",
    "refute_min",
    "greedy_total",
    "kl_min",
    "kl_floor_multiple",
    "mass_min",
    "top_n",
    "reps",
)


def schema() -> dict[str, Any]:
    """The JSON Schema of an experiment file."""
    return Experiment.model_json_schema(by_alias=True)


def load(content: bytes, *, file: str) -> Experiment:
    """Read an experiment from TOML bytes.

    ``file`` names it in messages. Raises ``ExperimentError`` with every fault found, each with its key.
    """
    try:
        raw = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ExperimentError(file, [Fault(key="(file)", message=f"is not UTF-8: {error}")]) from None
    except ValueError as error:
        raise ExperimentError(file, [Fault(key="(file)", message=f"is not TOML: {error}")]) from None
    except RecursionError:
        raise ExperimentError(file, [Fault(key="(file)", message="is nested too deeply")]) from None
    return parse(raw, file=file)


def parse(raw: Mapping[str, Any], *, file: str) -> Experiment:
    """Read an experiment from a value (TOML or JSON). Raises ``ExperimentError`` as ``load`` does."""
    try:
        content = canonical(dict(raw))
    except (TypeError, ValueError, RecursionError) as error:
        fault = Fault(key="(file)", message=f"holds a value that JSON cannot: {error}")
        raise ExperimentError(file, [fault]) from None
    faults: list[Fault] = []
    parts: dict[str, Any] = {}
    try:
        parts = dict(Experiment.model_validate_json(content))
    except ValidationError as error:
        faults += _faults(error)
        # The parts that are sound are still held against each other, so that one reading names every fault.
        broken = {fault.key.split(".")[0] for fault in faults}
        for key, field in Experiment.model_fields.items():
            if key in raw and key not in broken:
                parts[key] = TypeAdapter[Any](field.rebuild_annotation()).validate_json(canonical(raw[key]))
            elif key not in raw and not field.is_required():
                parts[key] = field.get_default(call_default_factory=True)
    faults += _across(parts)
    if faults:
        raise ExperimentError(file, sorted(faults, key=lambda fault: fault.key))
    return Experiment.model_validate_json(content)


def _faults(error: ValidationError) -> Iterator[Fault]:
    for detail in error.errors(include_url=False, include_context=False):
        path = ".".join(str(part) for part in detail["loc"])
        given = detail["input"]
        shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool) else ""
        if detail["type"] == "extra_forbidden":
            yield Fault(key=path, message="no such key here (docs/experiment.md names all)")
            continue
        yield Fault(key=path, message=detail["msg"].removeprefix("Input ").strip() + shown)


def _across(parts: Mapping[str, Any]) -> Iterator[Fault]:
    """What no part can know alone. Parts that are faulty themselves are absent here."""
    for key, check in _CHECKS:
        needed = key.split()
        if all(part in parts for part in needed):
            yield from check(*(parts[part] for part in needed))


def _across_hosts(hosts: dict[str, Host], production: Production) -> Iterator[Fault]:
    if production.host not in hosts:
        yield Fault(key="production.host", message=f"no such host; known: {', '.join(hosts)}")
    states: dict[str, str] = {}
    for name, host in hosts.items():
        if name == production.host and host.port is not None:
            yield Fault(key=f"hosts.{name}.port", message="leave it out: this host's port is production.port")
        if name != production.host and host.port is None and production.host in hosts:
            yield Fault(
                key=f"hosts.{name}.port",
                message="missing: say where its part of production listens (every host carries a part)",
            )
        if host.state in states:
            message = f"is that of {states[host.state]} too: hosts on one machine need a state folder each"
            yield Fault(key=f"hosts.{name}.state", message=message)
        states[host.state] = name


def _across_arms(arms: tuple[Arm, ...]) -> Iterator[Fault]:
    seen: set[str] = set()
    for index, arm in enumerate(arms):
        if arm.name in seen:
            yield Fault(key=f"arms.{index}.name", message=f"{arm.name!r} is named twice")
        seen.add(arm.name)
        if arm.name in ("restore", "switch"):
            yield Fault(key=f"arms.{index}.name", message=f"{arm.name!r} is the name of a step: choose another")
        for name in arm.arguments:
            if not name.startswith("-"):
                yield Fault(key=f"arms.{index}.arguments.{name}", message="must begin with a dash")
        for number, tell in enumerate(arm.tells):
            try:
                re.compile(tell.log)
            except re.error as error:
                key = f"arms.{index}.tells.{number}.log"
                yield Fault(key=key, message=f"is no regular expression: {error}")


def _across_overlays(arms: tuple[Arm, ...], overlays: dict[str, Overlay], server: Server) -> Iterator[Fault]:
    for index, arm in enumerate(arms):
        if arm.overlay is not None and arm.overlay not in overlays:
            known = ", ".join(overlays) or "none is declared"
            yield Fault(key=f"arms.{index}.overlay", message=f"no overlay {arm.overlay!r}; known: {known}")
        if arm.overlay is not None and server.mount_argument is None:
            yield Fault(
                key=f"arms.{index}.overlay",
                message="a process needs server.mount_argument to be told of a mounted file",
            )
    for name, overlay in overlays.items():
        targets = [file.target for file in overlay.files]
        for target in targets:
            if ".." in target.split("/"):
                yield Fault(key=f"overlays.{name}.files", message=f"{target!r} leads out of its folder (..)")
        for target in sorted({target for target in targets if targets.count(target) > 1}):
            yield Fault(key=f"overlays.{name}.files", message=f"{target!r} is there twice")
        for number, target in enumerate(targets):
            if not {"", ".", ".."}.isdisjoint(target.removeprefix("/").split("/")):
                message = f"must name a file inside the overlay's own folder (given: {target!r})"
                yield Fault(key=f"overlays.{name}.files.{number}.target", message=message)


def _across_server(server: Server) -> Iterator[Fault]:
    template = server.mount_argument
    if template is not None and not ("{target}" in template and "{source}" in template):
        yield Fault(key="server.mount_argument", message="must hold {target} and {source}")
    elif template is not None:
        try:
            template.format(target="", source="")
        except (KeyError, IndexError, ValueError, AttributeError):
            message = "must hold no other braces than {target} and {source}"
            yield Fault(key="server.mount_argument", message=message)


def _across_protocol(protocol: Protocol) -> Iterator[Fault]:
    low, high = protocol.token_ids
    if not 0 <= low < high:
        yield Fault(key="protocol.token_ids", message="must be [low, high] with 0 <= low < high")
    names = [cell.name for cell in protocol.cells]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Fault(key="protocol.cells", message=f"cell {name!r} is named twice")
    if not any(cell.timed for cell in protocol.cells):
        yield Fault(key="protocol.cells", message="none is timed")


def _across_reading(reading: Reading, arms: tuple[Arm, ...], protocol: Protocol) -> Iterator[Fault]:
    cells = {cell.name: cell for cell in protocol.cells}
    if reading.cell not in cells:
        yield Fault(key="reading.cell", message=f"no cell {reading.cell!r}; known: {', '.join(cells)}")
    elif not cells[reading.cell].timed:
        yield Fault(key="reading.cell", message=f"cell {reading.cell!r} is not timed")
    for name in sorted(reading.thresholds.keys() - set(THRESHOLDS)):
        known = ", ".join(THRESHOLDS)
        yield Fault(key=f"reading.thresholds.{name}", message=f"no such threshold; known: {known}")
    for name, value in reading.thresholds.items():
        if not Decimal(str(value)).is_finite() or value <= 0:
            yield Fault(key=f"reading.thresholds.{name}", message=f"must be above 0 (given: {value})")
        elif name in THRESHOLDS:
            try:
                Thresholds.of(MATCH_THRESHOLDS.as_json() | {name: value})
            except (ValueError, OverflowError) as error:
                yield Fault(key=f"reading.thresholds.{name}", message=f"{error} (given: {value})")
    names = [arm.name for arm in arms]
    if reading.rule == "none":
        return
    roles = {role: getattr(reading, role) for role in ("off", "cause", "fix")}
    for role, name in roles.items():
        if name is None:
            yield Fault(key=f"reading.{role}", message="rule match needs an arm's name here")
        elif name not in names:
            yield Fault(key=f"reading.{role}", message=f"no arm {name!r}; known: {', '.join(names)}")
    if len({name for name in roles.values() if name}) < len([name for name in roles.values() if name]):
        yield Fault(key="reading", message="off, cause and fix must be three arms")
    wanted = {"off": ("a", "aa"), "fix": ("b",)}
    for role, slots in wanted.items():
        for index, arm in enumerate(arms):
            if arm.name == roles[role] and arm.checks and arm.checks != slots:
                yield Fault(key=f"arms.{index}.checks", message=f"the {role} arm's are {list(slots)}")
    if reading.cell in cells:
        reps = int(reading.thresholds.get("reps", cells[reading.cell].reps))
        if reps != cells[reading.cell].reps:
            yield Fault(
                key="reading.thresholds.reps",
                message=f"is {reps}, but cell {reading.cell!r} has {cells[reading.cell].reps} reps",
            )
    for index, arm in enumerate(arms):
        if arm.reps is not None:
            yield Fault(key=f"arms.{index}.reps", message="rule match takes the cell's reps in every arm")


def _across_checks(checks: Checks | None, arms: tuple[Arm, ...]) -> Iterator[Fault]:
    for index, arm in enumerate(arms):
        if arm.checks and checks is None:
            yield Fault(key=f"arms.{index}.checks", message="no [checks] section says what they are")
    if checks is not None and (checks.greedy.file is None) != (checks.greedy.sha256 is None):
        yield Fault(key="checks.greedy", message="a pinned prompt file needs both file and sha256")


def _across_greedy(checks: Checks | None, reading: Reading) -> Iterator[Fault]:
    total = reading.thresholds.get("greedy_total")
    if checks is not None and total is not None and total != checks.greedy.prompts:
        message = f"is {total}, but checks.greedy has {checks.greedy.prompts} prompts"
        yield Fault(key="reading.thresholds.greedy_total", message=message)


def _across_bounds(bounds: Bounds) -> Iterator[Fault]:
    if bounds.submit_min and bounds.abort_min and bounds.submit_min >= bounds.abort_min:
        yield Fault(key="bounds.abort_min", message="must be later than bounds.submit_min")


def _across_secrets(arms: tuple[Arm, ...], secrets: tuple[str, ...]) -> Iterator[Fault]:
    named = Secrets(b"", secrets).named
    for index, arm in enumerate(arms):
        for part, values in (("environment", arm.environment), ("arguments", arm.arguments)):
            for name, value in values.items():
                if isinstance(value, str) and named(name):
                    key = f"arms.{index}.{part}.{name}"
                    yield Fault(key=key, message="is a secret's name: an experiment is evidence and holds no secret")


def _across_site(site: Site) -> Iterator[Fault]:
    for index, argv in enumerate(site.close):
        if not argv or not argv[0].startswith("/"):
            yield Fault(key=f"site.close.{index}", message="must begin with the program's whole path")


_CHECKS: tuple[tuple[str, Any], ...] = (
    ("hosts production", _across_hosts),
    ("arms", _across_arms),
    ("arms overlays server", _across_overlays),
    ("server", _across_server),
    ("protocol", _across_protocol),
    ("reading arms protocol", _across_reading),
    ("checks arms", _across_checks),
    ("checks reading", _across_greedy),
    ("bounds", _across_bounds),
    ("arms secrets", _across_secrets),
    ("site", _across_site),
)


__all__ = ["Experiment", "load", "parse", "schema"]
