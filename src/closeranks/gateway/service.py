"""The gateway as one object: model, links, open requests, the tick. HTTP stands in front of it, leaders behind."""

import asyncio
import math
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
import zmq

from closeranks.faults import RECORD, injector
from closeranks.gateway import engines, health, model
from closeranks.gateway.choice import Choice
from closeranks.gateway.decoded import DecodedChoice
from closeranks.gateway.errors import Busy, Conflict, Invalid, Unavailable
from closeranks.gateway.metrics import Metrics
from closeranks.gateway.reply import Reply
from closeranks.gateway.resume import End, Request, Requests
from closeranks.gateway.router import Router
from closeranks.gateway.seen import Seen
from closeranks.gateway.settings import Settings
from closeranks.protocol import FromEngine, Output, Sampling

TICK_S = 0.1
ATTACH_S = 1.0

log = structlog.get_logger()


class Gateway:
    """All of the gateway but HTTP. Made and used in one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = time.monotonic
        self.began = self.clock()
        self.started = time.time()
        self.router = Router(settings.prefill, settings.decode, settings.both, settings.engine_silence_s)
        self.requests = Requests(self.router, engine_wait_s=settings.engine_wait_s)
        self.metrics = Metrics(self.router, self.requests, self.clock)
        self.replies: dict[str, Reply] = {}
        self.faults = injector(settings.fault, Path(settings.run_dir) / RECORD)
        self.draining = False
        self.incoming = 0
        """Bytes of bodies that have not come in whole."""
        self.model: model.Model | None = None
        self.model_error = "the model is not loaded yet"
        self._usable = -math.inf
        """When a pair of engines was last seen usable: for a while after, requests are taken on and wait. A gateway in
        place of one that saw a pair begins as if it had seen it too: what is not there now, is recovering."""
        self._seen = Seen(Path(settings.run_dir))
        if self._seen.before():
            self._usable = self.began
        self._resumed = 0
        self._ready = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: dict[str, engines.Link] = {}
        self._idle = asyncio.Event()
        self._tick: asyncio.Task[None] | None = None

    # ---- life

    def start(self) -> None:
        """Connect to the leaders. Raises CurveKeyError, ModelError (a chat template file that cannot be used)."""
        self._load_model()
        name = f"gateway-{secrets.token_hex(8)}"
        for endpoint in self.router.engines:
            self._links[endpoint] = engines.Link(self._context, endpoint, name, self, self.settings.curve_key_file)
        self._tick = asyncio.get_running_loop().create_task(self._run())

    def turning(self) -> asyncio.Task[None]:
        """What keeps time, from `start` to `stop`. That it ends before is a fault of this program."""
        assert self._tick is not None
        return self._tick

    async def drain(self) -> None:
        """Take nothing new; let what is open go on for `drain_s`, then end it."""
        self.draining = True
        if not self.replies:
            self._idle.set()
        log.info("gateway drains", open=len(self.requests.open), seconds=self.settings.drain_s)
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("open requests are ended", open=len(self.requests.open))
        for request_id in list(self.requests.open):
            self.requests.end(request_id, End("shutdown", "the service is shutting down"))
        self._flush()

    def hurry(self) -> None:
        """Do not wait for open requests any longer."""
        self._idle.set()

    async def stop(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
            await asyncio.gather(self._tick, return_exceptions=True)
        for link in self._links.values():
            link.close()
        self._seen.forget()
        self._context.term()  # within the links' linger: the last aborts are on their way

    # ---- requests

    def admit(self, rid: str, choices: int) -> model.Model:
        """Whether a request of that many choices can be taken on. Raises Unavailable, Busy, Conflict, Invalid."""
        if self.draining:
            raise Unavailable("the service is shutting down", retry_after_s=5.0)
        if self.model is None:
            raise Unavailable(self.model_error, retry_after_s=2.0)
        now = self.clock()
        if not self.router.pairs(now) and now - self._usable > self.settings.engine_wait_s:
            reasons = health.ready(self.router, False, "", now).reasons
            raise Unavailable(f"no engine is up: {'; '.join(reasons)}", code="not_ready", retry_after_s=2.0)
        if rid in self.replies:
            raise Conflict(f"a request with id {rid} is open", param="rid")
        most = self.settings.max_open_requests
        if choices > most:  # to come again later would not help
            said = f"{choices} choices in all; no more than {most} requests are open here at a time"
            raise Invalid(said, param="n", code="out_of_range")
        if len(self.requests.open) + choices > most:
            said = f"{len(self.requests.open)} requests are open and {most} allowed"
            raise Busy(said, retry_after_s=1.0)
        return self.model

    def limit(self) -> int:
        """Longest prompt + output; 0: unknown."""
        known = [n for n in (self.router.limit(), self.model.context_length if self.model else 0) if n]
        return min(known, default=0)

    def open(self, reply: Reply) -> None:
        """Make the reply known under its id, so that no second one takes it."""
        self.replies[reply.rid] = reply
        reply.written = self.clock()
        self.metrics.prompt_tokens.inc(reply.prompt_tokens)

    def submit(
        self,
        reply: Reply,
        choice: Choice,
        tokens: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop_ids: list[int],
    ) -> None:
        """Start one choice of an open reply."""
        choice.request_id = secrets.randbits(63)
        reply.add(choice)
        now = self.clock()
        request = Request(
            id=choice.request_id,
            rid=reply.rid if choice.index == 0 else f"{reply.rid}-{choice.index}",
            tokens=list(tokens),
            prompt_length=len(tokens),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=stop_ids,
            deadline=reply.timing.began + self.settings.request_timeout_s,
            sink=choice,
        )
        self.requests.start(request, now)
        self._flush()
        if self.faults is not None:
            self.faults.act("gateway.request", rid=request.rid)

    def close(self, reply: Reply, endpoint: str, status: int) -> None:
        """The HTTP side is over: whatever is still open of the reply is aborted on both sides."""
        for choice in reply.choices:
            self.requests.abort(choice.request_id, "client")
        self._flush()
        self.replies.pop(reply.rid, None)
        if self.draining and not self.replies:
            self._idle.set()
        now = self.clock()
        for choice in reply.choices:
            if isinstance(choice, DecodedChoice):
                for reason, characters in choice.discarded.items():
                    self.metrics.discarded.labels(reason).inc(characters)
        timing = reply.timing
        if reply.gone:
            self.metrics.disconnects.inc()
        self.metrics.http.labels(endpoint, str(status)).inc()
        self.metrics.whole.observe(now - timing.began)
        if timing.first:
            self.metrics.first.observe(timing.first - timing.began)
            if timing.last > timing.first and reply.output_tokens > len(reply.choices):
                per_choice = reply.output_tokens / len(reply.choices)
                self.metrics.per_token.observe((timing.last - timing.first) / (per_choice - 1))
        log.info(
            "request",
            rid=reply.rid,
            endpoint=endpoint,
            status=status,
            prompt_tokens=reply.prompt_tokens,
            output_tokens=reply.output_tokens,
            first_token_s=round(timing.first - timing.began, 4) if timing.first else None,
            seconds=round(now - timing.began, 4),
            ended=",".join(str(choice.finish_reason) for choice in reply.choices),
            error=reply.error.code if reply.error else None,
        )

    def abort(self, rid: str) -> bool:
        """End the request with exactly this id; its client is told. False: there is none."""
        reply = self.replies.get(rid)
        if reply is None:
            return False
        for choice in reply.choices:
            self.requests.end(choice.request_id, End("abort"))
        self._flush()
        return True

    # ---- leaders

    def on_message(self, endpoint: str, message: FromEngine) -> None:
        now = self.clock()
        if isinstance(message, Output):
            self.requests.on_output(endpoint, message, now)
        else:
            before = self.router.engines[endpoint].status
            self.requests.on_status(endpoint, message, now)
            if before is None or (before.instance, before.state) != (message.instance, message.state):
                said = {"engine": message.engine, "state": message.state, "epoch": message.epoch}
                log.info("engine", **said, detail=message.detail)
        self._flush()

    def on_link_lost(self, endpoint: str) -> None:
        status = self.router.engines[endpoint].status
        log.warning("connection to a leader broke", endpoint=endpoint, engine=status.engine if status else None)
        self.requests.on_link_lost(endpoint, self.clock())
        self._flush()

    # ---- inside

    def cut_off(self, request_id: int) -> None:
        """A choice has all that it needs (a stop string, its one call)."""
        self.requests.abort(request_id, "stop")

    def _flush(self) -> None:
        outbox = self.requests.outbox
        if outbox:
            self.requests.outbox = []
            for endpoint, message in outbox:
                self._links[endpoint].send(message)

    def _load_model(self) -> None:
        settings = self.settings
        try:
            name, template = settings.served_model_name, settings.chat_template
            self.model = model.load(settings.model_dir, name, template, settings.dialect)
            self.router.tokenizer = self.model.tokenizer_hash
            self.model_error = ""
        except model.ModelError as error:
            if str(error) != self.model_error:
                log.warning("model folder cannot be used yet", error=str(error))
            self.model_error = str(error)

    async def _run(self) -> None:
        attached = -math.inf
        while True:
            now = self.clock()
            if now - attached >= ATTACH_S:
                attached = now
                for link in self._links.values():
                    link.attach()
                if self.model is None:
                    self._load_model()
            for link in self._links.values():
                link.poll()  # after a pause of this process: first what came meanwhile, then the judgement of silence
            self.requests.on_time(now)
            self._flush()
            usable = bool(self.router.pairs(now))
            if usable:
                self._usable = now
            self._say_ready(usable and self.model is not None)
            self._say_resumed()
            for reply in list(self.replies.values()):
                self._tend(reply, now)
            await asyncio.sleep(TICK_S)

    def _say_ready(self, ready: bool) -> None:
        if ready == self._ready:
            return
        self._ready = ready
        name = self.model.name if self.model else self.settings.served_model_name
        if ready:
            self._seen.note()
            where = {"url": f"http://{self.settings.host}:{self.settings.port}/v1"} if self.settings.port else {}
            log.info("ready, tokens can flow", model=name, **where)
        else:
            log.warning("not ready", model=name)

    def _say_resumed(self) -> None:
        counts = {name: n for name, n in self.requests.counts.items() if name.startswith("resumed_")}
        if sum(counts.values()) > self._resumed:
            log.warning("attempts were given up for others", since_start=counts, unplaced=self.requests.waiting)
            self._resumed = sum(counts.values())

    def _tend(self, reply: Reply, now: float) -> None:
        """Keep a silent stream open."""
        if reply.streams and not reply.ready and now - reply.written >= self.settings.comment_interval_s:
            reply.written = now
            reply.comment(b"waiting")
