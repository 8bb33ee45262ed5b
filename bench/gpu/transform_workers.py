"""Four workers on one device that decode while their tensor parallelism changes: 1, 2, 4, 2, 1.

Their output is compared with a transformers model in float32 that reads their tokens: each token must be that
model's choice, and its log-probability the same within rounding. In float32 that leaves only candidates that
are equally likely. Tokens of every degree, and of steps with layers at two degrees, are reported separately.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.oracles import make_oracle
from bench.transform.group import Change, Leader, Made

WORKERS = 4
# (degree, members in the order of their shards there): pairs, all, and back.
PATH: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = (
    (2, ((0, 1), (2, 3))),
    (4, ((0, 2, 1, 3),)),
    (2, ((0, 2, 1, 3),)),
    (1, ((0, 1), (2, 3))),
)
AFTERWARDS = 8  # tokens of each request in the new shape
# Largest difference of a log-probability from the oracle's; a wrong layer is off by whole units. A CPU makes
# 3e-6 and 0.03 with a tiny model.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}


@dataclass(frozen=True, slots=True)
class Workers:
    """The model and the load; every change begins with `sequences` new ones on each worker."""

    model: dict[str, int]
    megabytes: int
    page_kib: int
    prompt_tokens: int
    max_tokens: int
    sequences: int


def measure(sizes: Workers, device: str, dtype: str) -> dict[str, Any]:
    """Return `changes` with their costs, `off` by kind of step, and `problems`.

    `off` has the largest and the mean difference of a token's log-probability from the oracle's.
    """
    length = sizes.prompt_tokens + sizes.max_tokens
    oracle = make_oracle("llama", **sizes.model, max_position_embeddings=length)
    requests: list[tuple[list[int], list[Made]]] = []
    changes = []
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as folder:
        oracle.save_pretrained(folder)
        # A GPU compiles its kernels for a degree in that degree's first step.
        options: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "page_kib": sizes.page_kib,
            "group_timeout_s": 60,
        }
        with Leader(Path(folder), WORKERS, megabytes=sizes.megabytes, sequences=0, **options) as leader:
            for turn, (tp, groups) in enumerate(PATH):
                prompts = _begin(leader, sizes, turn)
                changes += [leader.change(tp, 1, members) for members in groups]
                for worker in range(WORKERS):
                    made = leader.ask(worker, "end", AFTERWARDS)
                    requests += [(prompts[name], tokens) for name, tokens in made.items()]
    if dtype != "float32":
        oracle = oracle.to(getattr(torch, dtype)).float()  # oracle of the weights as the workers have them
    return {"dtype": dtype, "changes": [_cost(change) for change in changes]} | _compare(
        oracle.to(device), requests, getattr(torch, dtype)
    )


def _begin(leader: Leader, sizes: Workers, turn: int) -> dict[str, list[int]]:
    prompts: dict[str, list[int]] = {}
    for worker in range(WORKERS):
        own = {
            f"{turn}-{worker}-{i}": [
                (31 * i + 37 * j + 7 * worker + 11 * turn) % sizes.model["vocab_size"]
                for j in range(sizes.prompt_tokens - 3 * i)
            ]
            for i in range(sizes.sequences)
        }
        leader.ask(worker, "begin", own, sizes.max_tokens)
        prompts |= own
    return prompts


def _cost(change: Change) -> dict[str, Any]:
    moving = [step.seconds for step in change.steps if step.boundary]
    return {
        "tp": change.tp,
        "moving_ms": 1e3 * change.moving_seconds,
        "bytes_exchanged": change.bytes_exchanged,
        "steps_on_the_way": len(moving),
        "longest_step_ms": 1e3 * max(moving, default=0.0),
    }


def _compare(
    oracle: Any, requests: Sequence[tuple[list[int], list[Made]]], dtype: torch.dtype
) -> dict[str, Any]:
    off: dict[str, list[float]] = {}
    problems, tolerance = [], TOLERANCE[dtype]
    for prompt, made in requests:
        tokens = [one.token_id for one in made]
        ids = torch.tensor([prompt + tokens[:-1]], device=oracle.device)
        with torch.no_grad():
            known = oracle(ids).logits[0, len(prompt) - 1 :].log_softmax(-1).cpu()
        for at, one in enumerate(made):
            kind = f"TP{one.tp}, on the way" if one.boundary else f"TP{one.tp}"
            off.setdefault(kind, []).append(abs(float(known[at, one.token_id]) - one.logprob))
            missed = float(known[at].max() - known[at, one.token_id])
            if missed > 2 * tolerance:  # both may be off
                problems.append(
                    f"token {at} of {len(made)}, {kind}: {missed:.3g} less likely than the oracle's"
                )
                break  # the rest of this request says no more
    for kind, differences in off.items():
        if max(differences) > tolerance:
            problems.append(f"{kind}: off by {max(differences):.3g} in a log-probability")
    if missing := {"TP1", "TP2", "TP4"} - set(off):
        problems.append(f"no token at {', '.join(sorted(missing))}")
    if not any("on the way" in kind for kind in off):
        problems.append("no token in a step with layers at two degrees")
    by_kind = {
        kind: {"tokens": len(all_), "largest": max(all_), "mean": statistics.fmean(all_)}
        for kind, all_ in sorted(off.items())
    }
    return {"off": by_kind, "problems": problems}


def lines(row: dict[str, Any]) -> Iterator[str]:
    for change in row["changes"]:
        yield (
            f"workers in {row['dtype']} to TP{change['tp']}: {change['moving_ms']:.1f} ms between steps, "
            f"{change['bytes_exchanged'] / 1e6:.1f} MB, longest step {change['longest_step_ms']:.1f} ms"
        )
    for kind, off in row["off"].items():
        yield (
            f"workers in {row['dtype']}, {off['tokens']} tokens at {kind}: log-probability off by "
            f"{off['largest']:.2g}, {off['mean']:.2g} on average"
        )
