"""The runner: what a step may ask, and that nothing but the token list matters to what comes next."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from closeranks.engine.rank.collectives import Solo
from closeranks.engine.rank.models.llama import Llama
from closeranks.engine.rank.runner import InvalidStep, Runner
from closeranks.engine.rank.sampler import NotFinite
from closeranks.protocol import Begin, Copy, Row, Sampling, Step

from . import tiny

torch.set_num_threads(1)
PROMPT = [5, 17, 99, 3, 42, 8, 8, 1, 30, 77]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    path = tiny.folder(tmp_path_factory.mktemp("model") / "hf")
    return tiny.model(tiny.convert(path, path.parent / "cache"))


@pytest.fixture
def runner(model: Llama) -> Runner:
    return tiny.runner(model, Solo())


def begin(tokens: list[int], pages: list[int], sampling: Sampling | None = None, prompt: int = 0) -> Begin:
    return Begin(sampling or Sampling(), tokens, prompt or len(tokens), pages)


def alone(runner: Runner, tokens: list[int], new: int, sampling: Sampling | None = None, prompt: int = 0) -> list[int]:
    """Tokens sampled one by one in slot 0, on pages 0, 1, ..."""
    pages = list(range(-(-(len(tokens) + new) // 4)))
    out = runner.run(Step(1, 1, [Row(0, 0, len(tokens), [], True, begin(tokens, pages, sampling, prompt))])).tokens
    for n in range(new - 1):
        out += runner.run(Step(1, 1, [Row(0, len(tokens) + n, 1, sample=True)])).tokens
    return out


def test_a_huge_context_costs_no_more_than_the_pages_hold(model: Llama, runner: Runner, tmp_path: Path) -> None:
    """Not a row of tokens and a page table of the model's whole context in each slot: 256 GB for a billion."""
    folder = tiny.folder(tmp_path / "hf", max_position_embeddings=2**31 - 1)
    huge = tiny.model(tiny.convert(folder, tmp_path / "cache"))
    wide = tiny.runner(huge, Solo(), pages=8)
    assert wide.tokens.shape == (8, 33)
    assert wide.table.shape == (8, 8)
    wide.warm_up(16)
    assert alone(wide, PROMPT, 22) == alone(runner, PROMPT, 22)  # to the last place of the last page
    least = tiny.runner(huge, Solo(), pages=1, page_size=1)
    least.warm_up(16)
    assert alone(least, [5], 1) == alone(runner, [5], 1)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (Row(8, 0, 1), "slot 8 of 8"),
        (Row(-1, 0, 1), "slot -1"),
        (Row(1, 0, 1), "never begun"),
        (Row(0, 10, 1), "10 known tokens"),
        (Row(0, 0, 0), "positions 0 .. -1"),
        (Row(0, -1, 2), "positions -1"),
        (Row(0, 0, 10, [0, 128]), r"\[0, 128\] of 128"),
        (Row(0, 0, 10, [-1]), r"\[-1\] of 128"),
        (Row(0, 0, 10, [0] * 128), "pages for a context of 512"),
        (Row(0, 0, 9, [0, 1], sample=True), "samples after position 8"),
        (Row(0, 0, 10, [0], begin=begin(PROMPT, [0])), "beyond its 2 pages"),
        (Row(0, 0, 1, begin=begin([], [0])), "begins with 0 tokens"),
        (Row(0, 0, 1, begin=begin([131], [0])), "vocabulary of 131"),
        (Row(0, 0, 1, begin=begin([-1], [0])), "vocabulary of 131"),
        (Row(0, 0, 1, begin=begin([1] * 513, [0])), "begins with 513 tokens"),
        (Row(0, 0, 1, begin=begin([1], [500])), r"\[500\] of 128"),
    ],
)
def test_what_the_state_does_not_allow_is_a_fault_that_says_why(runner: Runner, row: Row, says: str) -> None:
    runner.run(Step(1, 1, [Row(0, 0, 4, begin=begin(PROMPT, [3]))]))
    with pytest.raises(InvalidStep, match=says):
        runner.run(Step(1, 2, [row]))


def test_two_rows_of_a_slot_and_copies_outside_the_pool_are_faults(runner: Runner) -> None:
    first = Row(0, 0, 4, begin=begin(PROMPT, [3, 4]))
    with pytest.raises(InvalidStep, match="two rows"):
        runner.run(Step(1, 1, [first, Row(0, 4, 2)]))
    for copy in (Copy(128, 0), Copy(0, -1)):
        with pytest.raises(InvalidStep, match="copy"):
            runner.run(Step(1, 1, copies=[copy]))


