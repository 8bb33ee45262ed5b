"""Models that `bench.placement` deploys, and the profiles that their fingerprints would give.

All is arithmetic of one RTX A6000, the device of iServe's testbed. Nothing here is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from bus.deployments import (
    Configuration,
    Intent,
    LatencySample,
    LinkKind,
    LinkSample,
    MemorySample,
    Profile,
)

DEVICE_BYTES = 48 * 10**9
USABLE = 0.9  # share of a device's memory
BANDWIDTH, BANDWIDTH_SHARE = 768e9, 0.7  # bytes a second, and what a decode gets of it
FLOPS, FLOPS_SHARE = 155e12, 0.5  # half precision, dense; and what a prompt gets of it
ALL_REDUCE_S, ALL_REDUCE_BYTES_S = 20e-6, 50e9  # over NVLink between two: to begin with, and then
ELEMENT_BYTES, BLOCK_TOKENS = 2, 16
STEP_S = 1e-3  # time of a step beside its layers: sampling, launches
DEGREES = (1, 2)
LINKS: tuple[LinkKind, ...] = ("all_reduce", "hop")


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    num_layers: int
    hidden: int
    ffn: int  # all of its matrices' columns together, by hidden
    kv_width: int  # keys and values each
    vocabulary: int

    @property
    def attention_weights(self) -> int:
        return 2 * self.hidden**2 + 2 * self.hidden * self.kv_width

    @property
    def layer_weights(self) -> int:
        return self.attention_weights + self.hidden * self.ffn

    @property
    def other_weights(self) -> int:
        return 2 * self.vocabulary * self.hidden

    def layer_s(self, tokens: int, context: float, tp: int) -> float:
        """Return the seconds of a step of one sequence in a layer: of its bytes or products, the longer."""
        kv_bytes = 2 * context * self.kv_width * ELEMENT_BYTES
        bytes_s = (self.layer_weights * ELEMENT_BYTES + kv_bytes) / (BANDWIDTH * BANDWIDTH_SHARE)
        flops_s = 2 * self.layer_weights * tokens / (FLOPS * FLOPS_SHARE)
        exchanged = 2 * tokens * self.hidden * ELEMENT_BYTES
        reduce_s = 2 * ALL_REDUCE_S + exchanged / ALL_REDUCE_BYTES_S if tp > 1 else 0.0
        return max(bytes_s, flops_s) / tp + reduce_s

    def seconds(self, num_layers: int, tp: int, prompt: int, output: int) -> float:
        prefill = STEP_S + num_layers * self.layer_s(prompt, prompt / 2, tp)
        decode = STEP_S + num_layers * self.layer_s(1, prompt + output / 2, tp)
        return prefill + (output - 1) * decode


ARCHITECTURES = {
    one.name: one
    for one in (
        Architecture("Llama-2-7B", 32, 4096, 3 * 11008, 4096, 32000),
        Architecture("Llama-2-13B", 40, 5120, 3 * 13824, 5120, 32000),
        Architecture("GPT-J-6B", 28, 4096, 2 * 16384, 4096, 50400),
        Architecture("Falcon-7B", 32, 4544, 2 * 18176, 64, 65024),
    )
}


def profile_of(one: Architecture, intent: Intent) -> Profile:
    """Return the profile of fingerprints of one and two layers at each degree, with the intent's prompt.

    A layer's time contains what ranks exchange, so links between them take nothing more.
    """
    configurations = [Configuration(tp=tp) for tp in DEGREES]
    return Profile(
        model=one.name,
        digest="",
        device="RTX A6000",
        version="",
        num_layers=one.num_layers,
        block_bytes_per_layer=2 * BLOCK_TOKENS * one.kv_width * ELEMENT_BYTES,
        block_tokens=BLOCK_TOKENS,
        latency=[
            LatencySample(
                num_layers=layers,
                configuration=configuration,
                prompt_tokens=intent.prompt_tokens,
                output_tokens=output,
                batch_size=1,
                seconds=[one.seconds(layers, configuration.tp, intent.prompt_tokens, output)],
            )
            for configuration in configurations
            for layers in (1, 2)
            for output in (1, 33)
        ],
        memory=[
            MemorySample(
                num_layers=layers,
                configuration=configuration,
                weight_bytes=ELEMENT_BYTES * (one.other_weights + layers * one.layer_weights),
                activation_bytes=configuration.tp * 10**9,
            )
            for configuration in configurations
            for layers in (1, 2)
        ],
        links=[
            LinkSample(kind=kind, nbytes=nbytes, seconds=[0.0]) for kind in LINKS for nbytes in (1, 1 << 40)
        ],
        row_bytes=ELEMENT_BYTES * one.hidden,
    )
