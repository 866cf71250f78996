"""The state machine over hand-made snapshots: what is confirmed, what never is, and what is said instead."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.watch.limits import DEFAULT
from closeranks.watch.machine import Memory, step
from closeranks.watch.snapshot import Blind, EngineSeen, Proc, Snapshot
from tests.watch.looks import NAME, Film, engine, rounds, run, signals

SAME = {"same": True}
MOVES = st.sampled_from(["moves", "stands", "blind"])
STACKS = st.sampled_from(
    [None, SAME, {"same": False}, {"still": False}, Blind("no right to trace"), {"idle": True}, {"slow": True}]
)


def test_a_wedge_is_suspected_by_two_signals_and_confirmed_by_stacks() -> None:
    film = Film()
    assert film.looks(5)[-1] == "healthy"
    phases = film.looks(5, proc="stands", counters="stands")
    assert phases[-1] == "suspect"
    assert film.look(proc="stands", counters="stands", stacks=SAME) == "confirmed"
    assert signals(film.state) == {"proc", "counters", "stacks"}


def test_without_the_right_to_trace_two_other_signals_confirm_later() -> None:
    film = Film()
    film.looks(5)
    phases = film.looks(15, proc="stands", counters="stands", stacks=Blind("no right"))
    assert phases[8] == "suspect"
    assert phases[-1] == "confirmed"


@pytest.mark.parametrize("stacks", [{"same": False}, {"still": False}])
def test_stacks_that_differ_or_ranks_that_ran_between_the_dumps_confirm_nothing(stacks: dict[str, Any]) -> None:
    film = Film()
    film.looks(5)
    assert "confirmed" not in film.looks(30, proc="stands", counters="stands", stacks=stacks)


@pytest.mark.parametrize(
    ("stacks", "phase"),
    [({"startup": True}, "excluded"), ({"updating": True}, "excluded"), ({"slow": True}, "suspect")],
)
def test_what_stacks_explain_is_not_confirmed(stacks: dict[str, Any], phase: str) -> None:
    film = Film()
    film.looks(5)
    assert film.looks(20, proc="stands", counters="stands", stacks=stacks)[-1] == phase


def test_a_long_step_uses_cpu_and_is_healthy() -> None:
    film = Film()
    film.looks(5)
    assert set(film.looks(60, proc="moves", counters="stands", numbers={"running": 3.0})) == {"healthy"}


def test_an_idle_vllm_stands_still_and_is_healthy() -> None:
    film = Film(engine("vllm"))
    film.looks(3)
    assert film.looks(60, proc="stands", counters="stands")[-1] == "healthy"


def test_a_vllm_that_holds_requests_and_stands_is_confirmed_unless_its_core_waits_for_work() -> None:
    how = {"proc": "stands", "counters": "stands", "numbers": {"running": 2.0}}
    film = Film(engine("vllm"))
    film.looks(3)
    film.looks(6, **how)
    assert film.look(**how, stacks={"idle": True}) == "excluded"
    assert film.look(**how, stacks=SAME) == "confirmed"


def test_a_stale_gauge_of_a_vllm_confirms_nothing_without_stacks_or_probe() -> None:
    how: dict[str, Any] = {"proc": "stands", "counters": "stands", "numbers": {"running": 2.0}}
    film = Film(engine("vllm"))
    film.looks(3)
    assert "confirmed" not in film.looks(40, **how, stacks=Blind("no right"))
    assert film.look(**how, stacks=Blind("no right"), probe={"ok": False}) == "confirmed"


@pytest.mark.parametrize("label", ["TP2", "detokenizer", "launcher"])
@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_death_confirms_alone_and_for_good(label: str, state: str) -> None:
    film = Film()
    film.looks(4)
    assert film.looks(4, state={label: state})[-1] == "confirmed"
    assert set(film.looks(30)) == {"confirmed"}


def test_an_engine_that_is_being_ended_is_no_death() -> None:
    film = Film()
    film.looks(4)
    assert set(film.looks(10, log={"ending": True}, state={"TP1": "Z", "TP2": "X"})) == {"excluded"}


def test_the_parts_of_an_engine_that_takes_long_to_end_are_no_death_either() -> None:
    """A drain may take longer than any patience, and what is left at last is gone because that was wanted."""
    film = Film()
    film.looks(4)
    film.looks(int(DEFAULT.ending_s) + 5, log={"ending": True})
    assert "confirmed" not in film.looks(10, log={"ending": True}, state={"TP1": "Z", "TP2": "X"})


def test_a_word_that_the_log_takes_back_does_not_count_for_the_rest_of_the_life() -> None:
    """In a file that goes on over a restart, the old life's last line may be read when the new one is seen already."""
    film = Film()
    film.looks(3)
    film.looks(2, log={"ending": True})
    film.looks(int(DEFAULT.ending_s) + 5)
    film.looks(4, log={}, state={"TP1": "Z"})  # blind: nothing is taken back, and nothing said
    assert film.looks(12, state={"TP1": "Z"})[-1] == "confirmed"


