"""A simulated gateway: holds each request whole, resumes it under the next generation, checks every token it gets."""

from typing import Any

from closeranks.protocol import Abort, Attach, Ended, Output, RoomId, Sampling, Status, Submit, Tokens
from tests.engine.leader.stand_in import continuation
from tests.simulation.world import Violation

PATIENCE_S = 8.0
"""Without anything new for so long an attempt is given up (its messages may be lost)."""


class Request:
    def __init__(self, number: int, prompt: list[int], new: int, stops: list[int], deadline: float) -> None:
        self.id = number
        self.prompt, self.new, self.stops = prompt, new, stops
        self.deadline = deadline
        self.alone = False
        self.generation = 0
        self.pair: tuple[str, str] = ("", "")
        self.tokens: list[int] = list(prompt)
        self.moved = 0.0
        self.spoke = False
        self.done = ""
        self.ended: dict[str, Ended] = {}
        right = continuation(prompt, new)
        for index, token in enumerate(right):
            if token in stops:
                right = right[: index + 1]
                break
        self.right = right

    @property
    def room(self) -> RoomId:
        return RoomId(self.id, self.generation)

    @property
    def emitted(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def complete(self) -> bool:
        return len(self.emitted) == len(self.right)


class Gateway:
    def __init__(self, network: Any, name: str) -> None:
        self.network, self.world = network, network.world
        self.name = name
        self.alive = True
        self.requests: dict[int, Request] = {}
        self.finished: list[Request] = []
        self.instances: dict[str, int] = {}
        self.ends: dict[tuple[str, RoomId], Ended] = {}
        self.world.after(0.0, self.tick)

    def tick(self) -> None:
        if not self.alive:
            return
        for endpoint in self.network.endpoints:
            self.say(endpoint, Attach(self.name))
        now = self.world.now
        for request in list(self.requests.values()):
            if now > request.deadline:
                self.abandon(request)
                self.finish(request, "deadline")
            elif now - request.moved > PATIENCE_S:
                self.again(request, 0.0)
        self.world.after(0.5, self.tick)

    def say(self, endpoint: str, message: Any) -> None:
        self.network.to_engine(self, endpoint, message)

    # ------------------------------------------------------------------------------------------------------ requests

    def start(self, request: Request) -> None:
        self.requests[request.id] = request
        self.attempt(request.id, 0)

    def attempt(self, number: int, generation: int) -> None:
        request = self.requests.get(number)
        if request is None or request.generation != generation or not self.alive:
            return
        if self.world.now >= request.deadline:
            self.finish(request, "deadline")
            return
        request.generation += 1
        request.moved = self.world.now
        request.spoke = False
        request.pair = self.world.random.choice(self.network.pairs)
        prefill, decode = request.pair
        left = request.new - len(request.emitted)
        for endpoint in dict.fromkeys(request.pair):
            peer = "" if prefill == decode else (decode if endpoint == prefill else prefill)
            submit = Submit(
                request.room,
                f"r{request.id}",
                list(request.tokens),
                len(request.prompt),
                left,
                Sampling(),
                request.stops,
                request.deadline - self.world.now,
                peer,
                request.alone,
            )
            if self.world.random.random() < 0.01 and not self.world.calm:
                self.say(endpoint, Abort(request.room, "before its submit"))
            self.say(endpoint, submit)
            if self.world.random.random() < 0.01 and not self.world.calm:
                self.say(endpoint, submit)

    def again(self, request: Request, delay: float) -> None:
        self.abandon(request)
        request.moved = self.world.now + delay
        generation = request.generation
        if request.complete:
            self.finish(request, "done")
            return
        self.world.after(delay, self.attempt, request.id, generation)

    def abandon(self, request: Request) -> None:
        for endpoint in dict.fromkeys(request.pair):
            if endpoint:
                self.say(endpoint, Abort(request.room, "next attempt"))

    def abort(self, number: int) -> None:
        """The client has gone."""
        request = self.requests.get(number)
        if request is not None and self.alive:
            self.abandon(request)
            self.finish(request, "aborted")

    def finish(self, request: Request, why: str) -> None:
        request.done = why
        del self.requests[request.id]
        self.finished.append(request)

    # ------------------------------------------------------------------------------------------------------- hearing

    def hear(self, endpoint: str, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, Status):
            before = self.instances.get(endpoint)
            self.instances[endpoint] = message.instance
            if before is not None and before != message.instance:
                for request in list(self.requests.values()):
                    if request.pair[1] == endpoint or (request.pair[0] == endpoint and not request.spoke):
                        self.again(request, 0.05)
            return
        assert isinstance(message, Output)
        for tokens in message.tokens:
            self.take(endpoint, tokens)
        for ended in message.ended:
            self.take_end(endpoint, ended)

    def take(self, endpoint: str, tokens: Tokens) -> None:
        if (endpoint, tokens.room) in self.ends:
            raise Violation(f"{endpoint} sent tokens of {tokens.room} after its end")
        request = self.requests.get(tokens.room.id)
        if request is None or request.generation != tokens.room.generation:
            return
        if endpoint != request.pair[1]:
            raise Violation(f"tokens of {tokens.room} from {endpoint}")
        if tokens.index < len(request.tokens):
            raise Violation(f"{tokens.room}: index {tokens.index} again")
        if tokens.index > len(request.tokens):
            self.again(request, 0.0)  # an output was lost
            return
        request.tokens += tokens.tokens
        request.spoke = True
        request.moved = self.world.now
        emitted = request.emitted
        if emitted != request.right[: len(emitted)]:
            raise Violation(f"{tokens.room}: wrong tokens {emitted}, right: {request.right}")

    def take_end(self, endpoint: str, ended: Ended) -> None:
        if (endpoint, ended.room) in self.ends:
            raise Violation(f"{endpoint} ended {ended.room} twice: {self.ends[endpoint, ended.room]}, {ended}")
        self.ends[endpoint, ended.room] = ended
        request = self.requests.get(ended.room.id)
        if request is None or request.generation != ended.room.generation:
            return
        by_decode = endpoint == request.pair[1]
        if not by_decode and request.spoke:
            return
        if ended.reason in ("stop", "length"):
            if by_decode:
                self.again(request, 0.0)  # done, or with a gap
        elif ended.reason == "invalid":
            raise Violation(f"{endpoint} calls {ended.room} invalid: {ended.detail}")
        elif ended.reason == "deadline":
            if self.world.now < request.deadline - 0.5:
                raise Violation(f"{endpoint}: {ended.room} ended early by deadline")
        else:
            self.again(request, 0.05 + ended.retry_after_s * 0.2)
