"""The work of a recorded run, and the time that it took: what a calibration is fitted to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from bus.precisions import Precision
from instar.replay.files import RunFile

LONGEST_GAP_S: Final = 5.0  # between two samples


@dataclass(frozen=True, slots=True)
class Work:
    """The work of an instance in some time, with a share of its halves in each precision below full."""

    seconds: float
    steps: float
    prompt_tokens: float
    decodes: float
    kv_tokens: float
    shares: dict[Precision, float]

    @property
    def prompt(self) -> list[float]:
        return [self.prompt_tokens]

    @property
    def rest(self) -> list[float]:
        return [self.steps, self.decodes, self.kv_tokens]


def work_of(run: RunFile) -> Iterator[Work]:
    """Yield the work between each two samples of an instance, alone in its worker and of one shape."""
    samples = run.observed.get("samples", [])
    for before, after in pairwise(samples):
        if after["at_s"] - before["at_s"] > LONGEST_GAP_S:
            continue
        for name, last in after["instances"].items():
            first = before["instances"].get(name, {})
            if "step_s" not in first or "step_s" not in last or first["halves"] != last["halves"]:
                continue
            if (steps := last["steps"] - first["steps"]) <= 0:
                continue
            facts = run.observed.get("instances", {}).get(name, {})
            held = (first["kv_used"] + last["kv_used"]) / 2 * (facts.get("block_tokens") or 0)
            num_halves = sum(last["halves"].values())
            yield Work(
                seconds=last["step_s"] - first["step_s"],
                steps=steps,
                prompt_tokens=last["prompt_tokens"] - first["prompt_tokens"],
                decodes=last["output_tokens"] - first["output_tokens"],
                kv_tokens=steps * held,
                shares={p: n / num_halves for p, n in last["halves"].items() if p != "full" and n},
            )


def work_of_requests(run: RunFile, block_tokens: int) -> Iterator[Work]:
    """Yield a step of each request that had a second token, with what ran when it was half done."""
    samples = run.observed.get("samples", [])
    if not samples:
        return
    for one in run.outcomes:
        if one.tpot_s is None or one.first_s is None or one.last_s is None:
            continue
        half_s = (one.first_s + one.last_s) / 2
        sample = min(samples, key=lambda sample, half_s=half_s: abs(sample["at_s"] - half_s))  # type: ignore[misc]
        shapes = list(sample["instances"].values())
        if len(shapes) != 1 or shapes[0].get("layers_below_full") or not shapes[0].get("running"):
            continue
        begun = [o.prompt_asked for o in run.outcomes if o.first_s and one.first_s < o.first_s <= one.last_s]
        steps = max(1, one.num_output - 1)
        running, used = shapes[0]["running"], shapes[0].get("kv_used") or 0
        yield Work(one.tpot_s, 1.0, sum(begun) / steps, running, used * block_tokens, {})