def test_a_word_that_is_read_late_takes_the_death_back() -> None:
    """The log was blind while parts went; when all are gone, it says that this was wanted."""
    film = Film()
    film.looks(4, log={})
    assert film.looks(12, log={}, state={"TP1": "Z"})[-1] == "confirmed"
    said = {"ready": True, "ending": True, "paused": False, "updating": False}
    memory = film.memory
    for n in range(3):
        at = film.at + 1 + n
        memory = step(memory, Snapshot(at, 0.0, (), {"log": {NAME: {**said, "at": at}}}), DEFAULT)
    assert memory.states[NAME].phase == "excluded"
    assert not memory.states[NAME].proof


def test_where_the_log_cannot_be_read_a_death_gets_more_patience() -> None:
    film = Film()
    film.looks(4, log={})
    assert "confirmed" not in film.looks(6, log={}, state={"TP1": "Z"})
    assert film.looks(6, log={}, state={"TP1": "Z"})[-1] == "confirmed"


def test_all_processes_gone_is_confirmed_only_when_nothing_said_so_and_nothing_came() -> None:
    for said, last in ((False, "confirmed"), (True, "excluded")):
        film = Film()
        film.looks(4, log={"ending": said})
        memory: Memory = film.memory
        phases = []
        for n in range(1, 50):
            memory = step(memory, Snapshot(film.at + n, 0.0, (), {}), DEFAULT)
            phases.append(memory.states[NAME].phase)
        assert phases[-1] == last
        assert "confirmed" not in phases[:25]


def test_an_engine_that_gets_its_name_when_it_listens_is_not_gone() -> None:
    film = Film(engine(name="decode-pid100"))
    film.looks(4)
    film.engine = engine()
    film.looks(60)
    assert {name: state.phase for name, state in film.memory.states.items()} == {NAME: "healthy"}


def test_the_last_words_of_an_engine_that_is_gone_are_heard() -> None:
    """Between the end of its processes and the next reading of its log it may have been taken off the list."""
    film = Film()
    film.looks(5)
    memory, said = film.memory, {"ready": True, "ending": True, "paused": False, "updating": False}
    for n in range(60):
        at = film.at + 1 + n
        log: Any = {"log": {NAME: {**said, "at": at}}} if n < 5 else {}
        memory = step(memory, Snapshot(at, 0.0, (), log), DEFAULT)
        assert memory.states[NAME].phase == "excluded"


def test_a_raised_error_confirms_alone() -> None:
    film = Film()
    film.looks(3)
    assert film.look(log={"crash": "the scheduler raised an exception"}) == "confirmed"
    film = Film()
    film.looks(3)
    assert film.look(log={"thread": "bootstrap_thread"}) == "confirmed"


def test_a_part_stopped_by_a_signal_is_confirmed_a_whole_one_is_said() -> None:
    film = Film()
    film.looks(4)
    assert film.looks(7, proc="stands", counters="stands", state={"TP3": "T"})[-1] == "confirmed"
    film = Film()
    film.looks(4)
    everyone = {p.label: "T" for p in film.engine.procs}
    phases = film.looks(20, proc="stands", counters="stands", launcher="stands", http=False, state=everyone)
    assert set(phases) == {"excluded"}
    assert "SIGSTOP" in film.state.why[0].text


def test_a_part_that_goes_on_is_let_go() -> None:
    """It is no death: what goes on has lost nothing."""
    film = Film()
    film.looks(4)
    assert film.looks(9, state={"detokenizer": "T"})[-1] == "confirmed"
    assert film.state.proof
    assert film.looks(12)[-1] == "healthy"


