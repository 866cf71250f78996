"""A fault under load: eight streams go on and on, something breaks, a probe asks at once; what was seen is measured.

Used by the tests (`test_faults.py`, which look at order and outcome) and by `bench/faults.py` (it prints the seconds).
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from closeranks.faults import RECORD, read_record
from tests.e2e.reference import NEAR, Expected
from tests.e2e.service import Served

STREAMS = 8
PATIENCE_S = 240.0
GOES_ON_S = 5.0
"""The load goes on for at least so long after the fault."""
RIDES, RESUMES, REFUSES, ENDS = "rides through", "resumes", "refuses new work", "ends with an error"


def as_wanted(wanted: str, seen: str) -> bool:
    """Whether an outcome is the wanted one. Nothing needs to resume where the fault caught no request in its engine."""
    return seen == wanted or (wanted, seen) == (RESUMES, RIDES)


@dataclass
class Answer:
    """What one client saw."""

    error: str = ""
    tokens: list[int] = field(default_factory=list)
    wrong: int = 0
    silence_s: float = 0.0
    """The longest time between two signs of life: a token, a comment, an error, the end."""
    ended: float = 0.0
    """Unix time."""


@dataclass
class Seen:
    """What became of a fault."""

    outcome: str = ""
    detail: str = ""
    detected_s: float | None = None
    """Until the supervisor noticed; None: it did not need to."""
    serving_s: float | None = None
    """Until a request sent right after the fault was answered whole."""
    silence_s: float = 0.0
    wrong: int = 0
    answers: int = 0
    incidents: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    drills: list[str] = field(default_factory=list)
    """Specs of the injected faults that the incidents know of."""
    residue: str = ""
    left: int = 0
    """Processes that outlived the service."""


def expectations(continue_: Callable[[list[int], int], Expected], low: int, high: int, output: int) -> list[Expected]:
    """Eight prompts of different length with their continuations; with the output under 4,000 tokens in all."""
    draw = random.Random(5)
    lengths = (3, 40, 77, 200, 10, 64, 33, 120)
    return [continue_([draw.randrange(low, high) for _ in range(n)], output) for n in lengths]


async def ask(
    session: aiohttp.ClientSession, url: str, e: Expected, count: int = 0, seen: Callable[[], None] | None = None
) -> Answer:
    """Stream one completion to whatever end it has."""
    count = count or len(e.tokens)
    body = {"model": "default", "prompt": e.prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}  # fmt: skip
    answer = Answer()
    last = time.monotonic()
    usage = 0
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status} {await response.text()}"
            else:
                async for line in response.content:
                    now = time.monotonic()
                    answer.silence_s = max(answer.silence_s, now - last)
                    last = now
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        answer.error = chunk["error"]["message"]
                        break
                    usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
                    for choice in chunk["choices"]:
                        if seen:
                            seen()
                        answer.tokens = choice.get("token_ids") or answer.tokens
    except aiohttp.ClientError as error:
        answer.error = f"cut: {error!r}"
    answer.ended = time.time()
    answer.silence_s = max(answer.silence_s, time.monotonic() - last)
    if not answer.error:
        answer.wrong = wrong(answer.tokens, e, count) or int(usage != count)
    return answer


def wrong(tokens: Sequence[int], e: Expected, count: int) -> int:
    """1 if the tokens are not the reference's (near ties excepted), or too many, or too few."""
    for i, (got, wanted) in enumerate(zip(tokens, e.tokens, strict=False)):
        if got != wanted:
            return int(e.gaps[i] >= NEAR or len(tokens) != count)
    return int(len(tokens) != count)


