"""A fuzzer of the decoder's properties: coverage-guided where `atheris` is installed, else random mutation.

    python tests/codec/fuzz_decoder.py [CORPUS_DIR] [-max_total_time=1800]     # with atheris
    python tests/codec/fuzz_decoder.py --seconds 60                           # without

Input bytes are read in two ways, chosen by the first one: as the seed and choices of the grammar of damage, so that
coverage steers which accidents happen, or as text over the pieces of markup, so that it steers what they are made of.
pytest runs `mutate` for a minute under the `slow` mark (test_fuzz.py).
"""

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

PIECES = [
    "<",
    "</",
    "｜DSML｜",
    "｜",
    "|DSML|",
    "tool_calls",
    "invoke",
    "parameter",
    ' name="',
    '"',
    ' string="true"',
    ">",
    "\n",
]
PIECES += [
    ' string="false"',
    "/>",
    "<think>",
    "</think>",
    "`",
    "```",
    "\n\n",
    "x",
    " ",
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\\",
    "1",
]
PIECES += [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {',
    "<｜User｜>",
    "DSML",
    "th",
    "ink>",
    "f",
    "calls",
    "é",
]


class Bytes(random.Random):
    """A random generator whose choices are the fuzzer's bytes, and after them zeros."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    def getrandbits(self, k: int) -> int:
        count = (k + 7) // 8
        piece = self._data[self._at : self._at + count].ljust(count, b"\0")
        self._at += count
        return int.from_bytes(piece, "big") >> (8 * count - k)

    def random(self) -> float:
        return self.getrandbits(24) / (1 << 24)


def one_input(data: bytes) -> None:
    """All properties of one fuzzer input."""
    from damage import damaged
    from properties import check, settings_of

    if not data:
        return
    rng = Bytes(data[1:])
    settings = settings_of(rng)
    built = "".join(PIECES[byte % len(PIECES)] for byte in data[9:200])
    check(damaged(rng) if data[0] & 1 else built, random.Random(0), **settings)


def mutate(seconds: float, seed: int) -> int:
    """Random inputs, each most often a mutation of a former one; returns how many were tried."""
    rng = random.Random(seed)
    pool = [rng.randbytes(60)]
    tried = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = bytearray(rng.choice(pool))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 4))
            data = data or bytearray(b"\0")
        if rng.random() < 0.2:
            data = bytearray(rng.randbytes(rng.randint(10, 200)))
        try:
            one_input(bytes(data))
        except Exception as error:
            raise AssertionError(f"input {bytes(data).hex()} (seed {seed})") from error
        tried += 1
        if len(pool) < 500:
            pool.append(bytes(data))
        else:
            pool[rng.randrange(500)] = bytes(data)
    return tried


def main() -> None:
    """Fuzz until told to stop."""
    if "--seconds" in sys.argv:
        seconds = float(sys.argv[sys.argv.index("--seconds") + 1])
        print(f"{mutate(seconds, time.time_ns())} inputs")
        return
    try:
        import atheris  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris, or run with --seconds N")
    with atheris.instrument_imports(include=["closeranks.codec"]):
        import properties  # noqa: F401
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
