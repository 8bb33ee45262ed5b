"""The time of a step, from a calibration."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bus.precisions import Precision
from instar.simulate.calibration import EngineCalibration


class StepModel:
    """The seconds of steps of one instance; `reshape` when its layers change."""

    def __init__(self, calibration: EngineCalibration) -> None:
        self._calibration, self._costs = calibration, calibration.step

    def reshape(self, halves: Mapping[Precision, int]) -> None:
        """Take note of the number of halves in each precision."""
        num_halves = 2 * self._calibration.num_layers
        shares: dict[Precision, float] = {
            precision: n / num_halves for precision, n in halves.items() if precision != "full" and n
        }
        self._costs = self._calibration.step_of(shares)

    def seconds(self, num_prompt: int, num_decodes: int, kv_tokens: int) -> float:
        """Return the seconds of a step with so many tokens of prompts, sequences that decode, and KV read."""
        return self._costs.seconds(num_prompt, num_decodes, kv_tokens)

    def ends_alone(self, now_s: float, num_prompt: int, num_output: int, most_tokens: int) -> list[float]:
        """Return when each step of a request ends that begins now and is alone.

        most_tokens: of its prompt in a step; the last of these steps makes the first token.
        """
        ends, left = list[float](), num_prompt
        while left:
            count = min(left, most_tokens)
            read = num_prompt - left + count
            now_s += self.seconds(0, 1, read) if left == 1 else self.seconds(count, 0, read)
            ends.append(now_s)
            left -= count
        return ends + self.ends(now_s, 0, 1, num_prompt + 1, num_output - 1) if num_output > 1 else ends

    def ends(
        self,
        now_s: float,
        num_prompt: int,
        num_decodes: int,
        kv_tokens: int,
        count: int,
        speed: float = 1.0,
        least_s: float = 0.0,
    ) -> list[float]:
        """Return when each of `count` steps ends, the first of which begins now.

        Each computes as many tokens, which the ones after it read. The sums are those of steps taken one by
        one, to the last bit. speed: relative to a worker alone. least_s: of a step.
        """
        costs = self._costs
        prompt_s = num_prompt * costs.prompt_token_s
        base_s = costs.fixed_s + num_decodes * costs.decode_s
        kv = kv_tokens + (num_prompt + num_decodes) * np.arange(count)
        seconds = prompt_s + (base_s + kv * costs.kv_token_s)
        if speed != 1.0 or least_s:
            seconds = np.maximum(least_s, seconds / speed)
        seconds[0] += now_s
        ends: list[float] = np.cumsum(seconds).tolist()
        return ends
