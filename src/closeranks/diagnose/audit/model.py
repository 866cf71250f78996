"""The things an audit speaks of. Frozen where rules see them; nothing here reads a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""`error`: known to wedge, leak or corrupt. `warning`: will, under conditions. `note`: worth knowing, no fault."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

ON = "true"
"""The value of a flag that was given without one."""


@dataclass(frozen=True)
class Engine:
    """One engine as configured. Flags are lower case with dashes, under SGLang's name where both engines know it."""

    label: str
    kind: str = ""  # "sglang", "vllm", "closeranks" (a gateway of ours), "" when unknown
    version: str | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    unit: Mapping[str, tuple[str, ...]] | None = None  # systemd directives by lower-case name
    container: Mapping[str, str] | None = None  # "cap_add", "pid", "restart", ... of a container
    complete_env: bool = False  # the environment is known as a whole (a unit file, a container spec)
    front: str = ""  # "dynamo" where another process renders requests and parses answers
    beside: str = ""  # engines of one value here are started on one host, in one network namespace
    file: str = ""  # the path of what it was read from, "" for a command line or an URL
    line: int = 0  # 1-based, 0 where it is a whole file that tells

    def flag(self, name: str) -> str | None:
        """The effective value: as given, else the engine's default, else None."""
        return self.flags.get(name, self.defaults.get(name))

    def on(self, name: str) -> bool:
        """Whether a switch is set."""
        return (self.flag(name) or "false").lower() in (ON, "1", "yes")

    def number(self, name: str, otherwise: float = 0.0) -> float:
        """A flag as a number; `otherwise` when it is absent or no number."""
        try:
            return float(self.flag(name) or "")
        except ValueError:
            return otherwise

    @property
    def judged(self) -> bool:
        """Whether rules speak of this kind of engine. Our own gateway refuses unsafe settings when it starts."""
        return self.kind in ("sglang", "vllm")

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return max(1, int(self.number("tp-size", 1)))

    @property
    def role(self) -> str:
        """`prefill`, `decode`, `both` (vLLM's kv_both) or `` for an engine that serves alone."""
        mode = self.flag("disaggregation-mode") or ""
        return "" if mode in ("null", "none") else mode


@dataclass(frozen=True)
class ModelFolder:
    """What a model or tokenizer folder says. `added` maps an added token's text to its `special` flag."""

    path: str
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    vocab_size: int | None = None
    added: Mapping[str, bool] = field(default_factory=dict)
    ids: Mapping[str, int] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)  # by where it was found
    eos_tokens: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] = ()
    has_tokenizer: bool = False


@dataclass(frozen=True)
class ChangedFile:
    """A file of an installed distribution that is not as its wheel had it."""

    path: str  # relative to site-packages, with slashes
    change: Literal["modified", "missing", "added"]
    area: str
    diff: str = ""  # with --wheel: unified diff, else empty


@dataclass(frozen=True)
class Install:
    """One installed distribution compared with its own RECORD, or with its repository."""

    name: str
    version: str
    site_packages: str
    changed: tuple[ChangedFile, ...] = ()
    files: int = 0
    record_empty: bool = False
    files_of: str = ""  # without files of its own: the distribution that brought its package
    git_commit: str = ""
    commits_ahead: int | None = None
    tag: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Library:
    """An installed library that engines stand on, with the machine that its wheel is for (`aarch64`, `x86_64`)."""

    name: str
    version: str
    machine: str


@dataclass(frozen=True)
class Host:
    """This machine, as far as a capture of stacks needs it."""

    pyspy: str = ""  # path, empty when not found
    ptrace_scope: int | None = None
    cap_sys_ptrace: bool = False
    root: bool = False


@dataclass(frozen=True)
class Unread:
    """A file that was given, or found in a folder, and could not be read as what it is."""

    label: str
    needs: str


@dataclass(frozen=True)
class Deployment:
    """All that is audited together."""

    engines: tuple[Engine, ...] = ()
    models: tuple[ModelFolder, ...] = ()
    installs: tuple[Install, ...] = ()
    unowned: tuple[str, ...] = ()  # importable packages that no distribution owns
    libraries: tuple[Library, ...] = ()
    host: Host | None = None
    unread: tuple[Unread, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One thing found. `where` names engine, file or package, `detail` the values seen, `places` files and lines."""

    id: str
    severity: Severity
    area: str
    title: str
    where: str
    detail: str
    why: str
    fix: str
    refs: tuple[str, ...] = ()
    places: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Unjudged:
    """A rule that applies and could not be decided, and what would decide it."""

    id: str
    where: str
    needs: str


@dataclass(frozen=True)
class Report:
    """Findings by severity, what stayed open, and what was audited."""

    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]
    deployment: Deployment

    @property
    def patched_areas(self) -> dict[str, list[str]]:
        """Area -> changed files, over all installs."""
        areas: dict[str, list[str]] = {}
        for install in self.deployment.installs:
            for changed in install.changed:
                areas.setdefault(changed.area, []).append(changed.path)
        return areas
