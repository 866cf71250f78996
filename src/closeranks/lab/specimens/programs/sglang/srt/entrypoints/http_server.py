"""SGLang's HTTP face: /health with a real probe of the loop, /metrics, /v1/loads, /server_info."""

import argparse
import asyncio
import json
import secrets
import threading
import time
import urllib.request
from logging import Logger
from multiprocessing.process import BaseProcess
from typing import Any

import zmq

from closeranks.lab.specimens.stage import STRIKE_AT, Stage
from closeranks.lab.specimens.stand_in import JSON, TEXT, Answer, Posts, Routes, StandIn, watch_children

HEALTH_CHECK_TIMEOUT = 2.0
FEED_SECONDS = 0.2
GAUGES = {
    "num_running_reqs": "running",
    "num_queue_reqs": "queued",
    "num_prefill_bootstrap_queue_reqs": "bootstrap",
    "num_prefill_inflight_queue_reqs": "inflight",
    "num_decode_prealloc_queue_reqs": "prealloc",
    "num_decode_transfer_queue_reqs": "transfer",
    "num_paused_reqs": "paused",
}
COUNTERS = {
    "generation_tokens_total": "generated",
    "prompt_tokens_total": "prompted",
    "num_requests_total": "finished",
    "scheduler_idle_seconds_total": "idle_seconds",
}


class HttpServer:
    """The launcher's answers."""

    def __init__(self, stage: Stage, args: argparse.Namespace, logger: Logger) -> None:
        self.stage, self.args, self.logger = stage, args, logger

    async def health(self) -> Answer:
        """200 once rank 0's loop has turned after the probe came, 503 after the timeout."""
        began = time.time()
        if self.stage.specimen.health_is_a_flag:
            return 200, JSON, ""
        while time.time() - began < HEALTH_CHECK_TIMEOUT:
            if self.stage.board.get(0, "heartbeat") > began:
                return 200, JSON, ""
            await asyncio.sleep(0.05)
        clock = "%H:%M:%S"
        self.logger.error(
            "Health check failed. Server couldn't get a response from detokenizer for last %d seconds. tic start "
            "time: %s. last_heartbeat time: %s",
            HEALTH_CHECK_TIMEOUT,
            time.strftime(clock, time.localtime(began)),
            time.strftime(clock, time.localtime(self.stage.board.get(0, "heartbeat"))),
        )
        return 503, JSON, ""

    def metrics(self) -> Answer:
        board, lines = self.stage.board, []
        engine = {"null": "unified"}.get(self.args.disaggregation_mode, self.args.disaggregation_mode)
        for rank in range(self.stage.world):
            labels = f'engine_type="{engine}",model_name="m",pp_rank="0",tp_rank="{rank}"'
            lines += [f"sglang:{name}{{{labels}}} {board.get(rank, field)}" for name, field in GAUGES.items()]
            lines += [f"sglang:{name}{{{labels}}} {board.get(rank, field):.3f}" for name, field in COUNTERS.items()]
            busy = board.get(rank, "loop_seconds")
            lines.append(f'sglang:scheduler_stage_seconds_total{{category="other",{labels}}} {busy:.3f}')
        return 200, TEXT, "\n".join(lines) + "\n"

    def loads(self) -> Answer:
        board = self.stage.board
        load = {
            "dp_rank": 0,
            "timestamp": board.get(0, "heartbeat"),
            "num_running_reqs": int(board.get(0, "running")),
            "num_waiting_reqs": int(board.get(0, "queued")),
            "disaggregation": {
                "mode": self.args.disaggregation_mode,
                "prefill_bootstrap_queue_reqs": int(board.get(0, "bootstrap")),
                "prefill_inflight_queue_reqs": int(board.get(0, "inflight")),
                "decode_prealloc_queue_reqs": int(board.get(0, "prealloc")),
                "decode_transfer_queue_reqs": int(board.get(0, "transfer")),
            },
        }
        return 200, JSON, json.dumps({"timestamp": time.time(), "dp_rank_count": 1, "loads": [load]})

    def server_info(self) -> Answer:
        return 200, JSON, json.dumps({**vars(self.args), "version": "0.5.13.post1"})

    def dump_flight_recorder(self) -> Answer:
        self.stage.dump_flight_recorder.set()
        return 200, JSON, ""


