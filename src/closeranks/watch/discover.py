"""Which engines run on this machine: process table → engines with ranks and roles. Pure; `Finder` adds the reading.

A process belongs to an engine by descent from its launcher. Once seen it keeps belonging, also when its launcher died
and it was handed to init. Titles are recognised by the same function as those in stack dumps.
"""

import json
import os
import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import msgspec

from closeranks.diagnose.facts import Who
from closeranks.diagnose.names import from_title
from closeranks.watch import procfs
from closeranks.watch.procfs import Row
from closeranks.watch.snapshot import EngineSeen, Kind, Proc, ProcRole, Role

AGAIN_S = 4.0
"""An engine that does not listen yet is asked again after so long: the table of sockets can be large."""
MOST_PORTS = 65535
MOST_RANKS = 100_000
_PYTHON = re.compile(r"^(python|pypy)[\d.]*$")
_MODULES: dict[str, Kind] = {
    "sglang.launch_server": "sglang",
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "tensorrt_llm.commands.serve": "trtllm",
}
_SCRIPTS: dict[str, Kind] = {"vllm": "vllm", "sglang": "sglang", "trtllm-serve": "trtllm"}
_OURS = re.compile(r"^closeranks::(leader|rank|gateway|spare)(?: (\S+))?(?: TP(\d+))?")
_PORTS: dict[Kind, int] = {"sglang": 30000, "vllm": 8000, "trtllm": 8000, "closeranks": 8000}
_ROLES: dict[str, ProcRole] = {
    "scheduler": "rank",
    "worker": "worker",
    "engine_core": "engine_core",
    "detokenizer": "detokenizer",
    "router": "router",
}
_VLLM_ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode"}


def launches(argv: Sequence[str]) -> Kind | None:
    """The engine that this very command line launches; a shell, `timeout` or `docker run` around one launches none."""
    if not argv:
        return None
    words = list(argv)
    if _PYTHON.match(os.path.basename(words[0])):
        words = _after_options(words[1:])
        if words[:1] == ["-m"]:
            return _MODULES.get(words[1]) if len(words) > 1 else None
    if not words:
        return None
    kind = _SCRIPTS.get(os.path.basename(words[0]))
    return kind if kind and (kind == "trtllm" or words[1:2] == ["serve"]) else None


def serves_ours(argv: Sequence[str]) -> bool:
    """Whether this command line is a `closeranks serve`: the parent of engines and their gateway."""
    words = list(argv)
    if words and _PYTHON.match(os.path.basename(words[0])):
        words = _after_options(words[1:])
    if words[:1] == ["-m"]:
        return words[1:3] == ["closeranks.cli.main", "serve"]
    return len(words) > 1 and os.path.basename(words[0]) == "closeranks" and words[1] == "serve"


def _after_options(words: list[str]) -> list[str]:
    """What follows the interpreter's own options (`-u`, `-X dev`)."""
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[2:] if words[0] in ("-X", "-W") else words[1:]
    return words


def flag(argv: Sequence[str], *names: str) -> str | None:
    """The value of the last of these flags (`--port 1`, `--port=1`), None when none is there."""
    found = None
    for word, after in zip(argv, [*argv[1:], ""]):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else after
    return found


def number(text: str | None, most: int) -> int | None:
    """A number of a command line, which may hold anything; None unless it is one from 0 to `most`."""
    found = int(text) if text and text.isdecimal() and len(text) < 20 else None
    return found if found is not None and found <= most else None


def role_of(kind: Kind, argv: Sequence[str]) -> Role:
    """Prefill, decode or both, by the flags."""
    if kind == "vllm":
        return _VLLM_ROLES.get(str(_transfer_config(argv).get("kv_role")), "both")
    mode = flag(argv, "--disaggregation-mode", "--server_role") or ""
    said: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "context": "prefill", "generation": "decode"}
    return said.get(mode.lower(), "both")


