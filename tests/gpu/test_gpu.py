"""What only a machine with a CUDA device can show (`make gpu`, within 5 minutes): exactness, overlap, checksums, NIXL.

Figures are printed (`-s`), the tests judge correctness only.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import pytest
import torch

from tests.e2e import exactness, tiny
from tests.e2e.reference import Expected, Reference, Tally
from tests.e2e.service import Served, serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = ("--device", "cuda", "--dtype", "float32", "--num-pages", 2000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[Sequence[Expected]]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    reference = Reference(model)
    yield [reference.continue_(prompt, exactness.OUTPUT) for prompt in exactness.prompts()]
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("overlap", [(), ("--disable-overlap-schedule",)], ids=["overlap", "no overlap"])
@pytest.mark.parametrize(
    "mode",
    [("--disaggregation-mode", "null"), ("--disaggregation-transfer-backend", "nixl")],
    ids=["both", "pair, NIXL from device memory"],
)
def test_exactness(mode: tuple[str, ...], overlap: tuple[str, ...], model: Path, expected: Sequence[Expected]) -> None:
    tally = Tally()
    with serve(model, *DEVICE, *mode, *overlap) as served:
        asyncio.run(exactness.hold_against(served, expected, tally, 1))
        asyncio.run(exactness.hold_against(served, expected, tally, exactness.AT_ONCE))
        served.assert_undisturbed()
        served.assert_no_residue()
    tally.check()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_exactness_over_two_devices(model: Path, expected: Sequence[Expected]) -> None:
    """A GPU per rank, NCCL between them; where there are four, decode has its own two."""
    tally = Tally()
    with serve(model, *DEVICE, "--tp-size", 2, "--disaggregation-transfer-backend", "nixl") as served:
        asyncio.run(exactness.hold_against(served, expected, tally, exactness.AT_ONCE))
        served.assert_undisturbed()
        served.assert_no_residue()
    tally.check()


def tokens_per_second(served: Served, rows: int, count: int) -> float:
    async def main() -> float:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=200)) as session:
            begin = time.perf_counter()
            asked = [exactness.complete(session, served.url, [5 + i] * 64, count) for i in range(rows)]
            await asyncio.gather(*asked)
            return rows * count / (time.perf_counter() - begin)

    asyncio.run(main())  # warm
    return asyncio.run(main())


def test_overlap_gain() -> None:
    rates = {}
    for name, flags in (("on", ()), ("off", ("--disable-overlap-schedule",))):
        with serve("", *DEVICE, "--disaggregation-mode", "null", *flags) as served:
            rates[name] = tokens_per_second(served, 8, 200)
    print(f"\noverlap on {rates['on']:.0f} tokens/s, off {rates['off']:.0f}: x {rates['on'] / rates['off']:.2f}")


def test_checksum_cost() -> None:
    from closeranks.engine.rank import checksum

    block = torch.randint(0, 255, (64 << 20,), dtype=torch.uint8, device="cuda")
    other = block.clone()
    first = checksum.mix64(block)
    assert first == checksum.mix64(other)
    other[12345] ^= 1
    assert first != checksum.mix64(other)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        checksum.mix64(block)
    torch.cuda.synchronize()
    print(f"\nchecksum of device memory: {20 * 64 / 1024 / (time.perf_counter() - begin):.0f} GiB/s")
