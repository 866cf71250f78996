"""Tokens per second over HTTP beside vLLM's CPU build and `transformers`, interleaved in one run.

    python bench/serve_throughput.py --model FOLDER [--vllm VENV] [--limit] [--rounds 3] [--concurrency 1 8 32]

Same weights (a Hugging Face folder in fp32), same prompts (random token ids, new ones each round, so that no prefix
cache helps), 128 tokens in and 128 out, greedy, end-of-sequence ignored, 2 threads each. One peer works at a time, in
turn, while the others idle; medians over the rounds. `transformers` runs `generate` on the whole batch in a process of
its own, without HTTP; with --limit so do the packed linear layers alone, which nothing built on them can pass. Prints
one Markdown table; the ratio is closeranks over the better peer.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

HERE = Path(__file__).parent
LIMIT = "linear layers only"
TRANSFORMERS = """
import json, sys, time, torch
from transformers import LlamaForCausalLM
torch.set_num_threads(int(sys.argv[2]))
model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    ids = torch.tensor(job["prompts"])
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["count"],
                       min_new_tokens=job["count"], do_sample=False, pad_token_id=2)
    print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """An OpenAI server as a child process; `measure` sends a batch at once and waits for all of it."""

    def __init__(self, name: str, argv: list[str], port: int, model: str, env: dict[str, str]) -> None:
        self.name, self.argv, self.port, self.model = name, argv, port, model
        self.log = tempfile.NamedTemporaryFile("wb", prefix=f"bench-{name}-", suffix=".log", delete=False)  # noqa: SIM115
        self.process = subprocess.Popen(
            argv, stdout=self.log, stderr=self.log, env={**os.environ, **env}, start_new_session=True
        )

    async def ready(self, path: str, limit_s: float = 240) -> None:
        until = time.monotonic() + limit_s
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < until:
                if self.process.poll() is not None:
                    raise SystemExit(f"{self.name} ended with {self.process.returncode}, see {self.log.name}")
                try:
                    async with session.get(f"http://127.0.0.1:{self.port}{path}") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.5)
        raise SystemExit(f"{self.name} was not ready in {limit_s} s, see {self.log.name}")

    async def measure(self, prompts: list[list[int]], count: int) -> float:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:
            begin = time.perf_counter()
            await asyncio.gather(*(self._one(session, prompt, count) for prompt in prompts))
            return time.perf_counter() - begin

    async def _one(self, session: aiohttp.ClientSession, prompt: list[int], count: int) -> None:
        body = {"model": self.model, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        usage = None
        async with session.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise SystemExit(f"{self.name}: {answer.status} {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    usage = json.loads(line[6:]).get("usage") or usage
        if not usage or usage["completion_tokens"] != count:
            raise SystemExit(f"{self.name}: asked for {count} tokens, got usage {usage}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


class Piped:
    """A peer that is told its batches on stdin and answers with seconds."""

    def __init__(self, name: str, argv: list[str], shown: list[str] | None = None) -> None:
        self.name, self.argv = name, shown or argv
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    async def ready(self) -> None:
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        if line.strip() != "ready":
            raise SystemExit(f"{self.name} did not start")

    async def measure(self, prompts: list[list[int]], count: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "count": count}) + "\n")
        self.process.stdin.flush()
        return float(json.loads(await asyncio.to_thread(self.process.stdout.readline))["seconds"])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def prompts(concurrency: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100, 40000) for _ in range(length)] for _ in range(concurrency)]


async def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vllm", help="virtual environment with vLLM's CPU build; left out: not measured")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--limit", action="store_true", help="the linear layers alone take turns with the peers, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="further flags of closeranks serve")
    args = parser.parse_args()
    port, folder = free_port(), tempfile.mkdtemp(prefix="crb-")
    own = [sys.executable, "-m", "closeranks.cli.main", "serve", "--disaggregation-mode", "null"]
    own += ["--model-path", args.model, "--port", str(port), "--run-dir", folder, "--threads", str(args.threads)]
    own += args.flags
    peers: list[Server | Piped] = [Server("closeranks", own, port, "default", {})]
    await peers[0].ready("/ready")  # type: ignore[call-arg]
    try:
        if args.vllm:
            vport = free_port()
            argv = [f"{args.vllm}/bin/vllm", "serve", args.model, "--port", str(vport), "--host", "127.0.0.1"]
            argv += ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--served-model-name", "m"]
            env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(args.threads)}
            peers.append(Server("vllm", argv, vport, "m", env))
            await peers[-1].ready("/health")  # type: ignore[call-arg]
        if not args.no_transformers:
            code = [sys.executable, "-c", TRANSFORMERS, args.model, str(args.threads)]
            shown = [sys.executable, "-c", "(see TRANSFORMERS in this file)", args.model, str(args.threads)]
            peers.append(Piped("transformers", code, shown))
            await peers[-1].ready()  # type: ignore[call-arg]
        if args.limit:
            argv = [sys.executable, str(HERE / "model_limits.py"), "--jobs", "--threads", str(args.threads)]
            peers.append(Piped(LIMIT, [*argv, "--model-path", args.model]))
            await peers[-1].ready()  # type: ignore[call-arg]
        await compare(peers, args)
    finally:
        for peer in peers:
            peer.stop()


async def compare(peers: list[Server | Piped], args: argparse.Namespace) -> None:
    for peer in peers:
        print(f"# {peer.name}: {' '.join(peer.argv)}", file=sys.stderr)
        await peer.measure(prompts(1, 16, 1), 4)
    names = [peer.name for peer in peers]
    print("| concurrency | what | " + " | ".join(names) + " | ratio to the better peer | of the limit |")
    print("|---|---|" + "---|" * (len(names) + 2))
    for concurrency in args.concurrency:
        seconds: dict[tuple[str, str], list[float]] = {}
        for r in range(args.rounds):
            for peer in peers:
                for what, count in (("prefill", 1), ("all", args.output)):
                    batch = prompts(concurrency, args.input, hash((r, concurrency, what)) & 0xFFFF)
                    taken = await peer.measure(batch, count)
                    seconds.setdefault((peer.name, what), []).append(taken)
                    print(f"# round {r} concurrency {concurrency} {peer.name} {what}: {taken:.2f} s", file=sys.stderr)
        median = {key: statistics.median(values) for key, values in seconds.items()}
        for what, row in (
            (
                "decode, tokens/s",
                {n: concurrency * (args.output - 1) / (median[n, "all"] - median[n, "prefill"]) for n in names},
            ),
            ("prefill, tokens/s", {n: concurrency * args.input / median[n, "prefill"] for n in names}),
            ("output over all, tokens/s", {n: concurrency * args.output / median[n, "all"] for n in names}),
        ):
            others = [row[n] for n in names[1:] if n != LIMIT]
            ratio = f"{row[names[0]] / max(others):.2f}" if others else "-"
            share = f"{row[names[0]] / row[LIMIT]:.0%}" if LIMIT in row else "-"
            figures = " | ".join(f"{row[n]:.1f}" for n in names)
            print(f"| {concurrency} | {what} | {figures} | {ratio} | {share} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
