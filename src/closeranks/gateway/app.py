"""The routes. Each takes a bounded, timed body, answers in OpenAI's shapes, and carries `X-Request-Id` in and out."""

import asyncio
import hmac
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from closeranks.codec import Decoder
from closeranks.gateway import admin, chat, completions, logs, openai
from closeranks.gateway.choice import Choice
from closeranks.gateway.decoded import DecodedChoice
from closeranks.gateway.errors import (
    ApiError,
    Busy,
    Denied,
    Invalid,
    Slow,
    TooLarge,
    TooLong,
    Unavailable,
    Unknown,
    shown,
)
from closeranks.gateway.guide import FALLBACK, Guide, guide
from closeranks.gateway.model import Model
from closeranks.gateway.reply import Format, Reply, Timing
from closeranks.gateway.service import Gateway
from closeranks.gateway.stream import Refusal, ReplyResponse

_RID = re.compile(r"[!#-\[\]-~]{1,128}\Z")
_TOKENIZED = 2**20
"""Characters that /tokenize takes in any case, also where they cannot fit into the context."""
_BODIES = 16
"""Bodies of the largest size whose bytes may be held at once while they come in."""

log = structlog.get_logger()
T = TypeVar("T")
Handler = Callable[[Gateway, Request, str], Awaitable[Response]]


def make(gateway: Gateway) -> ASGIApp:
    """The ASGI application of a gateway."""

    def route(path: str, handler: Handler, method: str, key: str = "api") -> Route:
        return Route(path, partial(_handle, gateway, handler, path, key), methods=[method])

    routes = [
        route("/v1/chat/completions", _chat, "POST"),
        route("/v1/completions", _completion, "POST"),
        route("/v1/models", admin.models, "GET"),
        route("/v1/models/{name:path}", admin.model, "GET"),
        route("/tokenize", _tokenize, "POST"),
        route("/detokenize", _detokenize, "POST"),
        route("/health", admin.health, "GET", key=""),
        route("/ready", admin.ready, "GET", key=""),
        route("/metrics", admin.metrics, "GET", key=""),
        route("/server_info", admin.server_info, "GET"),
        route("/abort_request", _abort, "POST", key="admin"),
    ]
    app = Starlette(routes=routes, exception_handlers={404: _refused, 405: _refused, Exception: _broken})
    app.router.redirect_slashes = False
    return app


async def _refused(request: Request, error: Exception) -> Response:
    """What routing itself refuses, in the same shape."""
    what = f"{request.method} {request.url.path}"
    if getattr(error, "status_code", 404) == 405:
        return _error(Unknown(f"wrong method: {what}", status=405, code="method_not_allowed"), _new_rid(), unread=True)
    return _error(Unknown(f"no such endpoint: {what}", code="unknown_url"), _new_rid(), unread=True)


async def _broken(request: Request, error: Exception) -> Response:
    """A fault outside of `_handle`; starlette raises it on, so that it is logged with its stack."""
    return _error(
        ApiError(f"the gateway failed: {type(error).__name__}", code="internal_error"), _new_rid(), unread=False
    )


async def _handle(gateway: Gateway, handler: Handler, endpoint: str, key: str, request: Request) -> Response:
    """What all endpoints share: the id, the key, errors in shape."""
    rid = _new_rid()
    began = gateway.clock()
    try:
        rid = _rid(request.headers.get("x-request-id"), "X-Request-Id") or rid
        if key:
            _authorize(gateway, request, admin_only=key == "admin")
        response = await handler(gateway, request, rid)
    except ApiError as error:
        response = _error(error, rid, unread=not getattr(request.state, "read", False))
        gateway.metrics.http.labels(endpoint, str(error.status)).inc()
        seconds = round(gateway.clock() - began, 4)
        said = str(error.message)[:200] if error.status != 400 else None  # 400s may quote what the client sent
        why = {"code": error.code, "field": error.param and error.param[:64], "why": said}
        log.info("refused", rid=rid, endpoint=endpoint, status=error.status, seconds=seconds, **why)
    except ClientDisconnect:
        log.info("client left", rid=rid, endpoint=endpoint)
        gateway.metrics.disconnects.inc()
        return Response(status_code=499)
    except Exception as error:  # noqa: BLE001 (a fault of the gateway: told to the client, and to the log in one line)
        failed = ApiError(f"the gateway failed: {type(error).__name__}", code="internal_error")
        response = _error(failed, rid, unread=not getattr(request.state, "read", False))
        gateway.metrics.http.labels(endpoint, str(failed.status)).inc()
        # without the exception's words, which may quote the request
        log.error("failed", rid=rid, endpoint=endpoint, exception=type(error).__name__, stack=logs.where(error))
    if not isinstance(response, ReplyResponse):
        response.headers["x-request-id"] = rid
    return response


