"""Health is progress: what the verdicts say about engines that stand, step idly, or are not seen."""

from closeranks.gateway.health import health, ready
from closeranks.gateway.resume import Request
from closeranks.gateway.router import Pair, Router
from closeranks.protocol import Fingerprint, Sampling

from .test_resume import Client, status

BOUND = 10.0


def router() -> Router:
    made = Router(["p"], ["d"], [], 5.0)
    say(made, 0.0)
    return made


def say(made: Router, now: float, tokens: int = 0, **decode: object) -> None:
    made.on_status("p", status("prefill", counters={"prefill_tokens": 0}), now)  # type: ignore[arg-type]
    given = {"counters": {"decode_tokens": tokens, "steps": int(now)}, **decode}
    made.on_status("d", status("decode", **given), now)  # type: ignore[arg-type]


def request(moved: float) -> Request:
    made = Request(1, "the-one", [1], 1, 5, Sampling(), [], 1000.0, Client(1))
    made.moved = moved
    return made


def test_idle_is_healthy_however_long() -> None:
    made = router()
    for now in range(1, 1000):
        say(made, float(now))
    assert health(made, [], BOUND, 999.0).ok
    assert ready(made, False, "", 999.0).ok


def test_idle_steps_are_no_progress() -> None:
    made = router()
    for now in range(1, 30):
        say(made, float(now), oldest_wait_s=float(now), slowest_rank=2)
    verdict = health(made, [], BOUND, 29.0)
    assert not verdict.ok
    assert "engine decode" in verdict.reasons[0]
    assert "rank 2" in verdict.reasons[0]


def test_a_long_queue_that_moves_is_healthy() -> None:
    made = router()
    for now in range(1, 30):
        say(made, float(now), tokens=now, oldest_wait_s=float(now))
    mine = request(0.0)
    mine.pair = Pair("p", "d")
    assert health(made, [mine], BOUND, 29.0).ok
    assert not health(made, [request(0.0)], BOUND, 29.0).ok  # nobody has it


def test_an_open_request_without_progress_is_named() -> None:
    made = router()
    for now in range(1, 30):
        say(made, float(now))
    verdict = health(made, [request(1.0)], BOUND, 29.0)
    assert not verdict.ok
    assert "the-one" in verdict.reasons[0]


def test_what_moves_elsewhere_is_no_excuse() -> None:
    made = Router(["p"], ["d1", "d2"], [], 5.0)
    for now in range(30):
        made.on_status("p", status("prefill", counters={"prefill_tokens": now}), float(now))  # type: ignore[arg-type]
        made.on_status("d1", status("d1", running=3, slowest_rank=1), float(now))
        moving = status("d2", running=3, counters={"decode_tokens": now})  # type: ignore[arg-type]
        made.on_status("d2", moving, float(now))
    verdict = health(made, [], BOUND, 29.0)
    assert len(verdict.reasons) == 1
    assert "engine d1: 3 requests run" in verdict.reasons[0]
    assert "rank 1" in verdict.reasons[0]


def test_waiting_behind_a_busy_prefill_engine_is_healthy() -> None:
    made = router()
    for now in range(1, 60):
        made.on_status("p", status("prefill", counters={"prefill_tokens": now}), float(now))  # type: ignore[arg-type]
        made.on_status("d", status("decode", waiting=4, oldest_wait_s=float(now)), float(now))
    assert health(made, [], BOUND, 59.0).ok


def test_a_running_request_that_gets_nothing_is_stuck_even_if_others_move() -> None:
    made = router()
    mine = request(1.0)
    mine.pair, mine.spoke = Pair("p", "d"), True
    for now in range(1, 30):
        say(made, float(now), tokens=now)
    verdict = health(made, [mine], BOUND, 29.0)
    assert "the-one" in verdict.reasons[0]


def test_a_blind_watcher_is_not_healthy() -> None:
    made = Router(["p"], ["d"], [], 5.0)
    assert not health(made, [], BOUND, 0.0).ok
    assert "not heard of yet" in ready(made, False, "", 0.0).reasons[0]
    say(made, 1.0)
    assert health(made, [], BOUND, 1.0).ok
    verdict = health(made, [], BOUND, 7.0)
    assert not verdict.ok
    assert "silent for 6.0 s" in verdict.reasons[0]


def test_states_and_doubts_are_named() -> None:
    made = router()
    made.on_status("d", status("decode", state="faulted", detail="digest mismatch"), 1.0)  # type: ignore[arg-type]
    assert "digest mismatch" in ready(made, False, "", 1.0).reasons[0]
    say(made, 1.0)
    made.doubt("p")
    assert "engine prefill" in ready(made, False, "", 1.0).reasons[0]
    assert not ready(made, True, "", 1.0).ok
    assert ready(made, False, "no tokenizer", 1.0).reasons == ("no tokenizer",)


def test_another_pair_that_works_is_enough() -> None:
    made = Router(["p"], ["d1", "d2"], [], 5.0)
    for endpoint in ("p", "d1"):
        made.on_status(endpoint, status(endpoint), 0.0)
    assert ready(made, False, "", 0.0).ok
    assert health(made, [], BOUND, 0.0).ok


def test_mismatch_names_both_values() -> None:
    made = Router(["p"], ["d"], [], 5.0)
    for endpoint, dtype in (("p", "float32"), ("d", "bfloat16")):
        print_ = Fingerprint(1, "w", dtype, "16", "t", "xxh3_64")
        made.on_status(endpoint, status(endpoint, fingerprint=print_), 0.0)  # type: ignore[arg-type]
    said = " ".join(ready(made, False, "", 0.0).reasons)
    assert "float32" in said
    assert "bfloat16" in said


def test_engines_of_another_model_than_the_gateways_serve_nobody() -> None:
    """Its tokens would be other texts to them: garbage, or tokens that they do not have."""
    made = Router(["p"], ["d"], [], 5.0, tokenizer="mine")
    for found, ok in (("theirs", False), ("mine", True)):
        for endpoint in ("p", "d"):
            print_ = Fingerprint(1, "w", "float32", "16", found, "xxh3_64")
            made.on_status(endpoint, status(endpoint, fingerprint=print_), 0.0)  # type: ignore[arg-type]
        verdict = ready(made, False, "", 0.0)
        assert verdict.ok is ok
        assert ok or ("theirs" in verdict.reasons[0] and "mine" in verdict.reasons[0])
        assert (made.choose([1], 0.0) is not None) is ok