def world_of(argv: Sequence[str]) -> int:
    """Ranks on this machine, by the flags; 1 when they say nothing."""
    tp = flag(argv, "--tp-size", "--tp", "--tensor-parallel-size", "-tp", "--tp_size")
    pp = flag(argv, "--pp-size", "--pipeline-parallel-size", "-pp")
    world = 1
    for size in (tp, pp):
        world *= number(size, MOST_RANKS) or 1
    return max(1, world // (number(flag(argv, "--nnodes"), MOST_RANKS) or 1))


def _backend(argv: Sequence[str]) -> str:
    said = flag(argv, "--disaggregation-transfer-backend") or str(_transfer_config(argv).get("kv_connector", ""))
    return re.sub(r"\W", "", said)[:40]


def _transfer_config(argv: Sequence[str]) -> dict[str, object]:
    """vLLM's `--kv-transfer-config`; empty without one, and where it is not the JSON that vLLM takes."""
    try:
        found = json.loads(flag(argv, "--kv-transfer-config") or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _name(kind: Kind, role: Role, port: int | None, pid: int) -> str:
    return f"{role if role != 'both' else kind}-{port if port is not None else f'pid{pid}'}"


def group(table: Mapping[int, Row], before: Sequence[EngineSeen] = ()) -> tuple[EngineSeen, ...]:
    """The engines among the processes of `table`, by name. `before`: what was found earlier, for adopted orphans."""
    children = {(p.pid, p.start_time) for e in before for p in e.procs if p.role != "launcher"}
    members = _members(table, children)
    known = {(p.pid, p.start_time): e for e in before for p in e.procs}
    kept: dict[str, set[int]] = {}
    for row in table.values():
        owner = known.get((row.pid, row.start_time))
        if owner is not None and not any(row.pid in pids for pids in members.values()):
            kept.setdefault(owner.name, set()).add(row.pid)
    engines: dict[str, EngineSeen] = {}
    for root, pids in members.items():
        made = _with_gone(_engine(table, root, pids), table, before)
        engines[made.name if made.name not in engines else f"{made.name}-pid{root}"] = made
    for old in before:  # its launcher is gone, some of its processes are not
        orphans = kept.get(old.name, set())
        if orphans and old.name not in engines:
            procs = tuple(p for p in old.procs if p.pid in orphans or p.role != "helper")  # the dead are shown as dead
            engines[old.name] = msgspec.structs.replace(old, procs=procs)
    for made in (*_ours(table), *_orphans(table, members, kept)):
        engines.setdefault(made.name, made)
    return tuple(
        msgspec.structs.replace(e, name=name, procs=tuple(msgspec.structs.replace(p, engine=name) for p in e.procs))
        for name, e in sorted(engines.items())
    )


def _members(table: Mapping[int, Row], children: Container[tuple[int, int]]) -> dict[int, set[int]]:
    """Launcher → it and all that descend from it. A launcher's fork shows the same command line and is none."""
    launchers = {pid for pid, row in table.items() if launches(row.argv) or _titled_launcher(row)}
    roots = {pid for pid in launchers if (pid, table[pid].start_time) not in children}
    members: dict[int, set[int]] = {}
    for pid in table:
        top = None
        for ancestor in _line(table, pid):
            if ancestor in roots:
                top = ancestor
        if top is not None:
            members.setdefault(top, set()).add(pid)
    return members


def _titled_launcher(row: Row) -> bool:
    who = from_title(row.argv[0]) if len(row.argv) == 1 and "::" in row.argv[0] else None
    return who is not None and who.kind == "api" and who.family in ("sglang", "vllm")


def _line(table: Mapping[int, Row], pid: int) -> Iterator[int]:
    """A process and its ancestors."""
    for _ in range(64):
        if pid not in table:
            return
        yield pid
        pid = table[pid].ppid


def _with_gone(engine: EngineSeen, table: Mapping[int, Row], before: Iterable[EngineSeen]) -> EngineSeen:
    """Processes that ended under a launcher that lives stay listed, unless something took their place."""
    head = engine.launcher
    here = {(p.role, p.rank) for p in engine.procs}
    gone = [
        p
        for old in before
        if head is not None and old.launcher is not None and (old.launcher.pid, old.launcher.start_time) == _id(head)
        for p in old.procs
        if p.role not in ("launcher", "helper") and (p.role, p.rank) not in here
        if p.pid not in table or table[p.pid].start_time != p.start_time
    ]
    return msgspec.structs.replace(engine, procs=(*engine.procs, *gone)) if gone else engine


def _id(proc: Proc) -> tuple[int, int]:
    return proc.pid, proc.start_time


def _engine(table: Mapping[int, Row], root: int, pids: set[int]) -> EngineSeen:
    argv = table[root].argv
    kind = launches(argv) or ("vllm" if "VLLM" in table[root].title else "sglang")
    whos = {pid: from_title(_own_title(table[pid])) for pid in sorted(pids) if pid != root}
    procs = [_proc(table[root], "launcher", None)]
    procs += _ranked(table, {pid: who for pid, who in whos.items() if who is not None and pid != root})
    named = {p.pid for p in procs}
    procs += [_proc(table[pid], "helper", None) for pid in sorted(pids - named)] if kind != "trtllm" else []
    if kind == "trtllm":
        workers = sorted(p for p in pids if p != root and "mpi4py" in table[p].title)
        procs += [_proc(table[pid], "worker", rank) for rank, pid in enumerate(workers)]
    role = role_of(kind, argv)
    port = number(flag(argv, "--port"), MOST_PORTS)
    return EngineSeen(
        name=_name(kind, role, port, root),
        kind=kind,
        role=role,
        url=f"http://127.0.0.1:{port}" if port else None,
        procs=tuple(procs),
        argv=argv,
        world=world_of(argv),
        backend=_backend(argv),
    )


def _own_title(row: Row) -> str:
    """A title, not a command line: a fork that has none yet shows its parent's."""
    return row.title if "::" in row.title.split(" ")[0] else ""


def _ranked(table: Mapping[int, Row], whos: Mapping[int, Who]) -> list[Proc]:
    """Processes with a title, ranks numbered by tensor-parallel rank, or in order where that is not unique."""
    by_kind: dict[ProcRole, list[int]] = {}
    made = []
    for pid, who in whos.items():
        role = _ROLES.get(who.kind, "helper")
        if table[pid].argv:
            by_kind.setdefault(role, []).append(pid)
        else:  # never seen alive: its title was cut before the rank
            made.append(_proc(table[pid], role, None))
    for kind, pids in by_kind.items():
        whole = [(whos[pid].dp or 0, whos[pid].pp or 0, whos[pid].tp or 0, pid) for pid in pids]
        tps = [tp for _, _, tp, _ in whole]
        unique = len(set(tps)) == len(tps)
        for order, (_, _, tp, pid) in enumerate(sorted(whole)):
            numbered = kind in ("rank", "worker") or len(pids) > 1
            made.append(_proc(table[pid], kind, (tp if unique else order) if numbered else None))
    return made


def _proc(row: Row, role: ProcRole, rank: int | None) -> Proc:
    title = _own_title(row) or os.path.basename(row.argv[0] if row.argv else row.comm)
    return Proc(row.pid, row.start_time, row.ppid, role, "", rank, title[:80])


def _ours(table: Mapping[int, Row]) -> Iterator[EngineSeen]:
    """closeranks' own engines: one per leader's title and parent. The gateway and the supervisor belong to each."""
    found: dict[tuple[int, str], list[Proc]] = {}
    gateways: dict[int, Row] = {}
    for row in table.values():
        match = _OURS.match(row.title)
        if match is None or match[1] == "spare":
            continue
        if match[1] == "gateway":
            gateways[row.ppid] = row
            continue
        rank = number(match[3], MOST_RANKS)
        role: ProcRole = "leader" if match[1] == "leader" else "rank"
        found.setdefault((row.ppid, match[2] or "engine"), []).append(_proc(row, role, rank))
    names = {key: _our_name(key[1], table.get(key[0])) for key in found}
    for (parent, name), procs in sorted(found.items()):
        gate = gateways.get(parent)
        everyone = [*procs, *([_proc(gate, "gateway", None)] if gate else [])]
        if parent in table and serves_ours(table[parent].argv):
            everyone.append(_proc(table[parent], "supervisor", None))
        role2: Role = "prefill" if "prefill" in name else "decode" if "decode" in name else "both"
        argv = table[parent].argv if parent in table else ()
        unique = list(names.values()).count(names[parent, name]) == 1
        yield EngineSeen(
            name=names[parent, name] if unique else f"{name}-pid{parent}",
            kind="closeranks",
            role=role2,
            url=None,
            procs=tuple(sorted(everyone, key=lambda p: (p.role, p.rank or 0))),
            argv=argv,
            world=sum(1 for p in procs if p.role == "rank"),
        )


def _our_name(name: str, parent: Row | None) -> str:
    """With the port of its service: two services on a host have a `decode` each. Without one if the system drew it."""
    if parent is None or not serves_ours(parent.argv):
        return name
    port = number(flag(parent.argv, "--port"), MOST_PORTS)
    port = _PORTS["closeranks"] if port is None else port
    return f"{name}-{port}" if port else name


def _orphans(
    table: Mapping[int, Row], members: Mapping[int, set[int]], kept: Mapping[str, set[int]]
) -> Iterator[EngineSeen]:
    """Ranks without a launcher, never seen with one: grouped by session."""
    owned = set().union(*members.values(), *kept.values())
    loose: dict[tuple[Kind, int], dict[int, Who]] = {}
    for row in table.values():
        who = from_title(_own_title(row)) if row.pid not in owned else None
        if who is not None and who.kind in ("scheduler", "worker", "engine_core") and who.family != "closeranks":
            kind: Kind = "vllm" if who.family == "vllm" else "sglang"
            loose.setdefault((kind, row.session), {})[row.pid] = who
    for (kind, session), whos in loose.items():
        procs = tuple(_ranked(table, whos))
        yield EngineSeen(_name(kind, "both", None, session), kind, "both", None, procs, world=len(procs))


class Finder:
    """Keeps the process table and what does not change of an engine: address, working folder, logs."""

    def __init__(self, wanted_pids: Iterable[int] = (), wanted_ports: Iterable[int] = ()) -> None:
        self.table: dict[int, Row] = {}
        self.engines: tuple[EngineSeen, ...] = ()
        self._pids, self._ports = frozenset(wanted_pids), frozenset(wanted_ports)
        self._fixed: dict[tuple[int, int, int, int], tuple[float, EngineSeen]] = {}
        self._settled = False
        """Looking again at the same table gave the same engines, and all is known of them."""

    def find(self) -> tuple[EngineSeen, ...]:
        """Scan /proc. Blocking, and may hang with a process that does: call it in a thread."""
        watched = [p.pid for e in self.engines for p in e.procs]
        table = procfs.scan(self.table, watched)
        same = table == self.table
        self.table = table
        if same and self._settled:
            return self.engines
        candidates = group(table, self.engines)
        if self._pids and not self._ports:  # what is nobody's to watch here is not read further
            candidates = tuple(e for e in candidates if self._wanted(e))
        complete = [self._complete(engine) for engine in candidates]
        engines = tuple(e for e in self._told_apart(complete) if self._wanted(e))
        self._settled = same and engines == self.engines and all(e.url is not None for e in complete)
        self.engines = engines
        return engines

    def _told_apart(self, engines: Sequence[EngineSeen]) -> list[EngineSeen]:
        """Two of one name (one port, in network namespaces of their own): who had it keeps it, for its life. What is
        left of a dead one, such as a launcher that nobody has waited for yet, is replaced."""
        living = {e.name for e in engines if e.head is not None and self._lives(e.head)}
        engines = [e for e in engines if e.name not in living or e.head is None or self._lives(e.head)]
        old = {(e.head.pid, e.head.start_time): e.name for e in self.engines if e.head is not None}
        heads = [(e.head.pid, e.head.start_time) if e.head is not None else None for e in engines]
        taken = {e.name for e, head in zip(engines, heads, strict=True) if head is None or old.get(head) == e.name}
        made = []
        for engine, head in zip(engines, heads, strict=True):
            name = engine.name
            if head is not None:
                had, apart = old.get(head), f"{name}-pid{head[0]}"
                name = apart if had == apart or (had != name and name in taken) else name
            taken.add(name)
            procs = tuple(msgspec.structs.replace(p, engine=name) for p in engine.procs)
            made.append(msgspec.structs.replace(engine, name=name, procs=procs))
        return made

    def _lives(self, process: Proc) -> bool:
        row = self.table.get(process.pid)
        return row is not None and row.start_time == process.start_time and row.state not in ("Z", "X")

    def _wanted(self, engine: EngineSeen) -> bool:
        if not self._pids and not self._ports:
            return True
        port = engine.url.rpartition(":")[2] if engine.url else ""
        return any({p.pid, p.ppid} & self._pids for p in engine.procs) or (
            port.isdecimal() and int(port) in self._ports
        )

    def _complete(self, engine: EngineSeen) -> EngineSeen:
        head = engine.head
        if head is None:
            return engine
        frontend = next((p for p in engine.procs if p.role == "gateway"), head)
        life = (head.pid, head.start_time, frontend.pid, frontend.start_time)
        when, fixed = self._fixed.get(life, (-1e9, engine))
        now = time.monotonic()
        if when < 0 or (fixed.url is None and now - when > AGAIN_S):
            fixed = self._read(engine, head, frontend)
            self._fixed[life] = (now, fixed)
        name = fixed.name if engine.kind != "closeranks" else engine.name
        procs = tuple(msgspec.structs.replace(p, engine=name) for p in engine.procs)
        return msgspec.structs.replace(
            engine, name=name, url=fixed.url, cwd=fixed.cwd, logs=fixed.logs or engine.logs, procs=procs
        )

    def _read(self, engine: EngineSeen, head: Proc, frontend: Proc) -> EngineSeen:
        port, url = _address(engine, frontend)
        name = _name(engine.kind, engine.role, port, head.pid) if engine.kind != "closeranks" else engine.name
        try:
            cwd = os.readlink(f"/proc/{head.pid}/cwd")
        except OSError:
            cwd = ""
        return msgspec.structs.replace(engine, name=name, url=url or engine.url, cwd=cwd, logs=_logs(engine, head))


def _address(engine: EngineSeen, frontend: Proc) -> tuple[int | None, str | None]:
    """Port and URL of the HTTP server: the flag's, else what only the launcher listens on (its children inherit the
    sockets that it had before them, not the server's). Of our own engines only the gateway has one: what a leader
    listens on is for the gateways of other hosts."""
    if engine.kind == "closeranks" and frontend.role != "gateway":
        return None, None
    ports = procfs.listening(frontend.pid)
    said = flag(engine.argv, "--port") if engine.kind != "closeranks" else None
    wanted = number(said, MOST_PORTS) or None
    if wanted is None and _PORTS[engine.kind] in ports:
        wanted = _PORTS[engine.kind]
    if wanted is None and ports:
        inherited = {port for p in engine.procs if p.pid != frontend.pid for port in procfs.listening(p.pid)}
        wanted = min((p for p in ports if p not in inherited), default=None)
    if wanted is None:
        return None, None
    host = ports.get(wanted) or flag(engine.argv, "--host") or "127.0.0.1"
    if host in ("0.0.0.0", "::", "127.0.0.1"):
        host = procfs.loopback_of(frontend.pid)
    return wanted, f"http://{host}:{wanted}"


def _logs(engine: EngineSeen, head: Proc) -> tuple[str, ...]:
    """Files behind the standard output and error of the launcher; for our own engines, of each process."""
    pids = [p.pid for p in engine.procs if p not in engine.shared] if engine.kind == "closeranks" else [head.pid]
    found: dict[tuple[int, int], str] = {}
    for pid in pids:
        for fd in (1, 2):
            path = f"/proc/{pid}/fd/{fd}"
            try:
                info = os.stat(path)
                if os.path.isfile(path):
                    found.setdefault((info.st_dev, info.st_ino), os.readlink(path))
            except OSError:  # closed, or not ours to look at
                continue
    return tuple(found.values())
