"""Models whose latency and memory are known formulas, and the profiles that measuring them would give."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from bus.deployments import Configuration, Intent, LatencySample, LinkKind, LinkSample, MemorySample, Profile
from bus.precisions import Precision

SPEED: dict[Precision, float] = {"full": 1.0, "int8": 0.8, "int4": 0.6}
BITS: dict[Precision, int] = {"full": 32, "int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Seconds and bytes; `layers` of the whole model."""

    layers: int = 32
    other: float = 2e-3  # of a step beside the layers
    layer: float = 4e-4
    per_token: float = 2e-6  # a prompt's, in each layer
    attention: float = 0.0  # a prompt's, per token squared, in each layer
    per_sequence: float = 2e-5  # a batch's, in each layer
    per_context: float = 1e-8  # a decode's, for each token before it, in each layer
    serial: float = 0.3
    hop: float = 0.0
    all_reduce: float = 0.0  # of two ranks, of any size
    embedding_bytes: int = 8 << 20
    layer_bytes: int = 16 << 20
    attention_share: float = 0.25  # of a layer: every rank has it
    activation_bytes: int = 3 << 20
    stage_bytes: int = 1 << 19

    def _degree(self, one: Configuration) -> float:
        return SPEED[one.precision] * (self.serial + (1 - self.serial) / one.tp)

    def said(self, layers: int, one: Configuration) -> float:
        """The seconds of messages in a step of stages and ranks, a ring. A rank says that it is ready and is
        called."""
        hops = self.hop * one.pp if one.pp > 1 else 0.0
        sums = 2 * layers * self.all_reduce * 2 * (one.tp - 1) / one.tp
        return hops + (sums + 2 * self.hop if one.tp > 1 else 0.0)

    def ttft(self, layers: int, one: Configuration, prompt: int, batch: int) -> float:
        """The part of its own work."""
        work = self.layer + batch * prompt * self.per_token + batch * prompt**2 * self.attention
        return (self.other + layers * work) * self._degree(one)

    def tpot(self, layers: int, one: Configuration, context: float, batch: int) -> float:
        """The part of its own work."""
        work = self.layer + batch * self.per_sequence + batch * context * self.per_context
        return (self.other + layers * work) * self._degree(one)

    def seconds(self, layers: int, one: Configuration, prompt: int, batch: int, output: int) -> float:
        """Return the seconds of its own work, step by step, as an engine would."""
        steps = (self.tpot(layers, one, prompt + done, batch) for done in range(1, output))
        return self.ttft(layers, one, prompt, batch) + sum(steps)

    def weights(self, layers: int, one: Configuration) -> int:
        layer = int(self.layer_bytes * BITS[one.precision] / 32)
        ends = self.embedding_bytes if one.pp == 1 else 0  # of several stages the leader alone has them
        repeated = ends + int(layers * layer * self.attention_share)
        return self.embedding_bytes + layers * layer + (one.tp - 1) * repeated

    def activations(self, one: Configuration) -> int:
        return one.tp * self.activation_bytes + (one.pp * self.stage_bytes if one.pp > 1 else 0)

    def latency(self, one: Configuration, intent: Intent) -> float:
        """Return the latency of a batch that goes through stages at once."""
        output = intent.output_tokens
        own = self.seconds(self.layers, one, intent.prompt_tokens, intent.batch_size, output)
        return own + output * self.said(self.layers, one)

    def memory(self, one: Configuration, intent: Intent) -> int:
        blocks = intent.batch_size * -(-(intent.prompt_tokens + intent.output_tokens) // BLOCK_TOKENS)
        return self.weights(self.layers, one) + self.activations(one) + blocks * self.layers * BLOCK_BYTES


BLOCK_TOKENS, BLOCK_BYTES = 16, 1 << 15
ROW_BYTES = 4096
LINKS: tuple[LinkKind, LinkKind] = ("all_reduce", "hop")
SINGLE = Configuration()
PAIR = Configuration(tp=2)
STAGED = Configuration(pp=2)


def profile_of(
    truth: Truth,
    *,
    configurations: Sequence[Configuration] = (SINGLE,),
    sizes: Sequence[int] = (1, 2),
    shapes: Sequence[tuple[int, int]] = ((64, 1), (256, 1), (64, 4), (256, 4)),
    outputs: Sequence[int] = (1, 33),
    noise: float = 0.0,
    repetitions: int = 1,
    outliers: bool = False,
    loss: dict[Precision, float] | None = None,
    has_links: bool = True,
    max_num_batched_tokens: int = 1 << 20,
    seed: int = 0,
) -> Profile:
    """`shapes`: prompt and batch. Latency is measured of one stage."""
    rng = random.Random(seed)

    def measured(seconds: float) -> list[float]:
        values = [seconds * (1 + rng.gauss(0, noise)) for _ in range(repetitions)]
        return [values[0] * 3, *values[1:]] if outliers else values

    return Profile(
        model="m",
        digest="d",
        device="cpu",
        version="1",
        num_layers=truth.layers,
        block_bytes_per_layer=BLOCK_BYTES,
        block_tokens=BLOCK_TOKENS,
        latency=[
            LatencySample(
                num_layers=layers,
                configuration=one,
                prompt_tokens=prompt,
                output_tokens=output,
                batch_size=batch,
                seconds=measured(truth.seconds(layers, one, prompt, batch, output)),
            )
            for one in configurations
            if one.pp == 1
            for layers in sizes
            for prompt, batch in shapes
            for output in outputs
        ],
        memory=[
            MemorySample(
                num_layers=layers,
                configuration=one,
                weight_bytes=truth.weights(layers, one),
                activation_bytes=truth.activations(one),
            )
            for one in configurations
            for layers in sizes
            if layers >= one.pp
        ],
        loss=loss or {},
        links=[
            LinkSample(kind=kind, nbytes=rows * ROW_BYTES, seconds=measured(seconds))
            for kind, seconds in zip(LINKS, (truth.all_reduce, truth.hop), strict=True)
            for rows in (1, 8, 64, 512)
            if has_links
        ],
        row_bytes=ROW_BYTES,
        max_num_batched_tokens=max_num_batched_tokens,
    )
