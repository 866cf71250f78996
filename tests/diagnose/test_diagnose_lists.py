"""Process lists, exit codes and helpers: what they show, and the nearest thing that they do not."""

import pytest

from closeranks.diagnose.judge import diagnose_texts
from tests.diagnose.variants import HEAD, LOOP, OK, decode, dump
from tests.diagnose.variants_readers import COMPLAINS, GRAMMAR, HELD, RAISED, REFUSED, STATS, column


@pytest.mark.parametrize(
    "after",
    ["[2026-10-03 05:00:00] SIGQUIT received.\n", "[2026-10-03 05:00:00] The server is fired up and ready to roll!\n"],
    ids=["the launcher ends", "another life"],
)
def test_a_helper_that_raised_and_was_ended_or_replaced_is_no_hang(after: str) -> None:
    assert "helper_raised" not in {f.rule for f in diagnose_texts([("s.log", RAISED + after)]).findings}


def test_a_helper_names_itself_and_what_it_raised() -> None:
    main = diagnose_texts([("s.log", RAISED + REFUSED)]).main
    assert "detokenizer" in main.summary
    assert "OSError" in main.summary


def test_an_exit_code_before_the_next_life_is_the_past() -> None:
    text = "sglang-1 exited with code 139\n[2026-10-03 05:00:00] The server is fired up and ready to roll!\n" + decode(
        "05:01:00"
    )
    assert diagnose_texts([("s.log", text)]).main.cls != "CRASH_LOOKS_LIKE_HANG"
    split = "".join(dump(f"sglang::scheduler_TP{i}", (*HEAD, *LOOP), 10 + i) for i in range(2))
    findings = diagnose_texts([("describe.txt", "  Exit Code:    139\n"), ("s.txt", split)]).findings
    assert "ended_by_own_signal" not in {f.rule for f in findings}


def test_an_engine_that_computes_has_its_core_whatever_a_list_lacks() -> None:
    ps = "USER PID COMMAND\nroot 1 vllm serve /m\nroot 2 nginx\n"
    log = STATS.format(10, 120.5) + STATS.format(20, 121.5) + OK.format("05:00:21", "/health", "200 OK")
    assert diagnose_texts([("ps.txt", ps), ("v.log", log)]).main.cls != "HEALTH_FALSE_OK_ENGINE_DEAD"


def test_tokens_after_the_complaint_rule_a_standing_compilation_out() -> None:
    log = COMPLAINS + decode("05:01:01")
    assert diagnose_texts([("s.txt", GRAMMAR), ("s.log", log)]).main.rule != "core_works_on_cpu"


def test_a_rank_that_is_traced_without_a_debugger_may_just_be_read() -> None:
    evidence = [("ps.txt", HELD), ("s.txt", dump("sglang::scheduler_TP0", (*HEAD, *LOOP), 610))]
    assert "processes_gone" not in {f.rule for f in diagnose_texts(evidence).findings}


@pytest.mark.parametrize("form", ["pods", "stern", "files"])
def test_columns_of_two_nodes_are_not_mixed(form: str) -> None:
    one, two = column((0, 1, 4), 3), column((0, 2, 6), 5)
    if form == "files":
        evidence = [("dec-0.log", one), ("dec-1.log", two)]
    else:
        prefix = "[pod/dec-{}/main] {}" if form == "pods" else "dec-{} main {}"
        record = "[2026-10-03 05:00:00 TP0] x"
        lines = [prefix.format(n, line) for n, text in enumerate((one, two)) for line in [record, *text.splitlines()]]
        evidence = [("all.log", "\n".join(lines) + "\n")]
    main = diagnose_texts(evidence).main
    assert main.cls == "MISSING_PARTICIPANT"
    assert [m.split(" of ")[0] for m in main.missing] == ["local peer 3", "local peer 5"]


def test_ranks_of_one_node_may_be_in_files_of_their_own() -> None:
    main = diagnose_texts([("rank0.log", column((0,), 3)), ("rank1.log", column((1,), 3))]).main
    assert main.missing == ("local peer 3",) or list(main.missing) == ["local peer 3"]
