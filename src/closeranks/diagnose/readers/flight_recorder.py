"""torch's flight recorder, from a restricted pickle or JSON, NCCL's or gloo's."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from closeranks.diagnose.facts import Collective, Event, Fact, Frame, GroupStatus, Setting, Src
from closeranks.diagnose.names import from_file
from closeranks.diagnose.readers.nccl import group_name, op_name
from closeranks.diagnose.readers.pyspy import clean_file, clean_name

TAIL = 400  # entries of one dump that are kept: the newest


class FlightRecorder:
    """One dump: what each process group of one rank did last."""

    NAME = "flight-recorder"
    ABOUT = "torch flight recorder dumps (pickle through a restricted loader, JSON), NCCL and gloo"

    def document(self, found: object, src: Src) -> Iterable[Fact] | None:
        """Facts of one dump. The rank comes from the file's name, if it has one."""
        if not isinstance(found, dict) or not ({"entries", "pg_status", "pg_config"} & found.keys()):
            return None
        if "version" not in found and "entries" not in found:
            return None
        return list(self._facts(found, src))

    def _facts(self, dump: dict[str, Any], src: Src) -> Iterator[Fact]:
        who = from_file(src.file)
        identity = f"{src.file}:{src.line}"
        yield Event(src=src, who=who, kind="recorder_dump", data={"_dump": identity})
        version = dump.get("comm_lib_version") or dump.get("nccl_version")
        if isinstance(version, str) and re.fullmatch(r"[\d.]{3,20}", version):
            yield Setting(src=src, kind="version", name="nccl", value=version)
        config = dump.get("pg_config")
        members: dict[str, tuple[int, ...]] = {}
        names: dict[str, str] = {}
        if isinstance(config, dict):
            for key, group in list(config.items())[:500]:
                if isinstance(group, dict):
                    ranks = re.findall(r"\d{1,6}", _listed(group.get("ranks")))
                    members[str(key)] = tuple(int(r) for r in ranks[:4096])
                    names[str(key)] = group_name(_word(group.get("name") or key), _word(group.get("desc") or ""))
        entries = dump.get("entries")
        used = _groups_used(entries)
        status = dump.get("pg_status")
        if isinstance(status, dict):
            for key, counts in list(status.items())[:500]:
                if isinstance(counts, dict):
                    # Keys here are numbers of this rank's own, those of the configuration are names: entries hold both.
                    named, name = used.get(str(key), (str(key), names.get(str(key), f"pg {_word(key)}")))
                    yield GroupStatus(
                        src=src,
                        who=who,
                        group=name,
                        enqueued=_int(counts.get("last_enqueued_collective")),
                        completed=_int(counts.get("last_completed_collective")),
                        members=members.get(named, ()),
                    )
        for entry in entries[-TAIL:] if isinstance(entries, list) else ():
            if isinstance(entry, dict) and {"profiling_name", "collective_seq_id", "state"} <= entry.keys():
                yield self._entry(entry, src, who, identity)

    def _entry(self, e: dict[str, Any], src: Src, who: Any, identity: str) -> Collective:
        group = e.get("process_group")
        name = (
            group_name(_word(group[0]), _word(group[1] or ""))
            if isinstance(group, list | tuple) and len(group) > 1
            else f"pg {_word(e.get('pg_id'))}"
        )
        frames = (
            tuple(
                Frame(
                    clean_name(_text(f.get("name")) or "?"),
                    clean_file(_text(f.get("filename")) or "?"),
                    _int(f.get("line")),
                )
                for f in (e.get("frames") or [])[:60]
                if isinstance(f, dict)
            )
            if isinstance(e.get("frames"), list | tuple)
            else ()
        )
        p2p = bool(e.get("is_p2p"))
        return Collective(
            src=src,
            who=who,
            origin="recorder",
            op=op_name(_text(e.get("profiling_name"))[:80].split(" ")[0]),
            seq=_int(e.get("p2p_seq_id" if p2p else "collective_seq_id")),
            group=name,
            numel_in=_numel(e.get("input_sizes")),
            numel_out=_numel(e.get("output_sizes")),
            state=_word(e.get("state")),
            frames=frames,
            p2p=p2p,
            timeout_ms=_int(e.get("timeout_ms")),
            dump=identity,
        )  # fmt: skip


def _groups_used(entries: object) -> dict[str, tuple[str, str]]:
    """This rank's number of a group → the group's name in the configuration, and what it is called here."""
    out: dict[str, tuple[str, str]] = {}
    for e in entries[-TAIL:] if isinstance(entries, list) else ():
        group = e.get("process_group") if isinstance(e, dict) else None
        if isinstance(group, list | tuple) and len(group) > 1 and isinstance(e.get("pg_id"), int | str):
            out[str(e["pg_id"])] = str(group[0]), group_name(_word(group[0]), _word(group[1] or ""))
    return out


def _word(found: object, extra: str = "") -> str:
    """A short identifier: letters, digits and `_.-` only. Several words are none, whatever stands there."""
    text = _text(found).strip()
    return "" if re.search(r"\s", text) else re.sub(rf"[^\w.{extra}-]", "", text)[:60]


def _text(found: object) -> str:
    """A string or a number as text; nothing of a container, whose text has no bound."""
    if isinstance(found, str):
        return found[:4000]
    return str(found) if found is None or isinstance(found, float) or (isinstance(found, int) and _plain(found)) else ""


def _listed(ranks: object) -> str:
    """`[0, 1]`: torch writes the ranks of a group as text, other dumps as a list."""
    if isinstance(ranks, str):
        return ranks[:100_000]
    return " ".join(str(r) for r in ranks[:4096] if isinstance(r, int) and _plain(r)) if isinstance(ranks, list) else ""


def _plain(number: int) -> bool:
    return -(1 << 63) <= number <= 1 << 63


def _int(found: object) -> int:
    """A count, also one that JSON dumps have as text; -1 for what is none."""
    if isinstance(found, int):
        return int(found) if _plain(found) else -1
    return int(found) if isinstance(found, str) and re.fullmatch(r"-?\d{1,19}", found) else -1


def _numel(sizes: object) -> int | None:
    """Elements over all tensors of `input_sizes` / `output_sizes`."""
    if not isinstance(sizes, list | tuple):
        return None
    total = 0
    for shape in sizes[:1000]:
        if isinstance(shape, list | tuple):
            total += math.prod(max(_int(n), 0) for n in shape[:16])
    return total


DOCUMENT_READERS = (FlightRecorder,)
