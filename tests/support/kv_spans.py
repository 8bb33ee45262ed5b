"""The tokens that each sequence of an instance had when the KV of each layer was converted."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from bus.precisions import KVPrecision
from worker.distributed.messages import ConvertKV
from worker.morph.target import Target


class KVSpans:
    """Notes them from now on, whatever runs the instance; make it in the engine's thread."""

    def __init__(self, target: Target) -> None:
        self._scheduler = target.instance.scheduler
        self._num_layers = len(target.instance.shape)
        self._counts: dict[KVPrecision, dict[str, dict[int, int]]] = {
            "int8": defaultdict(dict),
            "full": defaultdict(dict),
        }
        carry_out = target.carry_out

        def noting(action: Any) -> None:
            if isinstance(action, ConvertKV):
                for seq in self._scheduler.running:
                    noted = self._counts[action.precision][seq.request.request_id]
                    noted[action.layer] = seq.num_computed_tokens
            carry_out(action)

        target.carry_out = target.instance.executor.carry_out = noting  # type: ignore[method-assign]

    def of(self, name: str) -> list[tuple[int, float]]:
        """Return the spans of `RoundedCache` for a request that came before the KV was back in full."""
        first, end = self._counts["int8"][name], self._counts["full"][name]
        return [(first.get(i, 0), end.get(i, math.inf)) for i in range(self._num_layers)]

    def was_there(self, name: str) -> bool:
        """Return whether the request ran while each layer was converted, there and back."""
        return all(len(counts[name]) == self._num_layers for counts in self._counts.values())
