"""Hooks of a program of schemathesis: a check of ours, bodies that name the demo model, and counts.

schemathesis imports this module, and calls it for every case.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import schemathesis
from schemathesis import Case, CheckContext, HookContext, Response

COUNTS: Final = Path(os.environ["FUZZ_COUNTS"])  # the file that gets the counts
EVERY_S: Final = 1.0
MODEL: Final = "demo"

# Why a request that fits its schema is refused with 400, as docs/api.md says, by code and message.
REFUSALS: Final = {
    "context_length_exceeded": "context holds",
    "empty_prompt": "is empty",
    "tools_not_supported": "does not tell the model of tools|in a way that is not known",
    "invalid_value": "|".join(
        (
            # of what generates
            *(
                "outside the vocabulary",
                "one call may ask for",
                "the limit is",
                "needs logprobs",
                "min_tokens is",
            ),
            *(
                "only allowed with stream",
                "send one",
                "send at least",
                "wait needs",
                "only with echo",
                "leave (it|stream)",
            ),
            *("must be an integer", "must be a text"),  # JSON Schema takes 5.0 for an integer
            *("only the role", "the role 'tool' needs"),  # of a message
            "cannot be used",  # a schema, expression or grammar
            # of orders
            *("no folder", "cannot be opened", "must begin with", "must be printable"),
            *("must be below", "changes nothing", "kv_usage_high is 0.00"),
        )
    ),
}
ORDERS: Final = "/admin/instances/"  # what the cluster cannot carry out is refused with many reasons

_counts = Counter[str]()
_writes = {"at_s": 0.0}


@schemathesis.hook
def map_body(context: HookContext, body: Any) -> Any:
    """Name the model that there is in three of four bodies that name any: the others get 404."""
    if isinstance(body, dict) and isinstance(name := body.get("model"), str) and len(name) % 4:
        return body | {"model": MODEL}
    return body


@schemathesis.check
def refusal_has_a_reason(context: CheckContext, response: Response, case: Case[Any]) -> None:
    """Fail for a 400 of a request that fits its schema, unless docs/api.md has its reason."""
    is_valid = case.meta is not None and case.meta.generation.mode.is_positive
    if is_valid and response.status_code == 400:
        error = json.loads(response.content)["error"]
        reason = REFUSALS.get(error["code"])
        is_order = case.operation.path.startswith(ORDERS) and error["code"] == "invalid_value"
        is_documented = reason is not None and (is_order or re.search(reason, error["message"]))
        assert is_documented, f"an undocumented refusal: {error}"


@schemathesis.hook
def after_call(context: HookContext, case: Case[Any], response: Response) -> None:
    """Count the answer."""
    mode = case.meta.generation.mode.value if case.meta else "unknown"
    _counts[f"{case.operation.label}|{mode}|{response.status_code}"] += 1
    if time.monotonic() > _writes["at_s"] + EVERY_S:
        _write()


def _write() -> None:
    _writes["at_s"] = time.monotonic()
    new = COUNTS.with_suffix(".new")
    new.write_text(json.dumps(_counts))
    new.replace(COUNTS)


atexit.register(_write)
