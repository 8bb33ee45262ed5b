"""The costs of work in the model of eight GPUs: Qwen2.5-32B on H20, from Table 1 of Gyges and a spec sheet.

========  =======================  ========================  =======================================
degree    longest sequence         one instance, tokens/s    used as
========  =======================  ========================  =======================================
1         3.75K                    448                       its KV cache, for all its sequences; the
2         41.25K                   670                       tokens, prompt and output, that it gets
4         120.5K                   767                       through where all requests are short
========  =======================  ========================  =======================================

The table gives one rate and a request has two phases, so one number more is needed: prompts are computed
at half of an H20's 148 TFLOP/s (2 FLOP for each of 32.5e9 weights and token). What is left of the table's
time for a short request is its output's. A step costs the sum over its tokens, whatever their number: the
table tells nothing of batches, and a cost of this form gives its rates exactly. A degree makes both phases
faster by the ratio of the table's rates. Attention's share that grows with the context is left out.

A transform changes one of 64 layers in a step. Until it is over all its members run at the rate of the higher
degree, less 1 % (§6.2.3: "an overhead of less than 1 %"), and no step is shorter than 1/64 of the 2240 ms
that §3.4 measured for the KV cache's exchange on a single SM.
"""

from __future__ import annotations

from instar.simulate.calibration import (
    VERSION,
    CalibratedMemory,
    Coverage,
    Degree,
    EngineCalibration,
    EngineLimits,
    MorphCosts,
    StepCosts,
    TransformCosts,
)

K = 1024
TOKENS_AT = {1: int(3.75 * K), 2: int(41.25 * K), 4: int(120.5 * K)}
RATE = {1: 448.0, 2: 670.0, 4: 767.0}
NUM_LAYERS = 64
TRANSFORM_SLOWDOWN = 1.01
SHORTEST_TRANSFORM_STEP_S = 2.240 / NUM_LAYERS
CHUNK_TOKENS = 512  # tokens of one step: decodes, and the rest for prompts

SHORT_PROMPT, SHORT_OUTPUT = 1 * K, 118  # output: 10.3 % of the whole, §5
LONG_PROMPT, LONG_OUTPUT = 50 * K, 4096  # a minute in a group of 4: the next one overlaps it, as in Figure 13

PEAK_FLOPS, WEIGHTS = 148e12, 32.5e9
PEAK_SHARE = 0.5


def prompt_token_s(peak_share: float = PEAK_SHARE) -> float:
    """Return the seconds for a token of a prompt at degree 1."""
    return 2 * WEIGHTS / (peak_share * PEAK_FLOPS)


def output_token_s(peak_share: float = PEAK_SHARE) -> float:
    """Return the seconds for a token of an output at degree 1, so that the table's rate results."""
    whole_s = (SHORT_PROMPT + SHORT_OUTPUT) / RATE[1]
    return (whole_s - SHORT_PROMPT * prompt_token_s(peak_share)) / SHORT_OUTPUT


def calibration() -> EngineCalibration:
    """Return the costs as those of a simulated instance."""
    block_tokens = 16
    kv_blocks = TOKENS_AT[1] // block_tokens
    return EngineCalibration(
        version=VERSION,
        model="Qwen2.5-32B",
        source="Table 1 of Gyges; nothing is measured",
        num_layers=NUM_LAYERS,
        order=list(range(NUM_LAYERS)),
        limits=EngineLimits(TOKENS_AT[4], 256, CHUNK_TOKENS, block_tokens),
        memory=CalibratedMemory(
            page_bytes=1,
            kv_pages=kv_blocks * NUM_LAYERS,
            kv_blocks=kv_blocks,
            spare_pages=0,
            layer_pages={"full": 2},
            attention_pages={"full": 1},
        ),
        step=StepCosts(0.0, prompt_token_s(), output_token_s(), 0.0),
        below_full={},
        morph=MorphCosts(0.0, 0.0, share=1.0),
        covers=Coverage(running=256, prompt_tokens=TOKENS_AT[4], precisions=["full"]),
        transform=TransformCosts(
            layer_s=SHORTEST_TRANSFORM_STEP_S,
            slowdown=TRANSFORM_SLOWDOWN,
            degrees={tp: Degree(RATE[tp] / RATE[1], TOKENS_AT[tp]) for tp in (2, 4)},
        ),
    )
