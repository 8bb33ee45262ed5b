"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}` and a status.

Each case has its status, type and code here once. Errors that pass have a Retry-After, which clients honour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial

import msgspec

JSON = (b"content-type", b"application/json")
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout",
    429: "rate_limit_error",
    504: "timeout",
}


class ApiError(Exception):
    """A refusal. `param`: the field at fault; `kind`: by the status, if left out; the rest is headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        default = "server_error" if status >= 500 else "invalid_request_error"
        self.kind = kind or KINDS.get(status, default)
        self.code, self.param = code, param
        self.headers = dict(headers or {})
        if retry_after_s is not None:  # whole seconds; clients take 0 for "at once"
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))

    def body(self) -> bytes:
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": fields})


# Cases that differ in their message only.
bad_json = partial(ApiError, 400, code="invalid_json")
bad_key = partial(ApiError, 401, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
malformed = partial(ApiError, 400, code="malformed_http")
large_head = partial(ApiError, 431, code="head_too_large")
wrong_media = partial(ApiError, 415, code="unsupported_media_type")
engine_error = partial(ApiError, 500, code="engine_error", headers={"x-should-retry": "false"})
overloaded = partial(ApiError, 503, kind="overloaded", code="server_overloaded", retry_after_s=1.0)
worker_lost = partial(ApiError, 503, code="worker_lost", retry_after_s=1.0)


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="unsupported_parameter")


def too_long(
    num_prompt_tokens: int, limit: int, num_output_tokens: int = 0, at_least: bool = False
) -> ApiError:
    """Refuse a prompt that does not fit `limit` tokens with the tokens asked for, at least one."""
    has = f"at least {num_prompt_tokens}" if at_least else f"{num_prompt_tokens}"
    asked = f"the prompt has {has} tokens"
    if num_output_tokens:
        asked += f" and max_tokens is {num_output_tokens}, {num_prompt_tokens + num_output_tokens} in all"
    advice = f"Shorten the prompt to at most {limit - 1}."
    if num_output_tokens and num_prompt_tokens < limit:
        advice = f"Shorten the prompt, or lower max_tokens to at most {limit - num_prompt_tokens}."
    message = f"this model's context holds {limit} tokens; {asked}. {advice}"
    return ApiError(400, message, code="context_length_exceeded", param="prompt")


def refused_capacity(reason: str, limit: int) -> ApiError:
    """Every worker refuses the request, though `limit` tokens should fit somewhere."""
    message = f"no worker could hold it: {reason}. The longest that this cluster holds is {limit} tokens"
    return ApiError(400, message, code="context_length_exceeded", param="prompt")


def no_such_model(model: str, known: list[str]) -> ApiError:
    there = ", ".join(known) if known else "none"
    message = f"the model {model[:200]!r} does not exist; served are: {there}"
    return ApiError(404, message, param="model", code="model_not_found")


def no_such_path(method: str, path: str, endpoints: Sequence[str], admin: Sequence[str]) -> ApiError:
    """`endpoints` and `admin` are the paths that exist. The advice names a near miss, or where to look."""
    if near := get_close_matches(path[:200], [*endpoints, *admin], n=1, cutoff=0.8):
        hint = f"did you mean {near[0]}?"
    elif path.startswith("/admin"):
        hint = f"there are: {', '.join(admin)}"
    else:
        hint = f"there are: {', '.join(endpoints)} and the admin API under /admin"
    return ApiError(404, f"there is nothing at {_request(method, path)}; {hint}", code="not_found")


def not_found(what: str, name: str, hint: str, param: str = "") -> ApiError:
    """Refuse a name of nothing there is: a worker, an instance. `hint` says what there is."""
    message = f"no {what} {name[:200]!r}; {hint}"
    return ApiError(404, message, param=param or what, code=f"{what}_not_found")


def wrong_method(method: str, path: str, allow: str) -> ApiError:
    """`allow`: the methods that the path takes."""
    message = f"{_request(method, path)}: this path takes {allow.replace(', ', ' and ')} only"
    return ApiError(405, message, code="method_not_allowed", headers={"allow": allow})


def _request(method: str, path: str) -> str:
    return f"{method[:20]} {path[:200]}"


def too_many(message: str, retry_after_s: float, headers: Mapping[str, str]) -> ApiError:
    """Refuse a client that is over its own limit."""
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s, headers=headers)


def unavailable(message: str, retry_after_s: float = 1.0) -> ApiError:
    """Refuse what the server cannot serve now: it drains, or has no worker or no bus."""
    return ApiError(503, message, code="service_unavailable", retry_after_s=retry_after_s)


def no_grammars(model: str) -> ApiError:
    """All workers of the model are of an older version, which would answer in any form."""
    message = f"no worker of {model!r} can hold an answer to a form; update its workers"
    return ApiError(503, message, code="structured_output_unavailable", retry_after_s=2.0)


def outdated(model: str) -> ApiError:
    """All workers of the model are of an older version, which would leave out a part of the request."""
    message = (
        f"every worker of {model!r} is of an older release, which knows no embeddings, repetition_penalty or "
        "min_tokens; leave these out, or replace its workers"
    )
    return ApiError(503, message, code="workers_outdated", retry_after_s=2.0)


def below_floor(model: str, floor: str) -> ApiError:
    """No instance keeps the precision asked for, and the client does not wait for one."""
    message = (
        f"no instance of {model!r} has its layers and its KV cache at {floor!r} or better now; "
        "lower min_precision, raise max_loss, or leave min_precision_wait out to wait for one"
    )
    code = "precision_unavailable"
    return ApiError(503, message, kind="overloaded", code=code, param="min_precision", retry_after_s=1.0)


def never_so_precise(model: str, floor: str, best: str) -> ApiError:
    """Refuse a floor above the bits of a quantised checkpoint."""
    message = (
        f"the layers of {model!r} are in {best!r} alone, since its checkpoint is quantised; lower"
        f" min_precision from {floor!r}"
    )
    return invalid(message, "min_precision", "precision_unavailable")


def never_so_precise_kv(model: str, floor: str, best: str) -> ApiError:
    """Refuse a floor above what the KV cache rests in at every instance."""
    message = (
        f"the KV cache of {model!r} rests in {best!r} at every instance (worker.kv_dtype, or kv_dtype of its"
        f" deployment), below {floor!r}; lower min_precision to {best!r}, raise max_loss, or have it held in"
        " full precision (`instar morph kv full`)"
    )
    return invalid(message, "min_precision", "precision_unavailable")


def never_within_loss(model: str, max_loss: float, kv: str, least: float | None) -> ApiError:
    """Refuse a limit of loss that the KV cache, as it rests at every instance, cannot keep.

    least: the lowest limit that can be kept; None: not measured.
    """
    remedy = (
        f"its loss, or that of layers in {kv!r}, is not measured; run `instar profile` on the model's folder"
        " and load it again, or leave max_loss out"
        if least is None
        else f"layers in {kv!r} are accepted with it, so the lowest limit that can be kept is"
        f" {math.ceil(least * 1e6) / 1e6:g}; raise max_loss to that, or set worker.kv_dtype to full and have"
        " the model deployed with its KV cache in full precision"
    )
    message = (
        f"max_loss is {max_loss:g}, and the KV cache of {model!r} rests in {kv!r} at every instance"
        f" (worker.kv_dtype, or kv_dtype of its deployment): {remedy}"
    )
    return invalid(message, "max_loss", "precision_unavailable")


def deadline_exceeded(waited_s: float, unmet_wish: str = "") -> ApiError:
    """`unmet_wish`: what the request waited for, if that is known."""
    why = f" ({unmet_wish})" if unmet_wish else ""
    message = f"no worker began this request within {waited_s:.1f} s{why}; try again later"
    return ApiError(504, message, code="deadline_exceeded", retry_after_s=1.0)


def slow_reader(max_tokens: int, max_mb: int) -> ApiError:
    message = (
        f"the client left more than {max_tokens} tokens (gateway.stream_buffer_tokens) or {max_mb} MiB "
        "(gateway.max_call_mb) of this stream unread"
    )
    return ApiError(408, message, code="slow_reader")


def internal() -> ApiError:
    return ApiError(500, "the gateway failed; its log says how", code="internal_error")
