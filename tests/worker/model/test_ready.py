"""Checkpoints that are AWQ or GPTQ alone: what they compute, and what is refused before memory is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.loading import load_fingerprint
from bench.common.oracles import make_oracle
from bus.messages import LayerShape
from bus.precisions import Precision
from tests.support.model_folders import Runner, make_pool
from tests.support.ready_models import Ready
from tests.support.variant_models import Morphing
from worker.model import ModelError, read_config, ready_weights
from worker.model.layer import FeedForward
from worker.model.ready_weights import QuantizedCheckpoint, open_checkpoint
from worker.model.shard import Shard
from worker.model.sources import checkpoint_digest
from worker.offline.__main__ import main
from worker.profiler.fingerprint import CutPlan
from worker.shape.copier import GivenUp

EXACT = {"rtol": 2e-4, "atol": 2e-4}
SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
PROMPT = [int(i) for i in torch.randint(211, (31,), generator=torch.Generator().manual_seed(2))]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    make_oracle("llama", **SIZES).save_pretrained(folder)
    return folder


def logits(runner: Runner) -> torch.Tensor:
    """Return the logits of a prompt in two chunks, then of a decode."""
    return torch.cat(
        [runner.step({0: PROMPT[:20]}), runner.step({0: PROMPT[20:30]}), runner.step({0: PROMPT[30:]})]
    )


FORMS: dict[str, dict[str, Any]] = {
    "AWQ": {"method": "awq"},
    "GPTQ": {},
    "GPTQ of 8 bits": {"bits": 8, "v2": True},
    "GPTQ with one scale": {"group": -1},
    "activation-ordered GPTQ": {"is_ordered": True},
    "activation-ordered GPTQ of 8 bits": {"is_ordered": True, "bits": 8, "v2": True},
}


@pytest.mark.parametrize("max_tp", [1, 2])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_it_computes_what_its_dense_twin_does(
    form: dict[str, Any], max_tp: int, full: Path, tmp_path: Path
) -> None:
    ready = Ready(full, **form)
    made = Morphing(ready.write(tmp_path / "q"), tmp_path, max_tp=max_tp)
    twin = Runner(ready.write_twin(tmp_path / "twin"))
    precision: Precision = "int8" if ready.bits == 8 else "int4"
    assert made.variants.precisions == [precision]
    made.swap_all(precision)
    assert made.model.shape() == [LayerShape(attention=precision, ffn=precision)] * 2
    torch.testing.assert_close(logits(made.runner), logits(twin), **EXACT)
    step = made.model._transformer._recorded._steps[1]
    assert step.program is not None  # the reordering is a kernel too
    made.close()
    twin.close()


def test_the_order_of_the_inputs_matters(full: Path, tmp_path: Path) -> None:
    """The test above would notice inputs that were left in place."""
    ordered, plain = Ready(full, is_ordered=True), Ready(full)
    runners = [Runner(one.write_twin(tmp_path / name)) for one, name in ((ordered, "a"), (plain, "b"))]
    assert not torch.allclose(*map(logits, runners), **EXACT)
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("is_ordered", [False, True])
def test_the_shares_of_two_ranks_add_up_to_the_whole(is_ordered: bool, full: Path, tmp_path: Path) -> None:
    ready = Ready(full, is_ordered=is_ordered)
    made = Morphing(ready.write(tmp_path / "q"), tmp_path, max_tp=2)
    made.swap_all("int4")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    gate, up, down = (ready.twin[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    total = torch.zeros_like(expected)
    for rank in range(2):
        half = made.variants.ranges.half((1, "ffn", "int4"), Shard(rank, 2))
        assert isinstance(half, FeedForward)
        total += half(x)
    torch.testing.assert_close(total, expected, **EXACT)
    made.close()


def test_layers_in_a_pipelines_stage_are_read_by_their_numbers(full: Path, tmp_path: Path) -> None:
    ready = Ready(full, is_ordered=True)
    folder = ready.write(tmp_path / "q")
    stage = read_config(folder).part(1, 2)
    matrix = open_checkpoint(stage).read("model.layers.1.mlp.down_proj.weight")
    torch.testing.assert_close(matrix, ready.twin["model.layers.1.mlp.down_proj.weight"])


def test_reading_a_matrix_can_be_stopped_in_the_middle(
    full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_weights, "PIECE_ELEMENTS", 200)
    ready = Ready(full, is_ordered=False)
    checkpoint = open_checkpoint(read_config(ready.write(tmp_path / "q")))
    assert isinstance(checkpoint, QuantizedCheckpoint)
    name, pauses = "model.layers.1.mlp.down_proj", list[None]()

    def give_up() -> None:
        pauses.append(None)
        if len(pauses) == 3:
            raise GivenUp

    with pytest.raises(GivenUp):
        checkpoint.matrix(name, give_up)
    torch.testing.assert_close(checkpoint.matrix(name).dense(), ready.twin[f"{name}.weight"])


def test_a_fingerprint_is_measured_in_the_precision_that_there_is(full: Path, tmp_path: Path) -> None:
    ready = Ready(full, is_ordered=True)
    folder, pool = ready.write(tmp_path / "q"), make_pool()
    plan = CutPlan(read_config(folder), ["int4"], dtype=torch.float32, page_bytes=4096)
    fingerprint = load_fingerprint(plan, pool)
    assert pool.num_pages - pool.num_free == plan.num_pages
    twin = Runner(ready.write_twin(tmp_path / "twin"))
    expected = twin.step({0: PROMPT})
    fingerprint.use(2, "int4")
    twin.model, model = fingerprint.model, twin.model
    twin._lengths.clear()
    torch.testing.assert_close(twin.step({0: PROMPT}), expected, **EXACT)
    twin.model = model
    fingerprint.release()
    assert pool.num_free == pool.num_pages
    twin.close()


def test_the_digest_changes_with_codes_scales_order_and_format(full: Path, tmp_path: Path) -> None:
    def digest_of(name: str, ready: Ready) -> str:
        config = read_config(ready.write(tmp_path / name))
        return checkpoint_digest(config, open_checkpoint(config))

    changed = Ready(full)
    changed.tensors["model.layers.1.mlp.up_proj.scales"] = (
        changed.tensors["model.layers.1.mlp.up_proj.scales"] * 2
    )
    digests = [
        digest_of("a", Ready(full)),
        digest_of("b", changed),
        digest_of("c", Ready(full, is_ordered=True)),
        digest_of("d", Ready(full, v2=True)),
    ]
    assert len(set(digests)) == len(digests)
    assert digest_of("e", Ready(full)) == digests[0]


# ---------------------------------------------------------------------------- what is refused

UP = "model.layers.1.mlp.up_proj"
Q = "model.layers.0.self_attn.q_proj"


def without(name: str) -> Callable[[Ready], object]:
    return lambda ready: ready.tensors.pop(name)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Ready], object]:
    return lambda ready: ready.tensors.update({name: change(ready.tensors[name])})


REFUSED: list[tuple[Callable[[Ready], object], str]] = [
    (without(f"{UP}.scales"), rf"the checkpoint has no tensor {UP}\.scales"),
    (without(f"{UP}.qweight"), rf"the checkpoint has no tensor {UP}\.qweight"),
    (without(f"{UP}.g_idx"), rf"the checkpoint has no tensor {UP}\.g_idx"),
    (
        changed(f"{UP}.qzeros", lambda x: x[:1]),
        rf"{UP}\.qzeros has shape \[1, 24\]; config\.json says \[2, 24\]",
    ),
    (changed(f"{UP}.qweight", lambda x: x.long()), rf"{UP}\.qweight is I64; supported: I32"),
    (changed(f"{UP}.g_idx", lambda x: x * 0), rf"{UP}\.g_idx does not put 32 inputs into each group"),
    (
        changed(f"{Q}.g_idx", lambda x: x.flip(0)),
        rf"{Q} and .*k_proj read one input and group it in different",
    ),
    (
        lambda ready: ready.tensors.update({f"{UP}.bias": torch.ones(192)}),
        rf"{UP}\.bias is a bias that models of",
    ),
    (without("model.norm.weight"), r"no tensor model\.norm\.weight"),
    (
        lambda ready: ready.changes.update(desc_act=False),
        r"order of activations, and config\.json says desc_act",
    ),
    (
        lambda ready: ready.changes.update(quant_method="bitsandbytes"),
        "'bitsandbytes' is not supported; supported: awq",
    ),
    (lambda ready: ready.changes.update(bits=3), "gptq with bits 3 is not supported; supported: 4"),
    (
        lambda ready: ready.changes.update(group_size=48),
        "group_size 48 is not supported; supported: -1 and multiples of",
    ),
    (
        lambda ready: ready.changes.update(checkpoint_format="marlin"),
        "checkpoint_format 'marlin' is not supported",
    ),
    (lambda ready: ready.changes.update(lm_head=True), "lm_head True is not supported"),
    (lambda ready: ready.changes.update(dynamic={"+:.*": {"bits": 8}}), "dynamic .* is not supported"),
    (lambda ready: ready.changes.update(quant_method="awq", version="gemv"), "AWQ version 'gemv'"),
]


@pytest.mark.parametrize(("spoil", "complaint"), REFUSED, ids=[complaint[:40] for _, complaint in REFUSED])
def test_it_is_refused_by_name_before_a_page_is_taken(
    spoil: Callable[[Ready], object], complaint: str, full: Path, tmp_path: Path
) -> None:
    ready = Ready(full, is_ordered=True)
    spoil(ready)
    with pytest.raises(ModelError, match=complaint):
        config = read_config(ready.write(tmp_path / "q"))
        plan = CutPlan(config, ["int4"], dtype=torch.float32, page_bytes=4096).model
        open_checkpoint(config).check([source for part in plan.ranges() for source in part.sources])


def test_a_bias_of_zeros_that_some_tools_write_is_no_reason(full: Path, tmp_path: Path) -> None:
    ready = Ready(full)
    ready.tensors[f"{UP}.bias"] = torch.zeros(192)
    Runner(ready.write(tmp_path / "q")).close()


@pytest.mark.parametrize("command", ["quantize", "profile"])
def test_it_has_nothing_to_quantise_or_to_profile(
    command: str, full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(Ready(full).write(tmp_path / "q"))]) == 2
    assert "its layers are in int4 alone (gptq), which is served as it is" in capsys.readouterr().err