def test_threads_that_run_are_no_health_where_nothing_counts_the_work() -> None:
    """A loop turns also while no request advances; whoever cannot see that does not say healthy."""
    film = Film()
    phases = film.looks(30, counters="blind", log={})
    assert set(phases) == {"blind"}
    assert "its main threads run" in film.state.why[0].text
    assert "HTTP 404" in film.state.why[0].text
    film = Film()
    film.looks(5)
    assert film.looks(4, counters="blind")[-1] == "healthy", "a page that came late once is no blindness"
    assert film.looks(20, counters="blind")[-1] == "blind"


def served(role: str, pid: int = 300, base: int = 100) -> EngineSeen:
    """An engine of ours with another process of its service."""
    plain = engine("closeranks", base=base)
    more = Proc(pid, pid, 1, role, NAME, None, f"closeranks::{role}")  # type: ignore[arg-type]
    head = msgspec.structs.replace(plain.procs[0], role="leader")
    return msgspec.structs.replace(plain, procs=(head, *plain.procs[1:], more))


def own_look(memory: Memory, at: float, seen: EngineSeen, steps: bool = True, **states: str) -> Memory:
    """One look at an engine of ours whose threads run; `states`: of single processes."""
    proc: dict[str, Any] = {
        f"{NAME}/{p.label}": {"at": at, "start": float(p.start_time), "state": states.get(p.label, "S"), "switches": at,
                              "ticks": at} for p in seen.procs}  # fmt: skip
    read = {"at": at, "steps": at, "tokens": 7.0, "running": 0.0, "unhealthy": ""}
    readings: Any = {"proc": proc, "steps": {NAME: read if steps else Blind("gateway /metrics: no answer")}}
    return step(memory, Snapshot(at, 0.0, (seen,), readings), DEFAULT)


@pytest.mark.parametrize("role", ["gateway", "supervisor"])
def test_what_engines_share_is_part_of_their_service(role: str) -> None:
    """Stopped it is confirmed, by its name; another one in its place is another life, and a death no longer one."""
    memory = Memory()
    for n in range(10):
        memory = own_look(memory, 1000.0 + n, served(role), **{role: "T" if n > 2 else "S"})
    assert memory.states[NAME].phase == "confirmed"
    assert {e.rank for e in memory.states[NAME].why} == {role}
    for n in range(10, 20):
        memory = own_look(memory, 1000.0 + n, served(role), **{role: "X"})
    assert memory.states[NAME].phase == "confirmed"
    for n in range(20, 24):
        memory = own_look(memory, 1000.0 + n, served(role, pid=301))
    assert memory.states[NAME].phase == "healthy"


def test_our_own_engine_without_its_step_counters_is_blind() -> None:
    memory = Memory()
    for n in range(30):
        memory = own_look(memory, 1000.0 + n, served("gateway"), steps=n < 5)
        if n == 4:
            assert memory.states[NAME].phase == "healthy"
    assert memory.states[NAME].phase == "blind"
    assert "its main threads run" in memory.states[NAME].why[0].text


def test_a_starting_engine_is_excluded_until_it_serves() -> None:
    film = Film()
    film._ticks = {f"b{n}": 0.0 for n in range(4)} | {"tokens": 0.0, "finished": 0.0}
    how = {"proc": "stands", "counters": "stands", "log": {"ready": False}, "stacks": SAME}
    assert set(film.looks(60, **how)) == {"excluded"}
    assert "starting" in film.state.why[0].text


def test_an_engine_that_was_ready_does_not_start_again_when_signals_fall_silent() -> None:
    film = Film()
    film.looks(4)
    late: dict[str, Any] = {"log": {"ready": False}, "counters": "blind"}
    assert "excluded" not in film.looks(20, **late)
    assert film.looks(20, **late, proc="stands", stacks=SAME)[-1] in ("confirmed", "suspect")


