"""`instar convert`: a model folder of a GGUF file of llama.cpp, whose weights are dequantised once.

What is stored as floats keeps its dtype and its bits. What is quantised becomes float16, by the package
`gguf`, which llama.cpp's authors publish. Where the result changes, CONVERSION in instar/serve/models.py gets
another number. Everything is checked before the first weight is read: architecture, options, the name, shape
and type of each tensor, and the room on the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final

import gguf
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from bus.tokenizer_folder import TokenizerError, load_tokenizer
from worker.model.config import ModelConfig, ModelError, read_config
from worker.model.layout import whole_sources
from worker.model.sources import pieces
from worker.offline.gguf_config import (
    ROPE_FACTORS,
    GgufFamily,
    check_rope_factors,
    config_of,
    family_of,
    generation_config_of,
)
from worker.offline.gguf_header import GgufHeader, GgufTensor, read_header
from worker.offline.new_folder import GROUP_BYTES, name_files, new_folder
from worker.offline.progress import ProgressLine, say

# Types that keep their bits; the dtype of what is quantised.
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DEQUANTISED: Final = torch.float16
_FILES_BYTES: Final = 64 << 20  # for the tokenizer and the configs
_EXPERT: Final = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
# Pre-tokenizers of byte-level BPE that transformers splits as llama.cpp does; any other is read as GPT-2's.
_PRE_TOKENIZERS: Final = (
    "gpt-2",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "smaug-bpe",
    "tekken",
    "qwen2",
    "deepseek-r1-qwen",
    "megrez",
)
Renamed = dict[str, GgufTensor]  # by the names that the tensors have in a Hugging Face folder


def convert_gguf(source: Path, target: Path, group_bytes: int = GROUP_BYTES) -> None:
    """Make a model folder `target` of a GGUF file.

    Raises ModelError: a file that is broken or not supported, a target that exists, a disk that is too small;
    OSError.
    """
    header = read_header(source)
    family, dtype = family_of(header), _served_dtype(header)
    raw = config_of(header, dtype)
    _check_types(header)
    with new_folder(target) as folder:
        for left in folder.iterdir():  # by a run that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        _write_json(folder / "config.json", raw)
        config = read_config(folder)
        check_rope_factors(header, config, raw["rope_theta"])
        renamed = _renamed(header, config)
        _check_room(source, folder, renamed)
        say(_notice(source, renamed, config.dtype))
        if told := _of_pre_tokenizer(header):
            say(told)
        _write_tokenizer(source, folder)
        if stops := generation_config_of(header):
            _write_json(folder / "generation_config.json", stops)
        name_files(folder, _write_weights(source, folder, renamed, family, config, group_bytes))


def readable_types() -> list[str]:
    """Return the names of the types that can be dequantised."""
    return [kind.name for kind in gguf.GGML_QUANT_SIZES if _is_readable(kind)]


def _is_readable(kind: int) -> bool:
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, size), np.uint8), gguf.GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True


def _check_types(header: GgufHeader) -> None:
    for kind in {tensor.kind for tensor in header.tensors.values()}:
        if not _is_readable(kind):
            one = next(tensor for tensor in header.tensors.values() if tensor.kind == kind)
            raise ModelError(
                f"{header.path}: tensor {one.name} is {one.kind_name}, which the package gguf "
                f"({version('gguf')}) does not dequantise; these types are read: "
                f"{', '.join(readable_types())}"
            )


def _served_dtype(header: GgufHeader) -> torch.dtype:
    """Return the dtype to serve in on a GPU: that of all matrices, or bfloat16, which overflows nowhere."""
    kinds = {tensor.kind_name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return _FLOATS.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16


def _renamed(header: GgufHeader, config: ModelConfig) -> Renamed:
    """Return the tensors of the model. Raises ModelError: one is missing, left over, or of another shape."""
    architecture = header.metadata["general.architecture"]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_layers)
    found: Renamed = {}
    for source in whole_sources(config):
        module, _, ending = source.tensor.rpartition(".")
        expert = _EXPERT.fullmatch(module)  # of which a file has all in one tensor
        if expert:
            module = f"{expert[1]}.{expert[3]}"
        name = f"{names.get_name(module)}.{ending}"
        if name not in header.tensors:
            raise ModelError(f"{header.path}: no tensor {name} in it ({source.tensor})")
        tensor, shape = header.tensors[name], source.shape
        if expert and config.mixture:
            shape = (config.mixture.num_experts, *shape)
        if tensor.shape != shape:
            raise ModelError(
                f"{header.path}: tensor {name} is {list(tensor.shape)}, and the metadata say {list(shape)}"
            )
        found[source.tensor] = tensor.part(int(expert[2])) if expert else tensor
    used = {tensor.name for tensor in found.values()}
    if left := [name for name in header.tensors if name not in used and name != ROPE_FACTORS]:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ModelError(f"{header.path}: tensor {left[0]}{more}, which no {config.architecture} here has")
    return found


def _dtype_of(tensor: GgufTensor) -> torch.dtype:
    """Return the dtype in which a tensor is stored in the new folder."""
    return _FLOATS.get(tensor.kind_name, _DEQUANTISED)


def _stored_bytes(tensors: Iterable[GgufTensor]) -> int:
    return sum(tensor.numel * _dtype_of(tensor).itemsize for tensor in tensors)


def _check_room(source: Path, folder: Path, renamed: Renamed) -> None:
    need, free = _stored_bytes(renamed.values()) + _FILES_BYTES, shutil.disk_usage(folder).free
    if need > free:
        raise ModelError(
            f"{source}: its {_mb(source.stat().st_size)} become {_mb(need)} of safetensors, and the disk of "
            f"{folder.parent} has {_mb(free)} free; free {_mb(need - free)}, or convert to a folder on "
            "another disk (`instar serve` uses that of XDG_CACHE_HOME)"
        )


def _notice(source: Path, renamed: Renamed, dtype: torch.dtype) -> str:
    """Return what the conversion takes, and what a worker takes for the weights afterwards."""
    numel = sum(tensor.numel for tensor in renamed.values())
    kinds: Counter[str] = Counter()
    for tensor in renamed.values():
        kinds[tensor.kind_name] += tensor.numel
    found = ", ".join(kind for kind, _ in kinds.most_common())
    before, after = source.stat().st_size, _stored_bytes(renamed.values())
    return (
        f"{source.name}: {numel / 1e6:.1f} million weights in {found}. {_mb(before)} become {_mb(after)} on "
        f"the disk. A worker takes {_mb(4 * numel)} for them in float32, the default of CPUs, and "
        f"{_mb(dtype.itemsize * numel)} in {_name(dtype)}, the default of GPUs"
    )


def _of_pre_tokenizer(header: GgufHeader) -> str:
    """Return a warning where texts are split otherwise than llama.cpp splits them before BPE."""
    pre = header.metadata.get("tokenizer.ggml.pre", "")
    if header.metadata.get("tokenizer.ggml.model") != "gpt2" or pre in _PRE_TOKENIZERS:
        return ""
    return (
        f"{header.path.name}: its pre-tokenizer, {pre!r}, is not known, and GPT-2's is taken: "
        "some texts get other tokens than the model was trained on, such as numbers"
    )


def _write_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer and the chat template. Raises ModelError.

    The file is read in a folder of its own: a tokenizer.json beside it would be taken in place of its own.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    try:
        with TemporaryDirectory(prefix="instar-gguf-") as alone:
            (Path(alone) / source.name).symlink_to(source)
            AutoTokenizer.from_pretrained(alone, gguf_file=source.name).save_pretrained(folder)
        load_tokenizer(folder)
    except TokenizerError as error:
        raise ModelError(f"{source}: {error}") from error
    except Exception as error:  # transformers names no narrower one
        told = (str(error) or repr(error)).splitlines()[0]
        raise ModelError(f"{source}: no tokenizer can be made of it: {told}") from error


def _write_weights(
    source: Path, folder: Path, renamed: Renamed, family: GgufFamily, config: ModelConfig, group_bytes: int
) -> dict[str, dict[str, int]]:
    """Write the weights to files of about `group_bytes`. Returns the bytes of each tensor by file."""
    progress = ProgressLine("convert", len(renamed), "tensors")
    made: dict[str, dict[str, int]] = {}
    with source.open("rb") as file:
        for number, names in enumerate(_grouped(renamed, group_bytes), 1):
            group = {}
            for name in names:
                group[name] = _arranged(name, _read(file, renamed[name]), family, config)
                progress.advance()
            path = folder / f"part-{number:05}.safetensors"
            try:
                save_file(group, path, {"format": "pt"})
            except SafetensorError as error:
                raise ModelError(f"{path}: cannot be written: {error}") from error
            path.chmod(0o644)  # the library makes files that only their owner can read
            made[path.name] = {name: tensor.nbytes for name, tensor in group.items()}
    return made


def _grouped(renamed: Renamed, group_bytes: int) -> Iterator[list[str]]:
    """Yield the names in order, in groups of at most `group_bytes`, or of one larger tensor."""
    group: list[str] = []
    size = 0
    for name, tensor in renamed.items():
        needed = _stored_bytes([tensor])
        if group and size + needed > group_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += needed
    yield group


def _read(file: IO[bytes], tensor: GgufTensor) -> torch.Tensor:
    """Read a tensor, some MiB of rows at a time. Raises ModelError: a value that its dtype does not hold."""
    found = torch.empty(tensor.shape, dtype=_dtype_of(tensor))
    rows = found.view(-1, tensor.shape[-1])
    file.seek(tensor.first)
    limit = torch.finfo(found.dtype).max
    for piece in pieces(rows.shape):
        taken = rows[piece]
        raw = np.fromfile(file, np.uint8, len(taken) * tensor.row_bytes).reshape(len(taken), -1)
        values = torch.from_numpy(gguf.dequantize(raw, tensor.kind))
        taken.copy_(values)
        least, most = values.aminmax()  # NaN where there is one
        if not (-limit <= least and most <= limit):
            raise ModelError(
                f"{file.name}: tensor {tensor.name} has values that {_name(found.dtype)} does not "
                "hold; the file is broken"
            )
    return found


def _arranged(name: str, tensor: torch.Tensor, family: GgufFamily, config: ModelConfig) -> torch.Tensor:
    """Return a tensor as Hugging Face has it.

    llama.cpp turns row 2i of a head with row 2i + 1, and its files of Llamas have them so; here row i turns
    with row i + half the head. Its norms multiply by the weight, and Gemma's by 1 more than that.
    """
    if name.endswith("norm.weight"):
        return tensor - family.norm_offset if family.norm_offset else tensor
    heads = {config.names.q: config.num_heads, config.names.k: config.num_kv_heads}
    for module, num_heads in heads.items():
        if family.has_paired_rows and f".{module}." in name:
            return tensor.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
    return tensor


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