class Requests:
    """Requests that came over HTTP: into the entry rank, and out of it again through the detokenizer.

    `rooms` maps a request's id to its room. A stopped rank, detokenizer or loop leaves them unanswered.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage, self.rooms, self.waiting = stage, dict[str, int](), dict[int, "asyncio.Future[int]"]()
        context = zmq.Context()
        self.send_to_scheduler = context.socket(zmq.PUSH)
        self.send_to_scheduler.connect(f"ipc://{stage.folder}/scheduler.ipc")
        self.recv_from_detokenizer = context.socket(zmq.PULL)
        self.recv_from_detokenizer.bind(f"ipc://{stage.folder}/tokenizer.ipc")

    def take(self, loop: asyncio.AbstractEventLoop) -> None:
        """Side thread: hands what comes from the detokenizer to the loop."""
        while True:
            loop.call_soon_threadsafe(self.came, json.loads(self.recv_from_detokenizer.recv()))

    def came(self, message: dict[str, int]) -> None:
        future = self.waiting.pop(message["room"], None)
        if future is not None and not future.done():
            future.set_result(message["tokens"])

    async def tokens(self, body: dict[str, Any], wanted: int) -> int:
        """Run one request; the tokens that came of it."""
        room = int(body.get("bootstrap_room") or secrets.randbits(62))
        self.rooms[str(body.get("rid", room))] = room
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.waiting[room] = future
        self.send_to_scheduler.send_json({"kind": "generate", "reqs": [{"room": room, "tokens": wanted}]})
        return await future

    async def generate(self, body: dict[str, Any]) -> Answer:
        """SGLang's own endpoint."""
        count = await self.tokens(body, int(body.get("sampling_params", {}).get("max_new_tokens", 16)))
        meta = {"id": body.get("rid"), "completion_tokens": count, "finish_reason": {"type": "length", "length": count}}
        return 200, JSON, json.dumps({"text": " a" * count, "meta_info": meta})

    async def completions(self, body: dict[str, Any]) -> Answer:
        """OpenAI's endpoint."""
        count = await self.tokens(body, int(body.get("max_tokens", 16)))
        choice = {"index": 0, "text": " a" * count, "finish_reason": "length"}
        return 200, JSON, json.dumps({"choices": [choice], "usage": {"completion_tokens": count}})

    def abort(self, body: dict[str, Any]) -> Answer:
        """By the beginning of the id, or all."""
        everyone = bool(body.get("abort_all"))
        rooms = [room for rid, room in self.rooms.items() if everyone or rid.startswith(str(body.get("rid")))]
        for room in rooms:
            self.send_to_scheduler.send_json({"kind": "abort", "room": room})
        return 200, JSON, ""


class TokenizerManager:
    """Gives the entry rank its work, as clients would, and holds the way in which the frontend can freeze."""

    def __init__(self, stage: Stage, silent_port: int) -> None:
        self.stage, self.silent_port = stage, silent_port
        self.send_to_scheduler = zmq.Context().socket(zmq.PUSH)
        self.send_to_scheduler.connect(f"ipc://{stage.folder}/scheduler.ipc")

    def load_image(self) -> None:
        """A blocking fetch on the event loop."""
        self.stage.tell("onset", None, fault="frontend_blocks")
        with urllib.request.urlopen(f"http://127.0.0.1:{self.silent_port}/image.png") as answer:
            answer.read()

    def feed(self, stand_in: StandIn) -> None:
        """Side thread: a batch of requests now and then, until the specimen's fault is due."""
        spec, room, tick = self.stage.specimen, 1000, threading.Event()
        due, sent = STRIKE_AT + 5, 0
        while spec.load and self.stage.board.get(0, "iteration") < due + STRIKE_AT:
            tick.wait(FEED_SECONDS)
            if not spec.batches or sent < spec.batches:
                reqs = [{"room": room + n} for n in range(spec.load)]
                room, sent = room + spec.load, sent + 1
                self.send_to_scheduler.send_json({"kind": "generate", "reqs": reqs})
            if self.stage.board.get(0, "iteration") < due:
                continue
            if spec.fault == "paused":
                self.send_to_scheduler.send_json({"kind": "pause_generation"})
                return
            if spec.fault == "frontend_blocks" and stand_in.loop is not None:
                stand_in.loop.call_soon_threadsafe(self.load_image)
                return


def launch_http_server(
    stage: Stage, args: argparse.Namespace, children: list[BaseProcess], silent_port: int, logger: Logger
) -> None:
    """Serve until the process is ended. After a child's death the port accepts and nothing answers."""
    server, tokenizer = HttpServer(stage, args, logger), TokenizerManager(stage, silent_port)
    routes: Routes = {
        "/health": lambda: asyncio.ensure_future(server.health()),
        "/health_generate": lambda: asyncio.ensure_future(server.health()),
        "/metrics": server.metrics,
        "/v1/loads": server.loads,
        "/server_info": server.server_info,
        "/get_server_info": server.server_info,
        "/dump_flight_recorder": server.dump_flight_recorder,
    }
    requests = Requests(stage)
    models = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]})
    routes["/v1/models"] = lambda: (200, JSON, models)
    posts: Posts = {
        "/generate": lambda body: asyncio.ensure_future(requests.generate(body)),
        "/v1/completions": lambda body: asyncio.ensure_future(requests.completions(body)),
        "/abort_request": requests.abort,
    }
    stand_in = StandIn(stage, logger, routes, posts)

    def on_death(name: str, pid: int, code: int) -> None:
        logger.error(
            "Subprocess %s (pid=%d) crashed with exit code %d. Triggering SIGQUIT for cleanup...", name, pid, code
        )
        logger.error("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        stand_in.silent = True
        stage.tell("child_died", None, name=name, exit_code=code)

    def run() -> None:
        ready = threading.Event()
        while stage.board.get(0, "iteration") < 1:
            ready.wait(0.05)
        logger.info("The server is fired up and ready to roll!")
        assert stand_in.loop is not None
        threading.Thread(target=requests.take, args=(stand_in.loop,), daemon=True).start()
        tokenizer.feed(stand_in)

    watch_children(children, on_death)
    threading.Thread(target=run, name="client", daemon=True).start()
    asyncio.run(stand_in.serve())
