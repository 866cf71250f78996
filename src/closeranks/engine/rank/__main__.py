"""`python -m closeranks.engine.rank SETTINGS.json`: one tensor-parallel rank of an engine, for one epoch.

With `--spare` in place of the file it loads its libraries and waits on standard input to be told the file.

Exit codes: 0 stopped as wanted; 70 a fault, which was said to the leader; anything else a crash.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from closeranks.faults import RECORD, injector
from closeranks.protocol import VERSION, Fingerprint, Joined

from . import process, spare
from .notices import Notices
from .settings import Settings, read

if TYPE_CHECKING:
    from .collectives import Group

USAGE = 2


class Ticks:
    """Progress of this rank for the notice thread: the group's once there is one."""

    def __init__(self) -> None:
        self.group: Group | None = None

    def __call__(self) -> int:
        return self.group.ticks if self.group is not None else 0


def agent_name(settings: Settings) -> str:
    """Name of the rank's transfer agent: unique per instance and rank."""
    return f"{settings.engine}-{settings.epoch}-{settings.instance:x}-{settings.rank}"


def serve(settings: Settings, context: "zmq.Context[zmq.Socket[bytes]]", notices: Notices, ticks: Ticks) -> None:
    """Load, join, execute steps until the leader stops the epoch. Any exception is a fault of the rank."""
    import structlog

    from . import checksum
    from .collectives import join
    from .grammar import CompilerThread
    from .loop import Loop
    from .planes import Pool
    from .runner import Runner
    from .transfer import TransferThread, make, one_host
    from .weights import load

    log = structlog.get_logger().bind(engine=settings.engine, rank=settings.rank, epoch=settings.epoch)
    faults = injector(
        settings.fault,
        Path(settings.run_dir) / RECORD,
        engine=settings.engine,
        role=settings.role,
        epoch=settings.epoch,
        rank=settings.rank,
    )
    loaded = load(settings)
    layout = loaded.model.pages
    num_pages = settings.num_pages or layout.pages_in(settings.kv_memory, settings.page_size)
    pool = Pool(layout, num_pages, settings.page_size, settings.rank, settings.tp_size, loaded.model.device)
    local = one_host(settings.endpoint)
    backend: Any = make(settings.transfer_backend, pool, agent_name(settings), settings.nixl_transport, local, faults)
    group = join(
        settings.collectives,
        settings.device,
        settings.rendezvous,
        settings.rank,
        settings.tp_size,
        settings.epoch,
        settings.instance,
        deadline_s=settings.collective_deadline_s,
        join_deadline_s=settings.join_deadline_s,
    )
    ticks.group = group
    runner = Runner(loaded.model, pool, group, settings.max_running, loaded.converted.path / "tokenizer.json")
    runner.warm_up(settings.chunk)
    if settings.rank == 0 and runner.grammars is not None:  # it samples
        missing = runner.grammars.load()
        if missing:
            log.warning("grammars will be refused", reason=missing)
    transfer = TransferThread(
        backend,
        pool,
        settings.epoch,
        notices.post,
        notices.fault,
        settings.transfer_stuck_s,
        faults,
        settings.checksums,
    )
    transfer.start()
    log.info(
        "rank ready",
        transfer=backend.name,
        collectives=type(group).__name__.lower(),
        pages=num_pages,
        page=layout.describe(settings.page_size),
    )
    socket = process.dealer(context, settings, "step")
    compiler = None
    if settings.rank == 0:  # it samples
        compiler = CompilerThread(runner.grammars, settings.epoch, notices.post, notices.fault).take
    loop = Loop(settings.epoch, runner, group, transfer, notices, socket, faults, compiler, settings.digest)
    joined = Joined(
        epoch=settings.epoch,
        rank=settings.rank,
        pid=os.getpid(),
        fingerprint=Fingerprint(
            protocol=VERSION,
            weights=loaded.weights,
            dtype=loaded.dtype,
            page=layout.describe(settings.page_size),
            tokenizer=loaded.tokenizer,
            checksum=checksum.name(pool.device) if settings.checksums else checksum.NONE,
        ),
        memory=pool.memory(backend.name, backend.address),
        num_pages=num_pages,
        page_size=settings.page_size,
        context_length=loaded.context_length,
    )
    if loop.join(joined):
        loop.run()
    transfer.stop()
    socket.close(linger=0)
    group.close()
    log.info("rank stopped")


def main(argv: list[str]) -> int:
    """Run the rank; returns only for wrong usage: the process ends by `os._exit` (NIXL crashes in an orderly exit)."""
    if len(argv) != 2:
        print("usage: python -m closeranks.engine.rank SETTINGS.json | --spare", file=sys.stderr)
        return USAGE
    path: str | None = argv[1]
    if path == "--spare":
        path = spare.wait()
        if path is None:
            return 0
    assert path is not None
    try:
        settings = read(path)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return USAGE
    process.set_up(settings)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ticks = Ticks()
    notices = Notices(process.dealer(zmq.Context(), settings, "note"), settings.epoch, settings.rank, ticks)
    notices.start()
    try:
        serve(settings, context, notices, ticks)
    except BaseException as error:  # noqa: BLE001 - said to the leader, then the process ends
        notices.fault(error, in_step=True)
        notices.wait_for_end()
    notices.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