# ---- generation


async def _chat(gateway: Gateway, request: Request, rid: str) -> Response:
    body = await _body(gateway, request)
    asked = openai.parse(body, openai.ChatRequest)
    openai.check_chat(asked)
    rid = _rid(asked.rid, "rid") or rid
    model = gateway.admit(rid, asked.n or 1)
    name = _served(model, asked.model)
    await _beside(len(body), partial(openai.check_nesting, asked))
    tools = None if asked.tool_choice == "none" else asked.tools
    settings = gateway.settings
    _check_fit(gateway, asked.messages, tools)
    render = partial(chat.render, model, asked.messages, tools, asked.chat_template_kwargs, asked.reasoning_effort)
    prompt = await _beside(len(body), render)
    tokens = await _encode(gateway, len(prompt.text), partial(model.encode_prompt, prompt), "messages")
    _check_text(model, tokens, "messages")
    parses = bool(settings.tool_call_parser)
    held = guide(asked, tools or [], settings.dialect, parses, model.added_tokens(), prompt.thinking)
    forced = held is not None and held.must == "call"
    dialect = settings.dialect or (FALLBACK if forced or (held is not None and prompt.thinking) else "")
    top = chat.top_logprobs(asked)
    format = chat.ChatFormat(rid, model, name, int(time.time()), top, _with_usage(asked), bool(asked.stream))

    def make(reply: Reply, index: int, stop_ids: list[int]) -> Choice:
        decoder = Decoder(
            dialect,
            prompt.thinking,
            [msgspec.to_builtins(tool) for tool in tools or ()],
            msgspec.to_builtins(asked.tool_choice or "auto"),
            model.tokenizer,
        )
        single = asked.parallel_tool_calls is False
        stops, cut_off = openai.stop_strings(asked), gateway.cut_off
        return DecodedChoice(
            index, reply, model.vocabulary, stops, stop_ids, cut_off, reply.with_ids, decoder, format.events, single,
            as_text=forced,
        )  # fmt: skip

    limit = asked.max_completion_tokens or asked.max_tokens
    logprobs = -1 if top is None else top
    endpoint = "/v1/chat/completions"
    return _generate(gateway, rid, asked, format, [tokens], limit, logprobs, endpoint, held, make if dialect else None)


async def _completion(gateway: Gateway, request: Request, rid: str) -> Response:
    body = await _body(gateway, request)
    asked = openai.parse(body, openai.CompletionRequest)
    openai.check_completion(asked)
    await _beside(len(body), partial(openai.check_nesting, asked))
    rid = _rid(asked.rid, "rid") or rid
    given = completions.prompts(asked)
    choices = len(given) * (asked.n or 1)
    if choices > openai.MAX_CHOICES:
        raise Invalid(f"{choices} choices in all; at most {openai.MAX_CHOICES} are allowed", param="n")
    model = gateway.admit(rid, choices)
    name = _served(model, asked.model)
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            encode = partial(model.encode, prompt, special=True)
            prompts.append(await _encode(gateway, len(prompt), encode, "prompt"))
            _check_text(model, prompts[-1], "prompt")
        else:
            _check_ids(model, prompt, "prompt")
            prompts.append(prompt)
    top = asked.logprobs
    format = completions.CompletionFormat(
        rid, model, name, int(time.time()), top, _with_usage(asked), bool(asked.stream)
    )
    limit = asked.max_tokens or 16  # OpenAI's default
    held = guide(asked, [], "", False)
    return _generate(gateway, rid, asked, format, prompts, limit, -1 if top is None else top, "/v1/completions", held)


