"""Time per token of a mixture of experts and of dense models that read as many weights, on the CPU.

    python -m bench.engine experts [--like gpt-oss] [--quick] [--threads 2]

The mixture has about 100M parameters. It is shaped like Qwen3-30B-A3B (128 experts, 8 of them for a token,
3/8 as wide as the model), or like GPT-OSS 20B (32 experts, 4 of them for a token, as wide as the model, with
biases and sinks). It decodes one sequence and 16. With one sequence a step reads the weights of the experts
of a token; the dense model's FFN is as wide as these. With 16 sequences a step reads the experts that any of
them uses. How many that are is measured, and another dense model's FFN is as wide as these. The steps of all
models take turns; medians are compared. Bar: within 1.3 of the dense model. Beside it stands the ratio at 16
sequences to the dense model of a token's experts, whose weights each token passes through but which reads far
fewer.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import bench.common.own_cores  # noqa: F401 before torch, as the next
import kernels  # before torch: it settles how torch's threads wait
from bench.common.results import bar, conclude, parser, say, say_bars

# isort: split
from transformers import GptOssConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from bench.common.engines import INSTANCE, EngineShape, greedy, load_engine, silence, take_turns, timed
from bench.common.machine import describe_machine
from kernels import Routing
from worker.engine.engine import Engine
from worker.model import Model

BAR = 1.3
SEQUENCES = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
WARM_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """A mixture of about 100M parameters; `names` are what its config calls experts and their width."""

    config: type[PreTrainedConfig]
    architecture: str
    layers: int
    experts: int
    top_k: int
    width: int
    names: tuple[str, str]
    options: dict[str, Any] = field(default_factory=dict)

    def mixture(self) -> PreTrainedConfig:
        experts, width = self.names
        return self.config(
            **SHAPE,
            **self.options,
            **{experts: self.experts, width: self.width},
            architectures=[self.architecture],
            num_hidden_layers=self.layers,
            num_experts_per_tok=self.top_k,
        )

    def dense(self, experts: int) -> PreTrainedConfig:
        """Return the config of a dense model with FFNs as wide as some experts together."""
        return Qwen3Config(
            **SHAPE,
            architectures=["Qwen3ForCausalLM"],
            num_hidden_layers=self.layers,
            intermediate_size=experts * self.width,
        )


SHAPES = {
    "qwen3-moe": MixtureShape(
        config=Qwen3MoeConfig,
        architecture="Qwen3MoeForCausalLM",
        layers=4,
        experts=128,
        top_k=8,
        width=144,
        names=("num_experts", "moe_intermediate_size"),
        options={"norm_topk_prob": True},
    ),
    "gpt-oss": MixtureShape(
        config=GptOssConfig,
        architecture="GptOssForCausalLM",
        layers=6,
        experts=32,
        top_k=4,
        width=384,
        names=("num_local_experts", "intermediate_size"),
        options={"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    ),
}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--like", choices=SHAPES, default="qwen3-moe", help="the shape of the mixture")
    options.add_argument("--quick", action="store_true", help="32 steps instead of 256")
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    silence()
    machine = describe_machine()
    kernels.configure(args.threads)
    steps, shape = 32 if args.quick else 256, SHAPES[args.like]
    with counted_experts(shape.layers) as in_use:
        one, many = (Decoding(shape.mixture(), n, steps) for n in (1, SEQUENCES))
        used_by_many = [in_use(many.step) for _ in range(WARM_STEPS)]
        used = round(statistics.mean(used_by_many))
    say(f"{SEQUENCES} sequences use {used} of {shape.experts} experts of a layer, one uses {shape.top_k}")
    dense = Decoding(shape.dense(shape.top_k), 1, steps)
    wide, narrow = (Decoding(shape.dense(n), SEQUENCES, steps) for n in (used, shape.top_k))
    turns = {"1": one, "1 dense": dense, "16": many, "16 dense": wide, "16 dense of a token": narrow}
    seconds = take_turns({name: partial(timed, each.step) for name, each in turns.items()}, steps, WARM_STEPS)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in median.items():
        say(f"{name:>20}: {value * 1e3:6.2f} ms a step ({min(seconds[name]) * 1e3:.2f} at best)")
    ratios = {
        "1 sequence": median["1"] / median["1 dense"],
        "16 sequences": median["16"] / median["16 dense"],
        "16 sequences, dense of a token": median["16"] / median["16 dense of a token"],
    }
    result = {
        "bench": "experts",
        "like": args.like,
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "step_ms": {name: round(value * 1e3, 3) for name, value in median.items()},
        "experts_in_use": used,
        "parameters": one.num_weights,
        "quick": args.quick,
        "threads": args.threads,
    } | machine
    bars = {
        f"{name} against dense": bar(BAR, round(ratios[name], 3), ratios[name] < BAR)
        for name in ("1 sequence", "16 sequences")
    }
    say(f"16 sequences against a dense model of a token's: {ratios['16 sequences, dense of a token']:.2f}")
    say_bars(bars)
    return conclude(result, is_kept=not args.quick, bars=bars)


class Decoding:
    """A model of random weights that decodes some sequences, a step at a time."""

    def __init__(self, config: PreTrainedConfig, sequences: int, steps: int) -> None:
        with tempfile.TemporaryDirectory(prefix="instar-bench-") as folder:
            config.save_pretrained(folder)
            shape = EngineShape(max_num_seqs=sequences, max_model_len=512)
            self.engine: Engine = load_engine(Path(folder), shape, 768, load_format="dummy")
        model = self.engine.instances[INSTANCE].model
        assert isinstance(model, Model)
        kernels.choose_products(model.products(), f"bench experts {config.architectures}")
        self.num_weights = model.size.weights // model.dtype.itemsize
        for i in range(sequences):
            prompt = [(i * 131 + j * 37) % 8000 for j in range(16)]
            self.engine.submit(INSTANCE, greedy(str(i), prompt, steps + 8 * WARM_STEPS))
        self.engine.step()  # all prompts

    def step(self) -> None:
        self.engine.step()


@contextlib.contextmanager
def counted_experts(layers: int) -> Iterator[Callable[[Callable[[], object]], float]]:
    """Yield a call that runs a step and returns the mean number of experts that each of the layers used.

    A recorded step routes into the same memory each time, so what was returned at its recording shows.
    """
    seen: dict[int, list[Routing]] = {}

    def noted(logits: Any, *options: Any) -> Routing:
        made = kernels.route(logits, *options)
        seen.setdefault(logits.shape[0], []).append(made)
        return made

    def in_use(step: Callable[[], object]) -> float:
        step()
        last = seen[SEQUENCES][-layers:]
        return statistics.mean(int((each.bounds.diff() > 0).sum()) for each in last)

    with mock.patch("worker.model.experts.route", noted):
        yield in_use
