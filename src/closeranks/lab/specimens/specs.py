"""What each specimen is, and what a diagnosis of it must say. Data only."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Who = Literal["none", "first", "last", "but_last", "half", "all"]
"""Ranks as a function of the world size, so that a specimen can be started with 2, 3 or 4 ranks."""


@dataclass(frozen=True)
class Specimen:
    """One small multi-process program that wedges, or seems to, within seconds.

    `fault` names the point in `programs/` that strikes, on the ranks `strikes`. `stands` are the ranks whose main
    thread makes no context switch and uses no CPU once the fault has set in. `also` are verdict classes that are as
    right as `verdict_class` from the evidence that an operator would have. The client sends `load` requests at a time,
    `batches` times (0: again and again until the fault is due). `world` is the usual number of ranks. `native`: a
    capture takes the ranks' native frames too, as one does when Python's end in a C call. `health_is_a_flag`: /health
    answers 200 without asking the loop (SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0).
    """

    name: str
    title: str
    verdict_class: str
    picture: str
    engine: Literal["sglang", "vllm"] = "sglang"
    mode: Literal["null", "prefill", "decode"] = "decode"
    fault: str = ""
    strikes: Who = "none"
    stands: Who = "none"
    also: tuple[str, ...] = ()
    healthy: bool = False
    reaches_ready: bool = True
    load: int = 4
    batches: int = 0
    world: int = 4
    flight_recorder: bool = False
    native: bool = False
    health_is_a_flag: bool = False

    def ranks(self, who: Who, world: int) -> frozenset[int]:
        """The ranks meant by `who` among `world` ranks."""
        chosen: dict[Who, Iterable[int]] = {
            "none": (),
            "first": (0,),
            "last": (world - 1,),
            "but_last": range(world - 1),
            "half": range(world // 2),
            "all": range(world),
        }
        return frozenset(chosen[who])

    def healed(self) -> "Specimen":
        """The same program without its fault: what a restart of an engine gives after a fault that strikes once."""
        return replace(self, fault="", strikes="none", stands="none", verdict_class="HEALTHY_IDLE", healthy=True)


_ALL = (
    Specimen(
        name="different_collectives",
        title="After a mass abort half of the decode ranks have an empty transfer queue and skip the poll",
        verdict_class="DESYNC_DIFFERENT_COLLECTIVE",
        picture="first half in broadcast < recv_requests, the others in all_reduce < poll_and_all_reduce",
        fault="queue_diverges",
        load=8,
        batches=1,
        strikes="half",
        stands="all",
    ),
    Specimen(
        name="skipped_collective",
        title="One prefill rank skips writing_check once; the ranks are found one operation later",
        verdict_class="DESYNC_DIFFERENT_COLLECTIVE",
        picture="last rank in broadcast < recv_requests, the others in all_reduce < loading_check",
        mode="prefill",
        fault="skip_writing_check",
        strikes="last",
        stands="all",
    ),
    Specimen(
        name="other_size",
        title="Two ranks enter the same all_reduce with another number of elements",
        verdict_class="DESYNC_SAME_OP_SHAPE_OR_SEQ",
        picture="flight recorder: the same sequence number and operation, int32[2] against int32[4]",
        fault="short_queue",
        load=8,
        batches=1,
        world=2,
        strikes="half",
        stands="all",
        flight_recorder=True,
    ),
    Specimen(
        name="dead_peer",
        title="One rank was killed; a neighbour waits in a collective for ranks that are gone",
        verdict_class="DEAD_PEER",
        picture="one rank is a zombie with exit code -9, survivors wait or hang in threading._shutdown",
        fault="killed",
        strikes="last",
        stands="but_last",
        also=("CRASH_LOOKS_LIKE_HANG",),
    ),
    Specimen(
        name="stopped_rank",
        title="One rank is stopped (SIGSTOP); its peers wait for it in a collective",
        verdict_class="MISSING_PARTICIPANT",
        picture="process state T on one rank, the others in the same collective",
        fault="stopped",
        strikes="last",
        stands="all",
    ),
    Specimen(
        name="straggler",
        title="One rank never reaches the collective: it waits for a build lock that another process holds",
        verdict_class="MISSING_PARTICIPANT",
        picture="last rank in flock < load_jit, the others in all_reduce < forward",
        fault="build_lock",
        strikes="last",
        stands="all",
    ),
    Specimen(
        name="incident_prefill",
        title="Prefill of a pair after a mass abort: worker errors on three of four ranks, all in HiCache's all_reduce",
        verdict_class="SYMMETRIC_WAIT",
        picture="all ranks in all_reduce < writing_check, `Unexpected transfer worker error` in the log, /health 200",
        mode="prefill",
        fault="hicache_diverges",
        load=8,
        batches=1,
        strikes="all",
        stands="all",
        also=("DESYNC_DIFFERENT_COLLECTIVE", "DESYNC_SAME_OP_SHAPE_OR_SEQ", "KV_TRANSFER", "UNDETERMINED"),
        health_is_a_flag=True,
    ),
    Specimen(
        name="incident_decode",
        title="Decode of that pair: half of its ranks in the next broadcast, half still in the poll",
        verdict_class="DESYNC_DIFFERENT_COLLECTIVE",
        picture="first half in broadcast < recv_requests, the others in all_reduce < poll_and_all_reduce, /health 200",
        fault="queue_diverges",
        load=8,
        batches=1,
        strikes="half",
        stands="all",
        health_is_a_flag=True,
    ),
    Specimen(
        name="helper_dead",
        title="The bootstrap thread of a prefill rank died on a message that it does not know",
        verdict_class="KV_TRANSFER",
        picture="live loops, no bootstrap_thread in one rank, the bootstrap queue never falls",
        mode="prefill",
        fault="bootstrap_thread_dies",
        strikes="all",
    ),
    Specimen(
        name="stuck_transfer",
        title="A KV transfer stays in progress for ever",
        verdict_class="KV_TRANSFER",
        picture="live loops, #transfer-req does not fall, no failure is counted, no token comes",
        fault="transfer_stuck",
        strikes="all",
    ),
    Specimen(
        name="lost_message",
        title="A worker's answer to EngineCore was lost: both wait for the other for ever",
        verdict_class="IPC_OR_EXTERNAL_LOST",
        picture="EngineCore in get_response, workers idle in dequeue, num_requests_running above 0 without a token",
        engine="vllm",
        mode="null",
        world=2,
        fault="message_lost",
        strikes="first",
        stands="all",
    ),
    Specimen(
        name="gil_held",
        title="A C call waits for a helper thread without releasing the GIL, which that thread needs",
        verdict_class="GIL_DEADLOCK",
        picture="one main thread owns the GIL below sem_wait, its helper waits in take_gil, peers in broadcast",
        fault="gil_held",
        native=True,
        strikes="first",
        stands="all",
    ),
    Specimen(
        name="blocking_io",
        title="The scheduler's loop waits for an HTTP answer",
        verdict_class="FRONTEND_OR_CPU_BOUND",
        picture="first rank in urlopen < _ensure_prefill_info, the others in a collective",
        fault="http_get",
        strikes="first",
        stands="all",
    ),
    Specimen(
        name="crash_hidden",
        title="One rank raised and hangs in interpreter exit, its process stays; the others wait for it",
        verdict_class="CRASH_LOOKS_LIKE_HANG",
        picture="`Scheduler hit an exception` in the log, last rank in threading._shutdown, the others in all_reduce",
        fault="raises",
        strikes="last",
        stands="all",
    ),
    Specimen(
        name="frontend_frozen",
        title="The API server's event loop is blocked; the ranks are idle and live",
        verdict_class="FRONTEND_OR_CPU_BOUND",
        picture="launcher in urlopen < load_image, the port accepts and does not answer, ranks turn",
        fault="frontend_blocks",
    ),
    Specimen(
        name="engine_dead",
        title="EngineCore is gone and the API server goes on answering 200",
        verdict_class="HEALTH_FALSE_OK_ENGINE_DEAD",
        picture="VLLM::EngineCore defunct, /health 200",
        engine="vllm",
        mode="null",
        world=2,
        fault="core_killed",
        strikes="first",
        also=("DEAD_PEER",),
    ),
    Specimen(
        name="idle",
        title="Healthy: nothing to do",
        verdict_class="HEALTHY_IDLE",
        picture="main threads in broadcast or poll, loops turn, no work",
        healthy=True,
        load=0,
    ),
    Specimen(
        name="vllm_idle",
        title="Healthy: nothing to do (vLLM)",
        verdict_class="HEALTHY_IDLE",
        picture="EngineCore in queue.get, workers in dequeue, no work",
        engine="vllm",
        mode="null",
        world=2,
        healthy=True,
        load=0,
    ),
    Specimen(
        name="long_step",
        title="Healthy: a step that takes very long, and advances",
        verdict_class="NOT_HUNG_SLOW_OR_CAPACITY",
        picture="all ranks in forward, gauges and counters flat, /health 503, but CPU time and switches grow",
        mode="prefill",
        fault="long_step",
        strikes="all",
        healthy=True,
    ),
    Specimen(
        name="startup",
        title="Healthy: weights are still being loaded on one rank",
        verdict_class="STARTUP",
        picture="last rank in load_weights, the others in barrier, no `ready to roll` in the log",
        fault="slow_load",
        strikes="last",
        healthy=True,
        reaches_ready=False,
        load=0,
    ),
    Specimen(
        name="paused",
        title="Healthy: generation was paused by the operator",
        verdict_class="HEALTHY_IDLE",
        picture="loops turn, requests are kept, num_paused_reqs above 0, `pause_generation` in the log",
        fault="paused",
        strikes="all",
        also=("NOT_HUNG_SLOW_OR_CAPACITY",),
        healthy=True,
    ),
)

SPECIMENS: dict[str, Specimen] = {specimen.name: specimen for specimen in _ALL}