def test_steps_without_rows_or_samples_give_no_tokens(runner: Runner) -> None:
    assert runner.run(Step(1, 1)).tokens == []
    result = runner.run(Step(1, 2, [Row(3, 0, 4, begin=begin(PROMPT, [3]))]))
    assert (result.tokens, result.logprobs) == ([], [])
    assert runner.page_table(3).tolist() == [3]
    runner.run(Step(1, 3, [Row(3, 4, 4, [9, 11])]))
    assert runner.page_table(3).tolist() == [3, 9, 11]
    assert runner.page_table(2).tolist() == []


def test_a_slot_is_made_anew_by_begin(runner: Runner) -> None:
    expected = alone(runner, PROMPT, 6)
    alone(runner, [9] * 30, 3, Sampling(repetition_penalty=1.5, temperature=1.0))
    assert alone(runner, PROMPT, 6) == expected


def test_copied_pages_stand_for_their_originals(runner: Runner) -> None:
    """A shared prefix: the second request starts behind it, on copies, and the original is overwritten meanwhile."""
    expected = alone(runner, PROMPT, 6)
    copies = [Copy(0, 50), Copy(1, 40)]
    rows = [
        Row(1, 0, 9, begin=begin([7] * 9, [0, 1, 2])),
        Row(2, 8, 2, [60, 61], True, begin(PROMPT, [50, 40])),
    ]
    out = runner.run(Step(1, 1, rows, copies)).tokens
    for n in range(5):
        out += runner.run(Step(1, 1, [Row(2, 10 + n, 1, sample=True)])).tokens
    assert out == expected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(1, 11),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 1.5]),
        top_p=st.sampled_from([1.0, 0.8]),
        top_k=st.sampled_from([0, 30]),
        seed=st.integers(0, 2**63 - 1),
        presence_penalty=st.sampled_from([0.0, 1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.4]),
    ),
)
def test_a_resumed_stream_is_the_one_that_would_have_been(model: Llama, cut: int, sampling: Sampling) -> None:
    """Cut anywhere and begun anew with the tokens so far, on another rank process: the same tokens follow."""
    whole = alone(tiny.runner(model, Solo()), PROMPT, 12, sampling)
    resumed = alone(tiny.runner(model, Solo()), PROMPT + whole[:cut], 12 - cut, sampling, len(PROMPT))
    assert resumed == whole[cut:]


def test_a_launched_step_feeds_the_next_before_anyone_looks(runner: Runner) -> None:
    expected = alone(runner, PROMPT, 3)
    first = runner.launch(Step(1, 1, [Row(4, 0, 10, sample=True, begin=begin(PROMPT, [20, 21, 22, 23]))]))
    second = runner.launch(Step(1, 2, [Row(4, 10, 1, sample=True)]))
    third = runner.launch(Step(1, 3, [Row(4, 11, 1, sample=True)]))
    assert [r.result().tokens[0] for r in (first, second, third)] == expected


def test_logprobs_come_only_where_asked(runner: Runner) -> None:
    rows = [
        Row(i, 0, 10, sample=True, begin=begin(PROMPT, [3 * i, 3 * i + 1, 3 * i + 2], Sampling(logprobs=n)))
        for i, n in enumerate([-1, 0, 5])
    ]
    none, zero, five = runner.run(Step(1, 1, rows)).logprobs
    assert none is None
    assert zero is not None
    assert zero.top == []
    assert five is not None
    assert five.top[0][1] == five.chosen == zero.chosen


def test_the_last_position_of_the_context_can_be_computed(runner: Runner) -> None:
    tokens = [(i * 7) % 131 for i in range(511)]
    first = Row(0, 0, 511, sample=True, begin=begin(tokens, list(range(128))))
    assert len(runner.run(Step(1, 1, [first])).tokens) == 1
    assert len(runner.run(Step(1, 2, [Row(0, 511, 1, sample=True)])).tokens) == 1
    with pytest.raises(InvalidStep, match="context 512"):
        runner.run(Step(1, 3, [Row(0, 512, 1, sample=True)]))


def test_broken_kv_is_a_fault_not_a_token(runner: Runner) -> None:
    runner.run(Step(1, 1, [Row(0, 0, 9, begin=begin(PROMPT, [0, 1, 2]))]))
    runner.pool.tensor[1, 0, 1, 1, 2] = float("nan")
    with pytest.raises(NotFinite):
        runner.run(Step(1, 2, [Row(0, 9, 1, sample=True)]))


def test_warming_up_leaves_no_trace(runner: Runner, tmp_path: Path) -> None:
    runner.warm_up(64)
    assert runner.slots == [None] * 8
    assert not runner.pool.tensor[0].any()
