"""transformers' `generate` in a process of its own, which a benchmark asks over a pipe.

The process imports nothing of Instar's kernels: they change how torch's threads wait.
"""

from __future__ import annotations

import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from bench.common.dummy_model import generate, load_transformers
from bench.common.processes import END
from bench.peers.workloads import AT_ONCE, ONE_BY_ONE, PeerLoad, WorkloadValues

NAME: Final = "measure"  # name of the call that is answered


class StepClock:
    """A streamer of `generate` that keeps when each token came, after the prompt that comes first."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.at_s.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: the last token has its time."""


def answer_calls(parent: Connection, folder: Path, load: PeerLoad, threads: int) -> None:
    """Load the model, warm it up, and answer calls ("measure", workload) of `Children` until the end."""
    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = load_transformers(folder)
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        generate(model, [load.warm_up()], load.one_by_one_output)
        parent.send(None)
        while (call := parent.recv())[0] != END:
            try:
                parent.send(_MEASURES[call[1]](model, tokenizer, load))
            except Exception as problem:  # noqa: BLE001 the parent raises it
                parent.send(problem)


def _at_once(model: Any, _: Any, load: PeerLoad) -> WorkloadValues:
    """Measure one static batch of all requests."""
    prompts = load.at_once()
    began = time.perf_counter()
    outputs = generate(model, prompts, load.at_once_output)
    seconds = time.perf_counter() - began
    _check(outputs, load.at_once_output)
    return WorkloadValues({"tokens_per_s": len(prompts) * load.at_once_output / seconds})


def _one_by_one(model: Any, tokenizer: Any, load: PeerLoad) -> WorkloadValues:
    first_s: list[float] = []
    token_s: list[float] = []
    texts: list[str] = []
    for prompt in load.one_by_one():
        clock = StepClock()
        began = time.perf_counter()
        (output,) = generate(model, [prompt], load.one_by_one_output, streamer=clock)
        _check([output], load.one_by_one_output)
        _, first, *_, last = clock.at_s
        first_s.append(first - began)
        token_s.append((last - first) / (load.one_by_one_output - 1))
        texts.append(tokenizer.decode(output))
    values = {"token_ms": 1e3 * statistics.median(token_s), "ttft_ms": 1e3 * statistics.median(first_s)}
    return WorkloadValues(values, texts[0])


def _check(outputs: list[list[int]], num_out: int) -> None:
    if any(len(output) != num_out for output in outputs):
        raise RuntimeError(f"generate made {min(map(len, outputs))} tokens for a request, not {num_out}")


_MEASURES: Final = {AT_ONCE: _at_once, ONE_BY_ONE: _one_by_one}
