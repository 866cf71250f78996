"""The CPU's compiled kernels against plain torch, over any shapes, page tables and numbers of threads."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closeranks.engine.rank.kernels import choose
from closeranks.engine.rank.kernels.packed import PackedLinear
from closeranks.engine.rank.kernels.plain import PackedKernels, PlainKernels
from closeranks.engine.rank.models.batch import Batch, make_batch

team = pytest.importorskip("closeranks.engine.rank.kernels.team")
if team.runtime() is None:
    pytest.skip("torch brings no GNU-compatible OpenMP runtime here", allow_module_level=True)
from closeranks.engine.rank.kernels.cpu import CpuKernels  # noqa: E402

torch.set_num_threads(1)
ONE, TWO = CpuKernels(1), CpuKernels(2)


def random_batch(rng: np.random.Generator, rows: list[tuple[int, int]], page_size: int, pages: int) -> Batch:
    """Rows (start, count) with page tables that share no page."""
    starts, counts = (np.asarray(x, np.int32) for x in zip(*rows, strict=True))
    widths = -(-(starts + counts) // page_size)
    order = rng.permutation(pages)[: widths.sum()].astype(np.int32)
    table = np.zeros((len(rows), widths.max()), np.int32)
    for r, at in enumerate(np.cumsum(widths) - widths):
        table[r, : widths[r]] = order[at : at + widths[r]]
    return make_batch(starts, counts, table, page_size, torch.zeros(int(counts.sum()), dtype=torch.int32), [])


rows_of = st.lists(
    st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.just(1), st.integers(1, 40))), min_size=1, max_size=7
)


@settings(max_examples=50, deadline=None)
@given(
    rows=rows_of,
    kv=st.integers(1, 4),
    group=st.integers(1, 4),
    dim=st.sampled_from([2, 8, 20, 64]),
    page_size=st.sampled_from([1, 3, 4, 16, 32]),
    layers=st.integers(1, 3),
    seed=st.integers(0, 2**32),
    kernels=st.sampled_from([ONE, TWO]),
)
def test_attention_is_that_of_plain_torch_and_leaves_the_same_pool(
    rows: list[tuple[int, int]], kv: int, group: int, dim: int, page_size: int, layers: int, seed: int,
    kernels: CpuKernels,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    pages = sum(-(-(s + c) // page_size) for s, c in rows) + 3
    pool = torch.randn(pages, kv, layers, 2, page_size, dim)
    reference_pool = pool.clone()
    inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim)
    batch, same = random_batch(rng, rows, page_size, pages), None
    heads = kv * group
    for layer in range(layers):
        qkv = torch.randn(int(batch.offsets[-1]), (heads + 2 * kv) * dim)
        if layer == 0:
            same = random_batch(np.random.default_rng(seed), rows, page_size, pages)
            kernels.rotation(batch, inv_freq)
            PlainKernels().rotation(same, inv_freq)
        assert same is not None
        expected = PlainKernels().attend(qkv.clone(), heads, reference_pool, layer, same)
        torch.testing.assert_close(kernels.attend(qkv, heads, pool, layer, batch), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(pool, reference_pool, atol=1e-5, rtol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(1, 700), st.integers(0, 2**32), st.sampled_from([ONE, TWO]))
def test_norms_and_activation_are_those_of_plain_torch(rows: int, width: int, seed: int, kernels: CpuKernels) -> None:
    torch.manual_seed(seed)
    x, delta, weight = torch.randn(rows, width) * 3, torch.randn(rows, width), torch.rand(width)
    plain = PlainKernels()
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    mine, theirs = x.clone(), x.clone()
    result = kernels.add_rms_norm(mine, delta, weight, 1e-6)
    torch.testing.assert_close(result, plain.add_rms_norm(theirs, delta, weight, 1e-6))
    torch.testing.assert_close(mine, theirs, atol=0, rtol=0)
    both = torch.randn(rows, 2 * width) * 20
    torch.testing.assert_close(kernels.silu_mul(both), plain.silu_mul(both), atol=1e-6, rtol=1e-5)


def test_what_is_broken_stays_visible() -> None:
    x = torch.ones(2, 16)
    x[1, 3] = float("nan")
    assert ONE.rms_norm(x, torch.ones(16), 1e-5).isnan().any(dim=1).tolist() == [False, True]
    assert ONE.silu_mul(x).isnan().any(dim=1).tolist() == [False, True]
    pool = torch.randn(4, 1, 1, 2, 4, 8)
    pool[2, 0, 0, 1, 1] = float("nan")
    batch = make_batch(
        np.asarray([5, 5], np.int32), np.asarray([1, 1], np.int32), np.asarray([[0, 1], [2, 3]], np.int32), 4,
        torch.zeros(2, dtype=torch.int32), [],
    )  # fmt: skip
    ONE.rotation(batch, torch.ones(4))
    out = ONE.attend(torch.randn(2, 3 * 8), 1, pool, 0, batch)
    assert out.isnan().any(dim=1).tolist() == [False, True]


def test_scores_may_be_far_apart() -> None:
    """Softmax without overflow: one key outweighs the others by thousands."""
    pool = torch.zeros(2, 1, 1, 2, 4, 8)
    pool[0, 0, 0, 0, 1] = 1000.0
    pool[0, 0, 0, 1, 1] = 7.0
    one = np.asarray([3], np.int32)
    batch = make_batch(one, np.asarray([1], np.int32), np.asarray([[0]], np.int32), 4, torch.zeros(1).int(), [])
    ONE.rotation(batch, torch.zeros(4))
    out = ONE.attend(torch.cat([torch.full((1, 8), 50.0), torch.zeros(1, 16)], 1), 1, pool, 0, batch)
    torch.testing.assert_close(out, torch.full((1, 8), 7.0))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(96, 64), (7, 5), (1, 1), (1000, 33)])
def test_packed_weights_serve_any_number_of_rows(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(1)
    weight, b = torch.randn(shape), torch.randn(shape[0]) if bias else None
    packed = PackedLinear(weight, b)
    for rows in (1, 2, 3, 8, 17, 64, 200, 1):
        x = torch.randn(rows, shape[1])
        torch.testing.assert_close(packed(x), torch.nn.functional.linear(x, weight, b), atol=1e-4, rtol=1e-4)


def test_ranks_in_threads_do_not_disturb_each_other() -> None:
    """Teams of OpenMP threads belong to the thread that starts them."""
    x, weight = torch.randn(512, 128), torch.rand(128)
    expected = PlainKernels().rms_norm(x, weight, 1e-5)
    wrong: list[int] = []

    def work(i: int) -> None:
        kernels = CpuKernels(2)
        for _ in range(50):
            if not torch.allclose(kernels.rms_norm(x, weight, 1e-5), expected, atol=1e-5):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_the_choice_follows_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert type(choose(cpu, torch.float32, 1)) is CpuKernels
    assert type(choose(cpu, torch.bfloat16, 1)) is PackedKernels
    assert type(choose(torch.device("cuda"), torch.bfloat16, 1)) is PlainKernels
    monkeypatch.setattr(team, "runtime", lambda: None)
    assert type(choose(cpu, torch.float32, 1)) is PackedKernels


@pytest.mark.slow
def test_a_second_process_takes_the_compiled_code_from_disk() -> None:
    """A second start must not compile: that would take seconds."""
    code = (
        "import torch\n"
        "from closeranks.engine.rank.kernels import cpu, team\n"
        "cpu.CpuKernels(1)\n"
        "print(*[job.cache_hits for job in team._kept])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1"] * 4
