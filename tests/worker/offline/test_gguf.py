"""GGUF files become model folders that are what transformers reads in them, or are refused by name."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.peers.gguf_file import write_gguf
from bus.tokenizer_folder import load_tokenizer
from gateway.text.template import read_template
from gateway.text.tokenizer import Tokenizer
from tests.bus.test_sentencepiece import own, train
from tests.support.gguf_models import SIZES, make_folder, transformers_reading
from tests.support.model_folders import Runner
from tests.support.tiny_model import CHAT_TEMPLATE, END, TEXT
from worker.model.config import ModelError, read_config
from worker.offline.__main__ import main
from worker.offline.gguf_checkpoint import _of_pre_tokenizer, convert_gguf, readable_types
from worker.offline.gguf_header import read_header

EXACT = {"rtol": 1e-4, "atol": 1e-4}  # float32 on both sides; only the order of sums differs
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


def tokens(n: int) -> list[int]:
    made: list[int] = torch.randint(0, 400, (n,), generator=torch.Generator().manual_seed(0)).tolist()
    return made


def assert_same_logits(folder: Path, model: Any) -> None:
    runner, prompt = Runner(folder), tokens(37)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(runner.step({0: prompt}), wanted, **EXACT)
    runner.close()


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("llama", "F16", {}),
        ("qwen2", "Q8_0", {}),
        ("llama, multi-head, tied", "Q4_0", {}),
        pytest.param("qwen3", "BF16", {"head_dim": 128}, marks=pytest.mark.slow),
        pytest.param("llama", "F32", {}, marks=pytest.mark.slow),
        pytest.param("llama with wide heads", "Q5_1", {}, marks=pytest.mark.slow),
    ],
)
def test_weights_logits_and_texts_are_those_that_transformers_reads(
    family: str, kind: str, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path / "m", family, **options)
    path, made = write_gguf(tmp_path / "m", kind, has_bos=True), tmp_path / "made"
    assert main(["convert", str(path), str(made)]) == 0
    theirs = transformers_reading(path, is_quantised=kind not in FLOATS)
    found, wanted = stored(made), theirs.state_dict()
    is_tied = theirs.config.tie_word_embeddings
    assert found.keys() == wanted.keys() - ({"lm_head.weight"} if is_tied else set())
    for name, tensor in found.items():
        assert tensor.dtype == (FLOATS.get(kind, torch.float16) if tensor.dim() > 1 else torch.float32), name
        assert torch.equal(tensor.float(), wanted[name]), name
    assert_same_logits(made, theirs)
    config = read_config(made)
    assert config.dtype == FLOATS.get(kind, torch.bfloat16)
    assert (config.max_position_embeddings, config.has_tied_embeddings) == (256, is_tied)
    ours, before = Tokenizer(made, 400), load_tokenizer(tmp_path / "m")
    for text in (TEXT, f"a {END} b", "  two spaces\n\tand a tab", ""):
        assert load_tokenizer(made).encode(text).ids == before.encode(text).ids
    assert ours.stop_token_ids == (1,)
    template = read_template(made, {})
    assert template is not None and template.default == CHAT_TEMPLATE
    numel = sum(tensor.numel() for tensor in found.values())
    told = capsys.readouterr().out
    assert f"model.gguf: {numel / 1e6:.1f} million weights in {kind}, F32. " in told or kind == "F32"
    assert f"A worker takes {4 * numel / 1e6:.1f} MB for them in float32" in told
    assert not list(tmp_path.glob(".*"))


def test_a_pre_tokenizer_that_is_not_known_is_told(folder: Path) -> None:
    header = read_header(write_gguf(folder))
    assert _of_pre_tokenizer(header) == ""
    header.metadata["tokenizer.ggml.pre"] = "smollm"
    assert "its pre-tokenizer, 'smollm', is not known, and GPT-2's is taken" in _of_pre_tokenizer(header)


def test_a_large_file_becomes_several_and_what_a_killed_run_left_is_not_used(tmp_path: Path) -> None:
    make_folder(tmp_path / "m")
    left = tmp_path / ".made.converting"
    left.mkdir()
    (left / "part-00009.safetensors").write_text("half of a file")
    convert_gguf(write_gguf(tmp_path / "m"), tmp_path / "made", group_bytes=100_000)
    assert len(list((tmp_path / "made").glob("model-*-of-*.safetensors"))) > 3
    assert not list((tmp_path / "made").glob("*part*"))
    for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items():
        assert torch.equal(stored(tmp_path / "made")[name], tensor), name
    with pytest.raises(ModelError, match="made: exists already"):
        convert_gguf(tmp_path / "m" / "model.gguf", tmp_path / "made")


# ------------------------------------------------------------------------------------- SentencePiece


@pytest.mark.slow
def test_a_sentencepiece_vocabulary_gives_the_ids_of_its_library(tmp_path: Path) -> None:
    make_folder(tmp_path / "m")
    library = own(train(tmp_path / "sp", vocab_size=400))

    def kind_of(piece: int) -> int:
        is_one = (library.is_unknown(piece), library.is_control(piece), library.is_byte(piece))
        kinds = (gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.BYTE)
        return int(
            next((kind for kind, yes in zip(kinds, is_one, strict=True) if yes), gguf.TokenType.NORMAL)
        )

    def add(writer: Any) -> None:
        pieces = range(library.get_piece_size())
        writer.add_tokenizer_model("llama")
        writer.add_token_list([library.id_to_piece(piece) for piece in pieces])
        writer.add_token_scores([library.get_score(piece) for piece in pieces])
        writer.add_token_types([kind_of(piece) for piece in pieces])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    convert_gguf(write_gguf(tmp_path / "m", add_tokenizer=add), tmp_path / "made")
    tokenizer = load_tokenizer(tmp_path / "made")
    for text in ("hello world", "def f(self):\n    return 1", "Größe 🌍 你好!", "x"):
        ids = tokenizer.encode(text).ids
        assert ids == [1, *library.encode(text)], text
        assert tokenizer.decode(ids) == text


# ------------------------------------------------------------------------------------- rotary frequencies

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_the_factors_of_llama_3_become_its_scaling(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path / "m", rope_parameters=LLAMA3)
    scaled = oracle.model.rotary_emb.inv_freq
    factors = 500000.0 ** (-torch.arange(0, 8, 2) / 8) / scaled
    assert factors[0] == 1.0 and 1.0 < factors[2] < 8.0  # some are between
    path = write_gguf(tmp_path / "m", add=lambda to: to.add_tensor("rope_freqs.weight", factors.numpy()))
    convert_gguf(path, tmp_path / "made")
    torch.testing.assert_close(torch.tensor(read_config(tmp_path / "made").rope.inv_freq), scaled)
    assert_same_logits(tmp_path / "made", oracle)


@pytest.mark.slow
def test_a_linear_scaling_is_kept(tmp_path: Path) -> None:
    oracle = make_folder(
        tmp_path / "m", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    )

    def add(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    convert_gguf(write_gguf(tmp_path / "m", add=add), tmp_path / "made")
    assert_same_logits(tmp_path / "made", oracle)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma2", {}),
        ("gemma3", {"num_hidden_layers": 7, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}),
    ],
)
def test_a_gemma_has_its_norms_windows_and_softcaps(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    oracle = make_folder(tmp_path / "m", family, head_dim=16, query_pre_attn_scalar=16, **options)
    weights = tmp_path / "m" / "model.safetensors"
    shifted = {name: one + name.endswith("norm.weight") for name, one in load_file(weights).items()}
    save_file(shifted, weights)  # as llama.cpp has them

    def add(writer: Any) -> None:
        writer.add_sliding_window(oracle.config.sliding_window)
        if family == "gemma2":
            writer.add_attn_logit_softcapping(oracle.config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(oracle.config.final_logit_softcapping)

    convert_gguf(write_gguf(tmp_path / "m", architecture=family, add=add), tmp_path / "made")
    assert_same_logits(tmp_path / "made", oracle)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_are_taken_out_of_the_tensors_that_stack_them(kind: str, tmp_path: Path) -> None:
    oracle = make_folder(tmp_path / "m", "qwen3 moe")

    def add(writer: Any) -> None:
        writer.add_expert_count(16)
        writer.add_expert_used_count(3)
        writer.add_expert_feed_forward_length(32)

    path = write_gguf(tmp_path / "m", kind, architecture="qwen3moe", add=add)
    convert_gguf(path, tmp_path / "made")
    found, before = stored(tmp_path / "made"), load_file(tmp_path / "m" / "model.safetensors")
    assert found.keys() == before.keys()
    if kind == "F32":
        assert all(torch.equal(found[name], one) for name, one in before.items())
        assert_same_logits(tmp_path / "made", oracle)
    for name, tensor in before.items():
        if tensor.dim() > 1:
            quantised = gguf.quantize(tensor.numpy(), gguf.GGMLQuantizationType[kind])
            values = torch.from_numpy(gguf.dequantize(quantised, gguf.GGMLQuantizationType[kind]))
            assert torch.equal(found[name], values.to(found[name].dtype)), name


# ------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gguf") / "m"
    make_folder(made)
    return made


def refusal(path: Path, tmp_path: Path) -> str:
    with pytest.raises(ModelError) as refused:
        convert_gguf(path, tmp_path / "made")
    assert not list(tmp_path.glob("*made*")), "nothing is left"
    told = str(refused.value)
    assert str(path) in told and "\n" not in told
    return told


def add_tensor(name: str, kind: str = "F32") -> Callable[[Any], object]:
    number = gguf.GGMLQuantizationType[kind]
    values = np.zeros((2, gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
    return lambda writer: writer.add_tensor(name, values, raw_dtype=number)


@pytest.mark.parametrize(
    ("add", "says"),
    [
        (lambda to: to.add_expert_count(8), "llama.expert_count is 8, which is not supported"),
        (lambda to: to.add_logit_scale(0.5), "llama.logit_scale is 0.5, which is not supported"),
        (lambda to: to.add_sliding_window(0), ""),
        (
            lambda to: to.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            "rope scaling 'yarn' is not supported",
        ),
        (lambda to: to.add_uint16("split.count", 3), "one of 3 parts of a model; `llama-gguf-split --merge`"),
        (
            add_tensor("blk.0.attn_sinks.weight"),
            "tensor blk.0.attn_sinks.weight, which no LlamaForCausalLM here has",
        ),
        (add_tensor("rope_freqs.weight"), "rope_freqs.weight is [2, 1] of F32; it must be [4] of F32"),
        (
            lambda to: to.add_tensor("rope_freqs.weight", np.array([1, 3, 5, 7], np.float32)),
            "the factors in rope_freqs.weight are not those of Llama 3.1 to 3.3",
        ),
        (
            add_tensor("x", "Q8_K"),
            "tensor x is Q8_K, which the package gguf (0.19.0) does not dequantise; these",
        ),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(
    add: Callable[[Any], object], says: str, folder: Path, tmp_path: Path
) -> None:
    path = write_gguf(folder, add=add)
    if says:
        assert says in refusal(path, tmp_path)
    else:  # off
        convert_gguf(path, tmp_path / "made")


def test_an_architecture_is_refused_with_those_that_are_supported(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    told = refusal(tmp_path / "x.gguf", tmp_path)
    assert (
        "architecture 'mamba' is not supported in a GGUF file; these are: llama, qwen2, qwen3, qwen3moe, "
        in told
    )


def test_a_disk_that_is_too_small_is_told_before_a_weight_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=2_000_000))
    monkeypatch.setattr("worker.offline.gguf_checkpoint._read", None)
    told = refusal(write_gguf(folder, "F16"), tmp_path)
    assert (
        "of safetensors, and the disk of" in told
        and "has 2.0 MB free; free 6" in told
        and "XDG_CACHE_HOME" in told
    )


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_values_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    oracle = make_folder(tmp_path / "m")
    oracle.model.norm.weight.data[3] = value
    oracle.save_pretrained(tmp_path / "m")
    told = refusal(write_gguf(tmp_path / "m"), tmp_path)
    assert "tensor output_norm.weight has values that float32 does not hold; the file is broken" in told


def changed(at: int, code: str, value: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + struct.pack(code, value) + content[at + struct.calcsize(code) :]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: b"", "not a GGUF file"),
        (lambda content: b"PK" + content[2:], "not a GGUF file; one begins with the letters GGUF"),
        (lambda content: content[:-1000], "cut short: tensor '"),
        (lambda content: content[:300], "not a whole GGUF file: its header is cut short; download it again"),
        (changed(4, "<I", 9), "of version 9; GGUF of versions 2 and 3"),
        (changed(4, ">I", 3), "written for big-endian processors"),
        (changed(8, "<Q", 1 << 60), "it would have 1152921504606846976 tensors"),
        (changed(16, "<Q", 1 << 60), "it would have 1152921504606846976 keys"),
        (changed(24, "<Q", 1 << 60), "its header is cut short"),
        (
            lambda content: content.replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"),
            "no tensor blk.1.ffn_up.weight in it",
        ),
        (
            lambda content: content.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"),
            "two tensors 'blk.0.ffn_up.weight'",
        ),
    ],
)
def test_a_broken_file_is_refused_by_name(
    change: Callable[[bytes], bytes], says: str, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(change(write_gguf(folder, "F16").read_bytes()))
    assert says in refusal(path, tmp_path)


@pytest.mark.slow
def test_a_file_that_is_cut_anywhere_is_refused(folder: Path, tmp_path: Path) -> None:
    content = write_gguf(folder, "Q8_0").read_bytes()
    path = tmp_path / "cut.gguf"
    for end in range(0, len(content), len(content) // 400):
        path.write_bytes(content[:end])
        with pytest.raises(ModelError, match=r"cut short|not a GGUF file"):
            read_header(path)


def test_every_type_but_those_of_sums_and_integers_is_read() -> None:
    assert {"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"} <= set(readable_types())
    assert not {"Q8_1", "Q8_K", "I8", "I32"} & set(readable_types())


def test_the_header_has_every_tensor_and_leaves_arrays_out(folder: Path) -> None:
    header = read_header(write_gguf(folder, "Q4_0"))
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["tokenizer.ggml.tokens"].length == load_tokenizer(folder).get_vocab_size()
    up = header.tensors["blk.1.ffn_up.weight"]
    assert up.shape == (SIZES["intermediate_size"], SIZES["hidden_size"])
    assert (up.kind_name, up.row_bytes, up.nbytes) == ("Q4_0", 36, 192 * 36)
    theirs = {one.name: one.data_offset for one in gguf.GGUFReader(folder / "model.gguf").tensors}
    assert {name: one.first for name, one in header.tensors.items()} == theirs