@dataclass
class Drill:
    """One fault in one running service."""

    served: Served
    expected: Sequence[Expected]
    strike: Callable[[Served], None] | None = None
    """What breaks; None: a `--fault` does, and its record says when."""
    poison: Expected | None = None
    probe: bool = True
    """Ask right after the fault."""
    extra: list[Answer] = field(default_factory=list)

    def run(self) -> Seen:
        """Carry it out. Raises TimeoutError if the service does not settle within `PATIENCE_S`."""
        pids = self.served.descendants()
        before = self._resumed()
        answers, struck, probed = asyncio.run(asyncio.wait_for(self._load(), PATIENCE_S))
        seen = Seen(answers=len(answers))
        seen.silence_s = max(a.silence_s for a in answers)
        seen.wrong = sum(a.wrong for a in answers)
        if probed is not None and not probed.error:
            seen.serving_s = probed.ended - struck
        errors = [a.error for a in answers if a.error]
        manifests = [json.loads(p.read_text()) for p in self._incidents()]
        seen.incidents = [p.parent.name for p in self._incidents()]
        seen.reasons = [m["reason"] for m in manifests]
        seen.drills = [entry["spec"] for m in manifests for entry in m.get("drill", [])]
        if manifests:
            seen.detected_s = min(m["detected"] for m in manifests) - struck
        if errors:
            seen.outcome = REFUSES if all(e[:3] in ("429", "503") for e in errors) else ENDS
            seen.detail = f"{len(errors)} of {len(answers)}: {errors[0][:160]}"
        else:
            seen.outcome = RESUMES if self._resumed() > before else RIDES
        try:
            self.served.assert_no_residue()
        except AssertionError as error:
            seen.residue = str(error).splitlines()[0]
        pids += self.served.descendants()
        self.served.stop(90)
        seen.left = sum(Path(f"/proc/{pid}").exists() for pid in set(pids))
        return seen

    def _incidents(self) -> list[Path]:
        return sorted(self.served.run_dir.rglob("incidents/*/manifest.json"), key=lambda p: p.stat().st_mtime)

    def _resumed(self) -> float:
        text = self.served.get("/metrics", 60)[1].decode()
        return sum(float(x.split()[-1]) for x in text.splitlines() if x.startswith("closeranks_resumed_total"))

    async def _load(self) -> tuple[list[Answer], float, Answer | None]:
        over, begun, answers = asyncio.Event(), asyncio.Event(), list[Answer]()
        started: dict[int, None] = {}

        def seen(worker: int) -> None:
            started[worker] = None
            if len(started) == STREAMS:
                begun.set()

        async def worker(session: aiohttp.ClientSession, number: int) -> None:
            turn = number
            while not over.is_set():
                e = self.expected[turn % len(self.expected)]
                turn += 1
                answers.append(await ask(session, self.served.url, e, seen=lambda: seen(number)))
                if answers[-1].error:
                    await asyncio.sleep(0.5)  # a client that was refused does not hammer

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=200)) as session:
            workers = [asyncio.create_task(worker(session, n)) for n in range(STREAMS)]
            await begun.wait()
            if self.poison is not None:
                answers.append(await ask(session, self.served.url, self.poison, 4))
                self.extra.append(answers[-1])
            if self.strike is not None:
                struck = time.time()
                await asyncio.to_thread(self.strike, self.served)
            else:
                struck = await self._record()
            probed = None
            if self.probe:
                await asyncio.sleep(0.05)
                while True:
                    probed = await ask(session, self.served.url, self.expected[0], 4)
                    if not probed.error or time.time() > struck + 90:
                        break
                    await asyncio.sleep(0.2)
                answers.append(probed)
            await asyncio.sleep(max(0.0, struck + GOES_ON_S - time.time()))
            over.set()
            await asyncio.gather(*workers)
        return answers, struck, probed

    async def _record(self) -> float:
        """When the first injected fault acted."""
        until = time.monotonic() + 90
        while time.monotonic() < until:
            for path in self.served.run_dir.rglob(RECORD):
                if read_record(path):
                    return path.stat().st_mtime  # the ranks' own clocks are shifted
            await asyncio.sleep(0.05)
        raise AssertionError(f"the fault was never reached:\n{self.served.tail()}")