@pytest.mark.parametrize("whole", [True, False])
def test_an_engine_whose_processes_were_replaced_starts_anew(whole: bool) -> None:
    """Also one whose launcher stays, and whatever is still read of the life before."""
    film = Film()
    film.looks(4)
    if whole:
        film.engine = engine(base=500)
    else:
        procs = tuple(msgspec.structs.replace(p, pid=p.pid + 500) if p.label == "TP2" else p for p in film.engine.procs)
        film.engine = msgspec.structs.replace(film.engine, procs=procs)
    film.look()  # the page of the life before
    starts: dict[str, Any] = {"log": {"ready": False}, "counters": "blind", "proc": "stands"}
    film.looks(12, **starts)
    assert set(film.looks(60, **starts, stacks=SAME)) == {"excluded"}
    assert "starting" in film.state.why[0].text
    film.looks(30)
    late: dict[str, Any] = {"log": {"ready": False}, "counters": "blind"}
    assert "excluded" not in film.looks(20, **late), "it has been ready since"


def test_our_own_engine_starts_anew_while_its_gateway_shows_the_last_word_of_the_life_before() -> None:
    """Between two epochs only a rank of the old one may be seen, beside the gateway that stays."""
    old, new = served("gateway"), served("gateway", base=500)
    between = msgspec.structs.replace(old, procs=tuple(p for p in old.procs if p.label in ("TP1", "gateway")))
    memory, at = Memory(), 1000.0

    def look(seen: EngineSeen, up: float, steps: float, moves: bool) -> str:
        nonlocal memory, at
        at += 1
        ran = at if moves else 7.0
        proc: Any = {f"{NAME}/{p.label}": {"at": at, "start": float(p.start_time), "state": "S", "switches": ran,
                                           "ticks": ran} for p in seen.procs}  # fmt: skip
        read = {"at": at, "steps": steps, "tokens": 7.0, "running": 0.0, "unhealthy": "", "up": up}
        stacks: Any = {NAME: rounds(at)}
        memory = step(memory, Snapshot(at, 0.0, (seen,), {"proc": proc, "steps": {NAME: read}, "stacks": stacks}))
        return memory.states[NAME].phase

    assert [look(old, 1.0, 50.0 + n, True) for n in range(40)][-1] == "healthy"
    for _ in range(2):
        look(between, 0.0, 90.0, False)
    assert {look(new, 0.0, 90.0, False) for _ in range(60)} == {"excluded"}
    assert "starting" in memory.states[NAME].why[0].text
    assert [look(new, 1.0, float(n), True) for n in range(1, 40)][-1] == "healthy"
    assert "excluded" not in {look(new, 0.0, 39.0, False) for _ in range(20)}, "it stands, whatever its gateway says"


def test_a_paused_engine_is_excluded_and_can_still_wedge() -> None:
    film = Film()
    film.looks(4)
    how: dict[str, Any] = {"log": {"paused": True}, "numbers": {"transfer": 3.0}, "tokens": "stands"}
    assert film.looks(20, **how)[-1] == "excluded"
    assert film.looks(8, **how, proc="stands", counters="stands", stacks=SAME)[-1] == "confirmed"


def test_a_stalled_transfer_needs_a_second_signal() -> None:
    how: dict[str, Any] = {"numbers": {"transfer": 3.0}, "tokens": "stands"}
    film = Film()
    film.looks(6)
    assert set(film.looks(30, **how)) <= {"healthy", "suspect"}
    assert film.phase == "suspect"
    assert film.look(**how, probe={"ok": False}) == "confirmed"
    film = Film()
    film.looks(6)
    film.looks(12, **how)
    assert film.look(**how, stacks={"lacks": "no bootstrap_thread in TP1", "same": False}) == "confirmed"


def test_requests_that_are_given_up_do_not_end_a_confirmed_stall() -> None:
    """They count as finished, those of the watch's own probes too."""
    how: dict[str, Any] = {"numbers": {"transfer": 3.0}, "tokens": "stands"}
    film = Film()
    film.looks(6)
    film.looks(30, **how)
    assert film.look(**how, probe={"ok": False}) == "confirmed"
    given_up = [film.look(numbers={"transfer": 3.0, "finished": 100.0 + n, "prompted": 900.0 + n}, tokens="stands")
                for n in range(30)]  # fmt: skip
    assert set(given_up) == {"confirmed"}
    assert film.looks(15, numbers={"transfer": 3.0})[-1] == "healthy"
    film.looks(6)
    film.looks(70, **how)
    assert film.look(**how, probe={"ok": False}) == "confirmed"
    for _ in range(4):  # these clients gave up, the next ones come
        assert set(film.looks(4, tokens="stands")) == {"confirmed"}
        assert film.look(**how) == "confirmed"
    assert film.looks(14, tokens="stands")[-1] == "healthy", "nothing has been held for a while"


