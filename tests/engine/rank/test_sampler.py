"""The sampler against a plain numpy oracle that follows the definition in its docstring word by word."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.engine.rank.sampler import Draw, History, NotFinite, needs_history, sample, uniform
from closeranks.protocol import Sampling
from tests.engine.rank.oracle import oracle

VOCAB = 40


def history(s: Sampling, tokens: list[int], prompt: int) -> History | None:
    return History(torch.tensor(tokens, dtype=torch.int64), prompt, VOCAB) if needs_history(s) else None


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 20, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    logprobs=st.sampled_from([-1, 0, 5, 20]),
)
token_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(samplings, token_lists, st.integers(0, 2**32)), min_size=1, max_size=5), st.data())
def test_each_row_is_drawn_as_the_oracle_draws_it_whatever_the_batch(
    rows: list[tuple[Sampling, list[int], int]], data: st.DataObject
) -> None:
    spread = data.draw(st.sampled_from([0.01, 1.0, 8.0]))
    logits = torch.stack([torch.from_numpy(np.random.default_rng(k).standard_normal(VOCAB)).float() for *_, k in rows])
    logits *= spread
    before = logits.clone()
    draws = [Draw(s, len(t), history(s, t, len(t) // 2)) for s, t, _ in rows]
    result = sample(logits, draws)
    result.check()
    assert torch.equal(logits, before)
    logprobs = result.logprobs() or [None] * len(rows)
    for i, (s, t, _) in enumerate(rows):
        token, margin = oracle(logits[i].numpy(), s, t, len(t) // 2, len(t))
        if margin > 1e-6:
            assert int(result.tokens[i]) == token
        alone = sample(logits[i : i + 1], [Draw(s, len(t), history(s, t, len(t) // 2))])
        assert int(alone.tokens[0]) == int(result.tokens[i])
        told = logprobs[i]
        assert (told is None) == (s.logprobs < 0)
        if told is not None:
            exact = logits[i].double() - logits[i].double().logsumexp(0)
            assert told.chosen == pytest.approx(float(exact[result.tokens[i]]), abs=1e-4)
            assert [i for i, _ in told.top] == exact.argsort(descending=True)[: s.logprobs].tolist()


@settings(max_examples=50, deadline=None)
@given(token_lists, token_lists)
def test_a_history_that_grew_is_the_history_of_the_whole_list(prompt: list[int], output: list[int]) -> None:
    grown = History(torch.tensor(prompt), len(prompt), VOCAB)
    for token in output:
        grown.add(torch.tensor([token]))
    whole = History(torch.tensor(prompt + output), len(prompt), VOCAB)
    assert torch.equal(grown.seen, whole.seen)
    assert torch.equal(grown.counts, whole.counts)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 3, 30]] = 5.0
    assert int(sample(logits, [Draw(Sampling(), 0)]).tokens[0]) == 3


def test_equal_tokens_stay_or_go_together() -> None:
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, [2, 11, 29]] = 1.0
    for s in (Sampling(temperature=1.0, top_k=1), Sampling(temperature=1.0, top_p=0.1), Sampling(1.0, min_p=1.0)):
        drawn = {int(sample(logits, [Draw(s, n)]).tokens[0]) for n in range(60)}
        assert drawn == {2, 11, 29}, s


def test_draws_are_uniform_and_fixed_for_ever() -> None:
    draws = np.asarray([uniform(seed, n) for seed in range(100) for n in range(200)])
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi square, 19 degrees of freedom, p = 0.0007
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
    assert len(set(draws)) == len(draws)
    # A resumed stream must draw the same in every later version.
    assert [uniform(0, 0), uniform(0, 1), uniform(2**63 - 1, 7)] == PINNED


PINNED = [0.6524484863740322, 0.7012121095215252, 0.6572466933996467]


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(4000, 4)
    s = [Draw(Sampling(temperature=1.0, seed=seed), 5) for seed in range(4000)]
    got = torch.bincount(sample(logits, s).tokens, minlength=4) / 4000
    assert (got - logits[0].softmax(0)).abs().max() < 0.03


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-45, 1e-38, 1e-20])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0])
def test_a_penalty_near_zero_is_no_broken_kernel(penalty: float, temperature: float) -> None:
    """One request with it ended the epoch of its engine three times."""
    s = Sampling(temperature, repetition_penalty=penalty, presence_penalty=2.0, frequency_penalty=2.0)
    logits = torch.arange(VOCAB, dtype=torch.float32)[None] - 20
    drawn = sample(logits, [Draw(s, 3, history(s, [3, 25], 1))])
    drawn.check()
    assert int(drawn.tokens[0]) == 25, "the seen one that was likely before"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_a_fault_that_names_the_row(bad: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 4] = bad
    for s in (Sampling(), Sampling(temperature=1.0, top_p=0.5)):
        with pytest.raises(NotFinite, match=r"\[1\]"):
            sample(logits, [Draw(s, 1)] * 3).check()


def test_a_grammar_admits_only_its_tokens() -> None:
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[[4, 9]] = True
    logits = torch.randn(1, VOCAB)
    for n in range(20):
        for s in (Sampling(), Sampling(temperature=3.0, seed=n)):
            assert int(sample(logits, [Draw(s, n, allowed=allowed)]).tokens[0]) in (4, 9)
