"""Logits equal Hugging Face transformers', for every family, however the tokens arrive."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.oracles import FAMILIES, make_oracle
from tests.support.families import EVERY_FAMILY
from tests.support.model_folders import Runner
from worker.model import Model, Shard
from worker.model.cut import heads_of
from worker.model.layer import build_attention, build_feed_forward
from worker.model.layout import degrees
from worker.model.weights import tensors_of

# Float32 on both sides; only the order of sums differs.
EXACT = {"rtol": 1e-4, "atol": 1e-4}

# In half precision transformers rounds at other places (its rotary tables and attention weights are rounded,
# ours are float32). Measured against the float32 logits, ours may be off by this much of transformers' own
# error in the same dtype.
HALF_ERROR_SHARE = 1.15

Folder = tuple[Any, Path]
# What few options make a difference to; the rest of the families runs with the slow tests.
SOME = pytest.mark.parametrize("saved", EVERY_FAMILY, indirect=True)


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    oracle = make_oracle(request.param)
    folder = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(folder, max_shard_size="60KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return oracle, folder


def tokens(n: int, seed: int = 0) -> list[int]:
    made: list[int] = torch.randint(0, 211, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return made


def expected(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = oracle(torch.tensor([token_ids])).logits[0].float()
    return logits


def test_a_whole_prefill_gives_the_same_logits(saved: Folder) -> None:
    oracle, folder = saved
    runner = Runner(folder)
    prompt = tokens(37)
    torch.testing.assert_close(runner.step({0: prompt}), expected(oracle, prompt), **EXACT)
    runner.close()


@SOME
def test_chunks_of_a_prefill_give_the_same_logits(saved: Folder) -> None:
    oracle, folder = saved
    runner = Runner(folder)
    prompt = tokens(41)
    parts = [prompt[:7], prompt[7:8], prompt[8:30], prompt[30:]]
    logits = torch.cat([runner.step({0: part}) for part in parts])
    torch.testing.assert_close(logits, expected(oracle, prompt), **EXACT)
    runner.close()


def test_decodes_and_chunks_of_many_sequences_in_one_step_give_the_same_logits(saved: Folder) -> None:
    oracle, folder = saved
    runner = Runner(folder)
    sequences = {seq: tokens(20 + 3 * seq, seed=seq) for seq in range(5)}
    wanted = {seq: expected(oracle, ids) for seq, ids in sequences.items()}
    at = dict.fromkeys(sequences, 0)
    step = 0
    while any(at[seq] < len(ids) for seq, ids in sequences.items()):
        step += 1
        chunks = {}
        for seq, ids in sequences.items():
            size = 9 if (seq + step) % 3 == 0 else 1
            if at[seq] < len(ids):
                chunks[seq] = ids[at[seq] : at[seq] + size]
        logits = runner.step(chunks)
        for (seq, chunk), got in zip(
            chunks.items(), logits.split([len(chunk) for chunk in chunks.values()]), strict=True
        ):
            torch.testing.assert_close(got, wanted[seq][at[seq] : at[seq] + len(chunk)], **EXACT)
            at[seq] += len(chunk)
    runner.close()


@SOME
def test_only_the_rows_asked_for_get_logits(saved: Folder) -> None:
    oracle, folder = saved
    runner = Runner(folder)
    first, second = tokens(12), tokens(9, seed=1)
    logits = runner.step({0: first, 1: second}, rows=[20, 3, 11])
    assert logits.shape == (3, 211) and logits.dtype == torch.float32
    whole = torch.cat([expected(oracle, first), expected(oracle, second)])
    torch.testing.assert_close(logits, whole[[20, 3, 11]], **EXACT)
    assert runner.step({0: tokens(4)}, rows=[]).shape == (0, 211)
    follow = runner.step({0: [5]})  # the step without rows left its keys and values all the same
    torch.testing.assert_close(follow, expected(oracle, [*first, *tokens(4), 5])[-1:], **EXACT)
    runner.close()


@SOME
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_half_precision_is_as_close_to_float32_as_transformers_is(
    saved: Folder, tmp_path: Path, dtype: torch.dtype
) -> None:
    oracle, folder = saved
    if hasattr(oracle.config, "num_experts_per_tok"):  # which experts rounding makes a router choose is luck
        oracle, folder = make_oracle("mixtral", num_experts_per_tok=4), tmp_path
        oracle.save_pretrained(folder)
    runner = Runner(folder, dtype=dtype)
    prompt = tokens(60)
    exact = expected(oracle, prompt)
    ours = torch.cat([runner.step({0: prompt[:20]}), runner.step({0: prompt[20:]})]) - exact
    theirs = expected(copy.deepcopy(oracle).to(dtype), prompt) - exact
    assert ours.square().mean().sqrt() < HALF_ERROR_SHARE * theirs.square().mean().sqrt()
    runner.close()


SCALINGS: dict[str, dict[str, Any]] = {
    "plain, another base": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.5, 2.0, 4.0, 9.0],
}


@pytest.mark.parametrize(("context", "lengths"), [(256, (150, 65)), (64, (64, 50))])
def test_longrope_gives_the_same_logits_to_long_sequences_and_where_only_short_ones_are_served(
    tmp_path: Path, context: int, lengths: tuple[int, ...]
) -> None:
    """Tests of the engine hold what short sequences get beside long ones: that is its choice."""
    oracle = make_oracle(
        "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64, sliding_window=None
    )
    oracle.save_pretrained(tmp_path)
    runner = Runner(tmp_path, context=context)
    for seq, length in enumerate(lengths):
        prompt = tokens(length, seed=seq)
        logits = torch.cat([runner.step({seq: prompt[:30]}), runner.step({seq: prompt[30:]})])
        torch.testing.assert_close(logits, expected(oracle, prompt), **EXACT)
    runner.close()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scalings_give_the_same_logits(tmp_path: Path, scaling: str) -> None:
    oracle = make_oracle("llama", rope_parameters=SCALINGS[scaling])
    oracle.save_pretrained(tmp_path)
    runner = Runner(tmp_path)
    prompt = tokens(150)
    logits = torch.cat([runner.step({0: prompt[:100]}), runner.step({0: prompt[100:]})])
    torch.testing.assert_close(logits, expected(oracle, prompt), **EXACT)
    runner.close()


@SOME
@pytest.mark.parametrize("max_tp", [2, 4])
def test_padding_for_tensor_parallelism_changes_no_logit(saved: Folder, max_tp: int) -> None:
    _, folder = saved
    plain, padded = Runner(folder), Runner(folder, max_tp=max_tp)
    prompt = tokens(25)
    is_split = max_tp in degrees(plain.model.config, max_tp)
    is_padded = padded.model.size.padding > plain.model.size.padding
    assert is_padded == is_split or plain.model.config.mixture  # experts may fit without
    torch.testing.assert_close(padded.step({0: prompt}), plain.step({0: prompt}), **EXACT)
    plain.close()
    padded.close()


@pytest.mark.parametrize("size", [2, 4])
def test_the_sum_over_the_shards_is_the_whole_layer(saved: Folder, size: int) -> None:
    _, folder = saved
    runner = Runner(folder, max_tp=size)
    model, config = runner.model, runner.model.config
    layer, stored = model._transformer.layers[1], model._weights.layers[1]
    x = torch.randn(9, config.hidden_size)
    plan = runner._plan({0: tokens(9)})
    cos_sin = model._transformer.cos_sin[layer.attention.rope]
    whole_kv = torch.zeros(128, *runner.kv.block_shape)
    whole = layer.attention(x, plan, whole_kv, cos_sin)
    parts = []
    for rank in range(size):
        _, heads = heads_of(config.num_heads, config.num_kv_heads, Shard(rank, size))
        kv = torch.zeros(128, len(heads), *runner.kv.block_shape[1:])
        part = build_attention(config, stored.attention.tensors, Shard(rank, size), config.sliding_windows[1])
        parts.append(part(x, plan, kv, cos_sin))
        torch.testing.assert_close(kv, whole_kv[:, heads.start : heads.stop], **EXACT)
    torch.testing.assert_close(sum(parts), whole, **EXACT)
    memory, whole_plan = stored.feed_forward.memory, model.plan.layers[1][1]
    fed = [
        build_feed_forward(config, tensors_of(memory, whole_plan.at(shard)), shard=shard)(x)
        for shard in (Shard(rank, size) for rank in range(size))
    ]
    torch.testing.assert_close(sum(fed), layer.feed_forward(x), **EXACT)
    runner.close()


@SOME
def test_every_shard_of_the_ffn_ends_on_a_page(saved: Folder) -> None:
    _, folder = saved
    runner = Runner(folder, max_tp=4)
    model: Model = runner.model
    for layer in model._weights.layers if 4 in degrees(model.config, 4) else ():
        # Experts, and units of other FFNs, begin with gate_up.
        gate_up = layer.feed_forward.tensors["gate_up"]
        unit_bytes = gate_up.stride(0) * gate_up.itemsize
        for size in (1, 2, 4):
            for rank in range(size):
                units = Shard(rank, size).part(gate_up.shape[0], "units")
                begin = gate_up.data_ptr() + units.start * unit_bytes
                assert begin % 4096 == 0 and (units.stop - units.start) * unit_bytes % 4096 == 0
    runner.close()