def test_a_first_request_that_compiles_kernels_is_no_stall() -> None:
    how: dict[str, Any] = {"numbers": {"waiting": 1.0}, "tokens": "stands", "probe": {"ok": False}}
    film = Film()
    film.looks(6)
    film.looks(7, **how)
    assert set(film.looks(60, **how, stacks={"compiling": True, "same": False})) == {"excluded"}
    assert "confirmed" in film.looks(4, **how, stacks={"compiling": False, "same": False})


def test_saturation_is_no_stall() -> None:
    film = Film()
    film.looks(4)
    how: dict[str, Any] = {"numbers": {"transfer": 90.0, "running": 30.0, "waiting": 200.0}, "probe": {"ok": False}}
    assert set(film.looks(60, **how)) == {"healthy"}


@pytest.mark.parametrize("second", [{"stacks": {"transfer_still": True}}, {"probe": {"ok": False}}])
def test_an_unseen_prefill_gets_time_in_proportion_to_what_was_healthy(second: dict[str, Any]) -> None:
    how: dict[str, Any] = {"numbers": {"transfer": 3.0}, "tokens": "stands", **second}
    fast, slow = Film(), Film()
    fast.looks(4)
    assert "confirmed" in fast.looks(30, **how)
    slow._ticks = {f"b{n}": 500.0 for n in range(4)}  # long before the watch began: how long its waits are is not known
    slow.looks(4)
    assert "confirmed" not in slow.looks(50, **how)
    assert "confirmed" in slow.looks(20, **how)


def test_a_frozen_frontend_is_confirmed_a_busy_one_is_not() -> None:
    film = Film()
    film.looks(4)
    phases = film.looks(8, http=False, launcher="stands")
    assert phases[-1] == "suspect"
    assert film.look(http=False, launcher="stands", stacks=SAME) == "confirmed"
    film = Film()
    film.looks(4)
    assert set(film.looks(40, http=False, launcher="moves")) == {"healthy"}
    film = Film()
    film.looks(4)
    starved = film.looks(40, http=False, launcher="stands", state={"launcher": "R"}, stacks={"still": False})
    assert set(starved) == {"healthy"}


def test_a_launcher_that_does_not_serve_is_not_what_is_unheard() -> None:
    how: dict[str, Any] = {"http": False, "launcher": "stands", "stacks": Blind("no right")}
    for servers, last in ((0, "confirmed"), (2, "suspect")):
        seen = engine("vllm")
        extra = [Proc(300 + n, 1, 100, "helper", NAME, None, f"VLLM::APIServer_{n}") for n in range(servers)]
        film = Film(msgspec.structs.replace(seen, procs=(*seen.procs, *extra)))
        film.looks(4)
        assert film.looks(20, **how)[-1] == last


def test_ranks_that_wait_for_the_cpu_do_not_stand() -> None:
    film = Film()
    film.looks(5)
    starved = {p.label: "R" for p in film.engine.procs}
    phases = film.looks(40, proc="stands", counters="stands", state=starved, stacks={"still": False})
    assert "confirmed" not in phases
    assert "suspect" not in phases


def test_our_own_engine_is_judged_by_its_work_and_its_gateway() -> None:
    seen = engine("closeranks")
    for unhealthy, last in (("", "suspect"), ("3 requests without progress", "confirmed")):
        memory, phases = Memory(), []
        for n in range(30):
            steps = {"at": 1000.0 + n, "steps": 50.0 + n, "tokens": 7.0, "running": 3.0, "unhealthy": unhealthy}
            memory = step(memory, Snapshot(1000.0 + n, 0.0, (seen,), {"steps": {NAME: steps}}), DEFAULT)
            phases.append(memory.states[NAME].phase)
        assert "confirmed" not in phases[:8]
        assert phases[-1] == last


