"""What `closeranks audit --json` says of the installed engine: areas in which it is not what its project released."""

import re
from collections.abc import Iterable

from closeranks.diagnose.audit.sources.areas import AREAS
from closeranks.diagnose.facts import Fact, Setting, Src


class Audit:
    """The installs of an audit report. Areas are of a fixed set; paths and differences are not kept."""

    NAME = "audit-report"
    ABOUT = "`closeranks audit --json`: areas of the installed engine that differ from its release"

    def document(self, found: object, src: Src) -> Iterable[Fact] | None:
        """One report."""
        if not isinstance(found, dict) or not isinstance(found.get("patched_areas"), dict):
            return None
        installs = found.get("installs")
        out: list[Fact] = []
        told: set[str] = set()
        for install in installs[:16] if isinstance(installs, list) else ():
            name, version = _word(install, "name"), _word(install, "version")
            if version:
                out.append(Setting(src=src, kind="version", name=name, value=version))
            changed = install.get("changed") if isinstance(install, dict) else None
            areas = [_word(c, "area") for c in changed[:10_000]] if isinstance(changed, list) else []
            out += patched(src, f"{name} {version}".strip(), areas)
            told |= set(areas)
        for area, files in list(found["patched_areas"].items())[:64]:
            if area not in told and isinstance(files, list):
                out += patched(src, "", [str(area)] * len(files))
        return out


def patched(src: Src, engine: str, areas: Iterable[str]) -> list[Setting]:
    """A fact per area of a known name: how many files of `engine` (`sglang 0.5.13`, or "") differ there."""
    count: dict[str, int] = {}
    for area in areas:
        if area in AREAS:
            count[area] = count.get(area, 0) + 1
    of = f" of {engine}" if engine else ""
    return [
        Setting(src=src, kind="patched", name=area, value=f"{n} file{'s' if n > 1 else ''}{of}")
        for area, n in count.items()
    ]


def _word(found: object, key: str) -> str:
    value = found.get(key) if isinstance(found, dict) else None
    return value if isinstance(value, str) and re.fullmatch(r"[\w.+-]{1,40}", value) else ""


DOCUMENT_READERS = (Audit,)
