"""The guard as a listening server, and the decoders that it uses."""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from aiohttp import web

from closeranks.codec import Decoder, Policy
from closeranks.gateway.guard.asked import Asked
from closeranks.gateway.guard.proxy import HEADER_LIMIT, Guard


def decoders(dialect: str = "v4", policy: Policy | None = None) -> Callable[[Asked, bool], Decoder]:
    """What `Guard` makes decoders with: one per run of text, since the upstream has split reasoning from content."""
    rules = policy if policy is not None else Policy()

    def make(asked: Asked, thinking: bool) -> Decoder:
        return Decoder(
            dialect=dialect,
            thinking=thinking,
            tools=list(asked.tools),
            tool_choice=asked.tool_choice,
            policy=rules,
        )

    return make


def policy_from(text: list[str]) -> Policy:
    """A policy from `name=value` strings. Raises ValueError that names what is possible."""
    chosen: dict[str, Any] = {}
    names = [field.name for field in dataclasses.fields(Policy)]
    for item in text:
        name, _, value = item.partition("=")
        name = name.replace("-", "_")
        if name not in names:
            raise ValueError(f"no policy is called {name!r}; there are {', '.join(names)}")
        allowed = get_args(get_type_hints(Policy)[name])
        if value not in allowed:
            raise ValueError(f"policy {name} is one of {', '.join(allowed)}, not {value!r}")
        chosen[name] = value
    return Policy(**chosen)


class GuardServer:
    """A `Guard` that listens. `async with GuardServer(guard, host, port) as server: server.port`."""

    def __init__(self, guard: Guard, host: str, port: int) -> None:
        self._guard = guard
        self._host = host
        self._wanted = port
        self.port = 0
        server = web.Server(
            guard.handle,
            handler_cancellation=True,  # a client that leaves ends the upstream's work at once
            auto_decompress=False,
            access_log=None,
            max_line_size=HEADER_LIMIT,
            max_field_size=HEADER_LIMIT,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=5.0)

    async def __aenter__(self) -> "GuardServer":
        await self._guard.__aenter__()
        await self._runner.setup()
        # reuse_port stays off: two guards on one port by mistake would share its requests in silence.
        site = web.TCPSite(self._runner, self._host, self._wanted, backlog=2048)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()
        await self._guard.__aexit__(*exc)