def _generate(
    gateway: Gateway,
    rid: str,
    asked: openai.Common,
    format: Format,
    prompts: list[list[int]],
    limit: int | None,
    logprobs: int,
    endpoint: str,
    held: Guide | None,
    make: Callable[[Reply, int, list[int]], Choice] | None = None,
) -> Response:
    """Check lengths, start every choice, and answer with their reply. `make`: choices that are not plain text."""
    n = asked.n or 1
    model = gateway.admit(rid, n * len(prompts))  # again: tokenizing took time
    lengths = [_room(gateway, len(prompt), limit) for prompt in prompts]
    stop_ids = list(dict.fromkeys(asked.stop_token_ids or ()))
    _check_ids(model, stop_ids, "stop_token_ids")
    if not asked.ignore_eos:
        stop_ids = list(dict.fromkeys((*model.stop_ids, *stop_ids)))
    reply = Reply(
        rid=rid,
        format=format,
        streams=bool(asked.stream),
        with_usage=_with_usage(asked),
        with_ids=bool(asked.return_token_ids),
        prompt_tokens=sum(map(len, prompts)),
        timing=Timing(gateway.clock()),
        clock=gateway.clock,
    )
    seed = secrets.randbits(63)
    stops = openai.stop_strings(asked)
    skip = asked.skip_special_tokens is not False
    form = held or Guide("", "")
    choices = []
    for index in range(n * len(prompts)):
        if make is not None:
            choice = make(reply, index, stop_ids)
        else:
            vocabulary, cut_off = model.vocabulary, gateway.cut_off
            choice = Choice(index, reply, vocabulary, stops, stop_ids, cut_off, skip, reply.with_ids)
        choice.must = form.must
        choices.append(choice)
    gateway.open(reply)  # from here on it is `close` that ends it: nothing in between may fail
    for index, choice in enumerate(choices):
        at, nth = divmod(index, n)
        sampling = openai.sampling(asked, seed, logprobs, nth, form.grammar, stop_ids)
        gateway.submit(reply, choice, prompts[at], lengths[at], sampling, stop_ids)
    return ReplyResponse(reply, gateway.clock, lambda status: gateway.close(reply, endpoint, status))


def _room(gateway: Gateway, prompt: int, asked: int | None) -> int:
    """How many tokens may be generated. Raises TooLong, Invalid."""
    limit = gateway.limit()
    if prompt == 0:
        raise Invalid("the prompt has no tokens", param="prompt")
    if limit and prompt >= limit:
        raise TooLong(f"the prompt has {prompt} tokens; the context holds {limit}, of which one must be new")
    if asked is None:
        return max(1, limit - prompt)
    if limit and prompt + asked > limit:
        said = f"{prompt} prompt tokens and {asked} new ones are {prompt + asked}; the context holds {limit}"
        raise TooLong(said, param="max_tokens")
    return asked


# ---- tokens