def test_a_hang_on_the_device_is_told_by_counters_and_gpus() -> None:
    film = Film()
    film.looks(4)
    low = {"cards": 4.0, "busy": 3.0, "idle": 1.0, "spinning": 3.0}
    busy = {"cards": 4.0, "busy": 4.0, "idle": 0.0, "spinning": 0.0}
    assert "confirmed" not in film.looks(60, counters="stands", gpu=busy)
    assert film.looks(3, counters="stands", gpu=low)[-1] == "confirmed"


def test_a_confirmed_engine_that_moves_again_is_let_go_after_a_while() -> None:
    film = Film()
    film.looks(4)
    film.looks(6, proc="stands", counters="stands")
    assert film.look(proc="stands", counters="stands", stacks=SAME) == "confirmed"
    phases = film.looks(20)
    assert phases[5] == "confirmed"
    assert phases[-1] == "healthy"


def test_the_last_word_of_a_life_says_nothing_of_the_next() -> None:
    """The log is read once a second: at the first look at a new life the newest reading is of the one before."""
    film = Film()
    film.looks(3)
    died = {"crash": "a child process crashed", "pid": 100.0, "start": 1.0}
    assert film.look(log=died) == "confirmed"
    film.engine = engine(base=500)
    assert "confirmed" not in [film.look(log=died), film.look(log={"pid": 500.0, "start": 1.0})]
    assert film.look(log={"crash": "x", "pid": 500.0, "start": 1.0}) == "confirmed"


def test_what_was_read_of_a_life_says_nothing_of_the_next() -> None:
    """Answers of an engine that was just ended are seconds old when its successor is seen."""
    film = Film()
    film.looks(6, log={})
    assert film.phase == "healthy"
    film.engine, old = engine(base=500), film.shot
    for _ in range(5):
        film.look(counters="blind", http=None, log={})
        later = msgspec.structs.replace(
            film.shot, readings={**film.shot.readings, "counters": old.readings["counters"]}
        )
        film.memory = step(film.memory, msgspec.structs.replace(later, at=film.at + 0.5), DEFAULT)
        assert film.phase != "healthy"
    assert film.looks(14, log={})[-1] == "healthy"


def test_another_life_begins_anew() -> None:
    film = Film()
    film.looks(4)
    assert film.looks(4, state={"TP2": "Z"})[-1] == "confirmed"
    film.engine = engine(base=500)
    assert film.looks(4)[-1] == "healthy"


def test_the_switches_of_a_dump_do_not_end_a_stillness() -> None:
    film = Film()
    film.looks(4)
    film.looks(5, proc="stands", counters="stands")
    film.look(proc="moves", counters="stands", disturbed=True)
    assert film.look(proc="stands", counters="stands", stacks=SAME) == "confirmed"


def test_a_dump_that_takes_long_hides_no_wedge() -> None:
    film = Film()
    film.looks(4)
    film.looks(5, proc="stands", counters="stands")
    began = film.at
    film.looks(12, proc="moves", counters="stands", disturbed=True)
    film.look(proc="stands", counters="stands", stacks={"began": began})
    assert film.phase == "confirmed"


def test_what_runs_only_while_it_is_dumped_does_not_stand() -> None:
    """A watch that gets little CPU dumps most of the time: what changes meanwhile may be the dumps' doing, or not."""
    film = Film()
    film.looks(4)
    film.looks(4, http=False, launcher="stands")
    assert film.phase == "suspect"
    phases = film.looks(40, http=False, launcher="moves", disturbed=True, stacks=Blind("no right"))
    assert "confirmed" not in phases


@given(pause=st.floats(7.0, 1e6))
@settings(max_examples=20, deadline=None)
def test_a_pause_of_the_watch_counts_as_a_second(pause: float) -> None:
    film = Film()
    film.looks(4)
    film.look(proc="stands", counters="stands")
    assert film.look(proc="stands", counters="stands", after=pause) == "healthy"
    assert film.looks(3, proc="stands", counters="stands")[-1] == "suspect"


@given(jump=st.floats(-1e9, -0.001))
@settings(max_examples=20, deadline=None)
def test_a_clock_that_goes_back_confirms_nothing(jump: float) -> None:
    film = Film()
    film.looks(6)
    assert film.look(proc="stands", counters="stands", stacks=SAME, after=jump) != "confirmed"


