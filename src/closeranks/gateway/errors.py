"""Errors as OpenAI clients know them: `{"error": {"message", "type", "param", "code"}}` under a status.

ApiError
├── Invalid          400  invalid_request_error   the request is wrong; sending it again will not help
│   ├── TooLong      400  context_length_exceeded
│   └── Unknown      404  e.g. model_not_found
├── Denied           401
├── Conflict         409  a request with this id is open
├── TooLarge         413, 431
├── Slow             408
├── Busy             429  with Retry-After
├── Unavailable      503  with Retry-After
└── Failed           499, 500, 504  the request was taken on and ended with an error
"""

import math

import msgspec

from closeranks.gateway.resume import End


class ApiError(Exception):
    """An answer that is an error. `param`: the field at fault; `code`: what programs match on."""

    status = 500
    type = "api_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 0,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.status = status or type(self).status
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        if self.retry_after_s > 0:
            return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}
        return {"x-should-retry": "false"} if self.code in NOT_AGAIN else {}


def shown(value: object, most: int = 64) -> str:
    """A value of a request as an error shows it: short, however long it is, and whatever is in it."""
    if isinstance(value, int) and value.bit_length() > 4 * most:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = repr(value[: most + 1] if isinstance(value, str) else value)
    return text if len(text) <= most + 2 else text[:most] + "…"


class Invalid(ApiError):
    status = 400
    type = "invalid_request_error"


class TooLong(Invalid):
    code = "context_length_exceeded"


class Unknown(Invalid):
    status = 404
    code = "not_found"


class Denied(ApiError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Conflict(Invalid):
    status = 409
    code = "duplicate_request_id"


class TooLarge(Invalid):
    status = 413
    code = "request_too_large"


class Slow(Invalid):
    status = 408
    code = "request_timeout"


class Busy(ApiError):
    status = 429
    type = "overloaded_error"
    code = "overloaded"


class Unavailable(ApiError):
    status = 503
    type = "service_unavailable"
    code = "service_unavailable"


NOT_AGAIN = frozenset({"poison_request", "grammar_failed"})
"""They would fail in the same way, and take an engine along. OpenAI's clients try a 500 again but for this header."""


class Failed(ApiError):
    code = "engine_error"


def from_end(end: End, rid: str) -> ApiError:
    """What a client is told when its request did not end by `stop` or `length`.

    Of an engine's words the first line: stacks are in its log and its incident folder.
    """
    first = end.detail.partition("\n")[0]
    detail = f": {first}" if first else ""
    match end.reason:
        case "invalid":
            return Invalid(f"the engine refused the request{detail}", code="invalid")
        case "busy":
            return Busy(f"all queues are full{detail}", retry_after_s=end.retry_after_s or 1.0)
        case "no_engine" | "shutdown":
            return Unavailable(first, code=end.reason, retry_after_s=end.retry_after_s or 5.0)
        case "deadline":
            return Failed(f"the request's time is over{detail}", status=504, code="deadline_exceeded")
        case "abort":
            return Failed(f"request {rid} was aborted{detail}", status=499, code="aborted")
        case "poison":
            return Failed(first, status=500, code="poison_request")
        case "grammar":
            return Failed(first, status=500, code="grammar_failed")
        case "peer":
            return Unavailable(f"the engines refuse each other{detail}", code="peer", retry_after_s=30.0)
        case _:
            return Failed(f"the engine ended the request ({end.reason}){detail}", status=500)