async def _tokenize(gateway: Gateway, request: Request, rid: str) -> Response:
    body = await _body(gateway, request)
    asked = openai.parse(body, openai.TokenizeRequest)
    model = _model(gateway)
    _served(model, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise Invalid("give either prompt or messages", param="prompt")
    if asked.messages is not None:
        openai.check_messages(asked.messages)
        await _beside(len(body), partial(openai.check_nesting, asked))
        _check_fit(gateway, asked.messages, asked.tools, _TOKENIZED)
        prompt = await _beside(len(body), partial(chat.render, model, asked.messages, asked.tools))
        encode = partial(model.encode_prompt, prompt)
        tokens = await _encode(gateway, len(prompt.text), encode, "messages", _TOKENIZED)
    else:
        text = asked.prompt or ""
        encode = partial(model.encode, text, special=asked.add_special_tokens)
        tokens = await _encode(gateway, len(text), encode, "prompt", _TOKENIZED)
    return admin.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": gateway.limit()})


async def _detokenize(gateway: Gateway, request: Request, rid: str) -> Response:
    asked = openai.parse(await _body(gateway, request), openai.DetokenizeRequest)
    model = _model(gateway)
    _served(model, asked.model)
    _check_ids(model, asked.tokens, "tokens")
    return admin.json_response({"prompt": model.tokenizer.decode(asked.tokens, skip_special_tokens=False)})


def _check_fit(
    gateway: Gateway, messages: list[openai.Message], tools: list[openai.Tool] | None, least: int = 0
) -> None:
    """A conversation that cannot fit is refused before a template makes a prompt of it. Raises TooLong."""
    limit = gateway.limit()
    for param, given in (("messages", messages), ("tools", tools or ())):
        if limit and len(given) > max(limit, least):
            raise TooLong(f"{len(given)} {param} cannot fit into {limit} tokens", param=param)
    _check_size(gateway, sum(len(openai.text_of(message)) for message in messages), "messages", least)


def _check_size(gateway: Gateway, size: int, param: str, least: int) -> None:
    """A text of `size` characters that cannot fit is refused before it is tokenized. Raises TooLong."""
    limit = gateway.limit()
    if limit and size > max(limit * _model(gateway).vocabulary.longest, least):
        raise TooLong(f"a prompt of {size} characters cannot fit into {limit} tokens", param=param)


async def _encode(
    gateway: Gateway, size: int, encode: Callable[[], list[int]], param: str, least: int = 0
) -> list[int]:
    """Tokenize a text of `size` characters. `least`: characters that are taken in any case. Raises TooLong, Invalid."""
    _check_size(gateway, size, param, least)
    try:
        return await _beside(size, encode)
    except UnicodeEncodeError as error:
        raise Invalid(f"the text is not valid Unicode: {error.reason}", param=param) from error


async def _beside(size: int, work: Callable[[], T]) -> T:
    """Do what takes long for a large `size` (bytes, characters) in a thread: all streams live in this one's loop."""
    return work() if size < openai.LARGE else await asyncio.to_thread(work)


def _check_ids(model: Model, tokens: Sequence[int], param: str) -> None:
    for token in tokens:
        if not 0 <= token < model.vocab_size:
            said = f"token {shown(token)} is outside the vocabulary of {model.vocab_size}"
            raise Invalid(said, param=param, code="out_of_range")


def _check_text(model: Model, tokens: list[int], param: str) -> None:
    """Of a text: many tokenizers have tokens (a pad token that was added) that their model never learned."""
    if tokens and (worst := max(tokens)) >= model.vocab_size:
        text = model.tokenizer.id_to_token(worst)
        said = f"the text holds {text!r}, token {worst}, which is outside the model's vocabulary of {model.vocab_size}"
        raise Invalid(said, param=param, code="out_of_range")


def _model(gateway: Gateway) -> Model:
    if gateway.model is None:
        raise Unavailable(gateway.model_error, retry_after_s=2.0)
    return gateway.model


def _served(model: Model, asked: str | None) -> str:
    """The name that the answer carries. Raises Unknown."""
    if asked in (None, "", "default", model.name):
        return model.name
    raise Unknown(
        f"model {shown(asked, 256)} is not served here; {model.name!r} is", param="model", code="model_not_found"
    )


def _with_usage(asked: openai.Common) -> bool:
    return bool(asked.stream_options and asked.stream_options.include_usage)


# ---- the rest


async def _abort(gateway: Gateway, request: Request, rid: str) -> Response:
    asked = openai.parse(await _body(gateway, request), openai.AbortRequest)
    return admin.json_response({"rid": asked.rid, "aborted": gateway.abort(asked.rid)})


async def _body(gateway: Gateway, request: Request) -> bytes:
    """The whole body, within its bounds. Raises TooLarge, Slow, Invalid; ClientDisconnect if the client leaves."""
    _check_codings(request)
    most = gateway.settings.max_body_bytes
    said = f"the body is larger than the {most} bytes that are allowed"
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise TooLarge(said)
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(gateway.settings.body_timeout_s):
            async for piece in request.stream():
                size += len(piece)
                gateway.incoming += len(piece)
                if size > most:
                    raise TooLarge(said)
                if gateway.incoming > _BODIES * most:
                    raise Busy(f"{gateway.incoming} bytes of requests are coming in", retry_after_s=1.0)
                pieces.append(piece)
    except TimeoutError:
        raise Slow(f"the body did not arrive within {gateway.settings.body_timeout_s:g} s") from None
    finally:
        gateway.incoming -= size
    request.state.read = True
    return b"".join(pieces)


def _check_codings(request: Request) -> None:
    """Bodies come as they are, or in chunks. Raises Invalid."""
    for name, plain in (("content-encoding", {"identity"}), ("transfer-encoding", {"chunked", "identity"})):
        given = ",".join(request.headers.getlist(name)).lower()
        strange = {coding.strip() for coding in given.split(",")} - plain - {""}
        if strange:
            said = f"{name} {shown(min(strange))} is not supported: send the body as it is"
            raise Invalid(said, status=415, code="unsupported")


def _authorize(gateway: Gateway, request: Request, admin_only: bool) -> None:
    """Raises Denied. Compares in constant time."""
    settings = gateway.settings
    keys = [settings.admin_api_key] if admin_only and settings.admin_api_key else []
    keys = keys or [key for key in (settings.api_key, settings.admin_api_key) if key]
    if not settings.api_key and not (admin_only and settings.admin_api_key):
        return
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    # Starlette reads the bytes of headers as latin-1
    given = token.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
    if not any([hmac.compare_digest(given, key.encode()) for key in keys]):
        raise Denied("the API key is missing or wrong: send `Authorization: Bearer KEY`")


def _rid(given: str | None, name: str) -> str | None:
    if given is None or given == "":
        return None
    if not _RID.match(given):
        raise Invalid(f"{name} must be 1 to 128 visible ASCII characters without quotes and backslashes", param=name)
    return given


def _new_rid() -> str:
    return secrets.token_hex(16)


def _error(error: ApiError, rid: str, unread: bool) -> Response:
    """`unread`: the request's body has not been taken from the connection."""
    kind = Refusal if unread else Response
    return kind(error.body(), error.status, {**error.headers(), "x-request-id": rid}, media_type="application/json")