SCRIPTS = st.lists(
    st.tuples(
        st.fixed_dictionaries(
            {
                "proc": MOVES,
                "counters": MOVES,
                "launcher": MOVES,
                "tokens": st.sampled_from(["moves", "stands"]),
                "stacks": STACKS,
                "http": st.sampled_from([True, False]),
                "probe": st.sampled_from([None, {"ok": True}, {"ok": False}]),
                "numbers": st.sampled_from([{}, {"running": 3.0}, {"transfer": 2.0}]),
                "log": st.sampled_from([{}, {"ready": True}, {"paused": True}]),
            }
        ),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=6,
)


def spread(script: list[tuple[dict[str, Any], int]]) -> list[dict[str, Any]]:
    return [how for how, times in script for _ in range(times)]


@given(script=SCRIPTS, kind=st.sampled_from(["sglang", "vllm"]))
@settings(max_examples=60, deadline=None)
def test_no_inference_is_confirmed_by_one_signal(script: list[tuple[dict[str, Any], int]], kind: Any) -> None:
    """Without a death or a raised error, whatever else is shown: two signals, or stacks with the stillness."""
    film = Film(engine(kind))
    for state in run(film, spread(script)):
        assert not state.proof
        if state.phase == "confirmed":
            assert len(signals(state)) >= 2


@given(script=SCRIPTS, alone=st.sampled_from(["proc", "counters", "launcher", "http", "probe"]))
@settings(max_examples=40, deadline=None)
def test_a_single_bad_signal_is_never_enough(script: list[tuple[dict[str, Any], int]], alone: str) -> None:
    """All but one signal show health: nothing is confirmed, however bad that one looks."""
    good: dict[str, Any] = {"proc": "moves", "counters": "moves", "launcher": "moves", "tokens": "moves", "http": True,
                            "probe": None, "stacks": None, "log": {"ready": True}, "numbers": {}}  # fmt: skip
    film = Film()
    states = run(film, [{**good, alone: how[alone]} for how in spread(script)])
    assert "confirmed" not in {state.phase for state in states}


@given(number=st.integers(1, 40))
@settings(max_examples=10, deadline=None)
def test_who_sees_nothing_says_neither_healthy_nor_confirmed(number: int) -> None:
    film = Film()
    phases = film.looks(number, proc="blind", counters="blind", launcher="blind", log={}, http=None, stacks=Blind("-"))
    assert set(phases) == {"blind"}
    assert {b.partition(":")[0] for b in film.state.blind} == {"proc", "counters", "log", "stacks"}


@given(script=SCRIPTS)
@settings(max_examples=30, deadline=None)
def test_healthy_is_never_said_for_long_after_the_last_sign_of_life(script: list[tuple[dict[str, Any], int]]) -> None:
    film = Film()
    run(film, spread(script))
    phases = film.looks(30, proc="blind", counters="blind", launcher="blind", log={}, http=None)
    assert "healthy" not in phases[12:]


@given(script=SCRIPTS)
@settings(max_examples=60, deadline=None)
def test_a_proof_is_confirmed_after_any_history_and_stays(script: list[tuple[dict[str, Any], int]]) -> None:
    film = Film()
    run(film, spread(script))
    assert film.look(log={"ready": True, "crash": "the scheduler raised an exception"}) == "confirmed"
    assert set(film.looks(20)) == {"confirmed"}
    assert film.state.proof


@given(
    before=st.integers(4, 8),
    seen=st.lists(st.sampled_from(["blind", "stands"]), min_size=12, max_size=20),
    filled=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_more_evidence_of_a_wedge_never_takes_a_confirmation_back(
    before: int, seen: list[str], filled: st.DataObject
) -> None:
    """Where counters were blind and are not, and agree: what was confirmed is confirmed, and no later."""
    more = [how if how == "stands" else filled.draw(st.sampled_from(["blind", "stands"])) for how in seen]
    first: list[int | None] = []
    for counters in (seen, more):
        film = Film()
        film.looks(before)
        script = [{"proc": "stands", "counters": c, "stacks": SAME if n > 6 else None} for n, c in enumerate(counters)]
        phases = [state.phase for state in run(film, script)]
        first.append(phases.index("confirmed") if "confirmed" in phases else None)
    assert first[0] is None or (first[1] is not None and first[1] <= first[0])
