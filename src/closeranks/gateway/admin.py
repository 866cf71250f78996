"""Endpoints about the service itself: health, readiness, metrics, what is served and by whom."""

from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from closeranks.gateway import health as judge
from closeranks.gateway.errors import Unavailable, Unknown
from closeranks.gateway.service import Gateway

SECRETS = ("api_key", "admin_api_key", "curve_key_file")


def json_response(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def health(gateway: Gateway, request: Request, rid: str) -> Response:
    """200 while work gets done, or none waits; else 503 with the reasons."""
    now = gateway.clock()
    bound = gateway.settings.wait_bound_s
    requests = gateway.requests
    return _said(judge.health(gateway.router, requests.open.values(), bound, now))


async def ready(gateway: Gateway, request: Request, rid: str) -> Response:
    """200 when tokens can flow."""
    return _said(judge.ready(gateway.router, gateway.draining, gateway.model_error, gateway.clock()))


async def metrics(gateway: Gateway, request: Request, rid: str) -> Response:
    return Response(gateway.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def models(gateway: Gateway, request: Request, rid: str) -> Response:
    return json_response({"object": "list", "data": [_entry(gateway)]})


async def model(gateway: Gateway, request: Request, rid: str) -> Response:
    entry = _entry(gateway)
    name = request.path_params["name"]
    if name not in ("default", entry["id"]):
        raise Unknown(f"model {name!r} is not served here; {entry['id']!r} is", code="model_not_found")
    return json_response(entry)


def _entry(gateway: Gateway) -> dict[str, Any]:
    if gateway.model is None:
        raise Unavailable(gateway.model_error, retry_after_s=2.0)
    name = gateway.model.name
    entry = {"id": name, "object": "model", "created": int(gateway.started), "owned_by": "closeranks", "root": name}
    return {**entry, "max_model_len": gateway.limit()}


async def server_info(gateway: Gateway, request: Request, rid: str) -> Response:
    """Settings without secrets, and each engine's last Status with its age."""
    now = gateway.clock()
    settings = msgspec.to_builtins(gateway.settings)
    settings.update({name: "***" for name in SECRETS if settings[name]})
    engines = [
        {
            "endpoint": engine.endpoint,
            "role": engine.role,
            "usable": gateway.router.usable(engine.endpoint, now),
            "age_s": round(now - engine.heard, 3) if engine.status else None,
            "open_here": engine.open,
            "status": msgspec.structs.asdict(engine.status) if engine.status else None,
        }
        for engine in gateway.router.engines.values()
    ]
    return json_response(
        {
            "version": version("closeranks"),
            "model": gateway.model.name if gateway.model else None,
            "max_model_len": gateway.limit(),
            "uptime_s": round(now - gateway.began, 3),
            "draining": gateway.draining,
            "open_requests": len(gateway.requests.open),
            "unplaced_requests": gateway.requests.waiting,
            "counters": dict(gateway.requests.counts),
            "settings": settings,
            "engines": engines,
        }
    )


def _said(verdict: judge.Verdict) -> Response:
    return json_response({"ok": verdict.ok, "reasons": verdict.reasons}, 200 if verdict.ok else 503)
