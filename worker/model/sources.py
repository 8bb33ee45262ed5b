"""Sources of weights: a safetensors checkpoint, or random numbers."""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from worker.model.config import ModelConfig, ModelError
from worker.model.layout import CheckpointTensor, whole_sources

FLOATS = ("F32", "BF16", "F16", "F64")
_LAYER = re.compile(r".*?\.\d+\.")  # the beginning of a layer's tensors
# Tensors that some checkpoints have beside the weights: tables that every model can compute.
_TABLES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

# With 0.02, the usual initialisation, greedy output of a random model repeats one token.
DUMMY_STD = 0.06

# Elements that are written at a time: some MiB, which a slow disk has in a tenth of a second.
PIECE_ELEMENTS = 1 << 20
# An open file keeps in memory what was read of it, and opening one of thousands of tensors takes
# milliseconds, which would be most of the time for small experts: it is opened again after so many bytes.
REOPEN_BYTES = 1 << 24
_SIZES = {"F64": 8, "BF16": 2, "F16": 2}


class WeightSource(Protocol):
    """A source of weight values."""

    depends_on_device: bool  # True if the values differ between devices

    def check(self, sources: Iterable[CheckpointTensor]) -> None:
        """Check that every tensor is there with its shape, reading no weights. Raises ModelError."""

    def fill(
        self,
        targets: Sequence[torch.Tensor],
        source: CheckpointTensor,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        """Write a tensor's values into `targets`, in their dtype, and call `pause` after each PIECE_ELEMENTS.

        targets: its runs of rows (`CheckpointTensor.targets`). Raises ModelError, and what `pause` raises.
        """

    def close(self) -> None:
        """Close what is still open for the next tensors, which can be read all the same."""


class CheckpointWeights:
    """The tensors of model.safetensors, or of the shards that its index names."""

    depends_on_device = False

    def __init__(self, folder: Path) -> None:
        """Find each tensor's file. Raises ModelError: no checkpoint, or a missing shard."""
        self.folder = folder
        self._file_of = _files_of_tensors(folder)
        self._last: tuple[Path, Any] | None = None  # the file that was read last
        self._bytes_read = 0  # of it

    def check(self, sources: Iterable[CheckpointTensor]) -> None:
        wanted = list({(source.tensor, source.shape): source for source in sources}.values())
        missing = [source.tensor for source in wanted if source.tensor not in self._file_of]
        if missing:
            shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            raise ModelError(f"{self.folder}: the checkpoint has no tensor {shown}")
        if unknown := self._unknown_tensors({source.tensor for source in wanted}):
            shown = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} more" if len(unknown) > 4 else "")
            raise ModelError(
                f"{self.folder}: the checkpoint has {shown}, of which config.json says nothing; it may be the"
                " config of another model"
            )
        by_file: dict[Path, list[CheckpointTensor]] = {}
        for source in wanted:
            by_file.setdefault(self._file_of[source.tensor], []).append(source)
        for path, group in by_file.items():
            with _open(path) as file:
                for source in group:
                    _check_tensor(file, path, source.tensor, source.shape, FLOATS)

    def _unknown_tensors(self, wanted: set[str]) -> list[str]:
        """Return the tensors beside the wanted ones in the same layers, and biases of wanted weights.

        A model that is computed without them gives other tokens.
        """
        layers = {found[0] for tensor in wanted if (found := _LAYER.match(tensor))}
        biases = {tensor.removesuffix("weight") + "bias" for tensor in wanted if tensor.endswith(".weight")}
        return [
            tensor
            for tensor in self._file_of
            if tensor not in wanted
            and not tensor.endswith(_TABLES)
            and (tensor in biases or ((found := _LAYER.match(tensor)) and found[0] in layers))
        ]

    def check_stored(self, tensor: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
        """Check that a tensor is there with this shape and one of these dtypes. Raises ModelError."""
        if tensor not in self._file_of:
            raise ModelError(f"{self.folder}: the checkpoint has no tensor {tensor}")
        with _open(self._file_of[tensor]) as file:
            _check_tensor(file, self._file_of[tensor], tensor, shape, dtypes)

    def stored(self, source: CheckpointTensor) -> Iterator[tuple[str, int]]:
        """Yield the stored tensors that a tensor of the model is made from, each with its rows."""
        yield source.tensor, source.shape[0]

    def fill(
        self,
        targets: Sequence[torch.Tensor],
        source: CheckpointTensor,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        expert, columns = source.expert, source.columns
        shape = source.shape if expert is None else source.shape[1:]
        kept = source.rows or range(shape[0])
        if columns and len(shape) == 1:
            kept, columns = columns, None
        with self.opened(source.tensor, pause) as stored:
            for rows in pieces((len(kept), *shape[1:])):
                taken = kept[rows]
                span = slice(taken[0], taken[-1] + 1)
                where = (span, slice(columns.start, columns.stop)) if columns else (span,)
                piece = stored[where] if expert is None else stored[slice(expert, expert + 1), *where][0]
                piece = piece.to(targets[0].device)  # a GPU transposes and rounds faster
                piece = piece[:: taken.step]
                piece = piece[:, :: columns.step] if columns else piece
                if source.is_transposed:
                    write_columns(targets, rows, piece.T)
                else:
                    write_rows(targets, rows, piece)
                pause()
        if source.offset:
            for target in targets:
                target.add_(source.offset)

    def has(self, tensor: str) -> bool:
        return tensor in self._file_of

    def read(self, tensor: str, rows: slice | None = None) -> torch.Tensor:
        """Read a tensor or some of its rows, in the checkpoint's dtype. Raises ModelError."""
        with self.opened(tensor) as stored:
            read: torch.Tensor = stored[rows or slice(None)]
            return read

    @contextmanager
    def opened(self, tensor: str, pause: Callable[[], object] = lambda: None) -> Iterator[Any]:
        """Yield a tensor whose rows are read when they are used. Raises ModelError.

        pause: called after each piece of what must be computed before.
        """
        path = self._file_of.get(tensor)
        if path is None:
            raise ModelError(f"{self.folder}: the checkpoint has no tensor {tensor}")
        try:
            yield self._slice(path, tensor)
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {tensor}: {error}") from error

    def close(self) -> None:
        self._last = None

    def _slice(self, path: Path, tensor: str) -> Any:
        """Return a tensor of the file that is open; it is opened anew after REOPEN_BYTES."""
        for _ in range(2):
            last = self._last  # another thread may close it
            if last is None or last[0] != path:
                self._last = last = path, _open(path)
                self._bytes_read = 0
            stored = last[1].get_slice(tensor)
            size = math.prod(stored.get_shape()) * _SIZES.get(stored.get_dtype(), 4)
            if not self._bytes_read or self._bytes_read + size <= REOPEN_BYTES:
                break
            self._last = None
        self._bytes_read += size
        return stored


class RandomWeights:
    """Normal values, the same for the same seed, tensor, shape and device; norms are ones."""

    depends_on_device = True

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __repr__(self) -> str:
        return f"random weights of seed {self.seed}"

    def check(self, sources: Iterable[CheckpointTensor]) -> None:
        """Accept every tensor."""

    def close(self) -> None:
        """Do nothing."""

    def fill(
        self,
        targets: Sequence[torch.Tensor],
        source: CheckpointTensor,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        first = targets[0]
        if source.is_norm:
            first.fill_(1.0)
            return
        generator = torch.Generator(first.device)
        # Parts of one tensor on several ranks differ.
        part = f" {source.rows}" if source.rows else ""
        if source.expert is not None or source.columns:
            part += f" {source.expert} {source.columns}"
        name = f"{self.seed} {source.tensor}{part}"
        generator.manual_seed(zlib.crc32(name.encode()))  # a CPU's uses 32 bits
        shape = (sum(map(len, targets)), *first.shape[1:])
        for rows in pieces(shape):  # the same values however they are divided
            values = first.new_empty(rows.stop - rows.start, *shape[1:])
            write_rows(targets, rows, values.normal_(0.0, DUMMY_STD, generator=generator))
            pause()


def write_rows(targets: Sequence[torch.Tensor], rows: slice, piece: torch.Tensor) -> None:
    """Write `piece` to these rows of the targets, whose rows follow each other."""
    begin = 0
    for target in targets:
        end = begin + target.shape[0]
        first, last = max(begin, rows.start), min(end, rows.stop)
        if first < last:
            target[first - begin : last - begin].copy_(piece[first - rows.start : last - rows.start])
        begin = end


def write_columns(targets: Sequence[torch.Tensor], columns: slice, piece: torch.Tensor) -> None:
    """Write `piece`, which has the rows of all targets, to these columns of them."""
    for target, part in zip(targets, piece.split([len(target) for target in targets]), strict=True):
        target[:, columns].copy_(part)


def pieces(shape: Sequence[int]) -> Iterator[slice]:
    """Yield the rows of a tensor of this shape, PIECE_ELEMENTS at a time."""
    at_once = max(1, PIECE_ELEMENTS // math.prod(shape[1:]))
    for first in range(0, shape[0], at_once):
        yield slice(first, min(first + at_once, shape[0]))


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise ModelError(
                f"{folder}: neither {single.name} nor {index.name} in it; weights must be safetensors"
                f" (`instar convert` makes them of GGUF and .bin files)"
            )
        with _open(single) as file:
            return dict.fromkeys(file.keys(), single)
    try:
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        found = {tensor: folder / name for tensor, name in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(f"{index}: not an index of shards: {error!r}") from error
    for path in sorted(set(found.values())):
        if not path.is_file():
            raise ModelError(f"{folder}: shard {path.name} is missing; {index.name} names it")
    return found


def _check_tensor(file: Any, path: Path, tensor: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
    try:
        stored = file.get_slice(tensor)
    except SafetensorError as error:
        raise ModelError(f"{path}: no tensor {tensor} in it, where the index says it is") from error
    if tuple(stored.get_shape()) != shape:
        raise ModelError(
            f"{path}: tensor {tensor} has shape {list(stored.get_shape())}; config.json says {list(shape)}"
        )
    if stored.get_dtype() not in dtypes:
        raise ModelError(f"{path}: tensor {tensor} is {stored.get_dtype()}; supported: {', '.join(dtypes)}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from error


def checkpoint_digest(config: ModelConfig, checkpoint: CheckpointWeights) -> str:
    """Return a SHA-256, as hex, that identifies the checkpoint wherever its files lie, and of any rank.

    It covers sizes, rotary frequencies, and the first and last row of every tensor: a few MB are read from a
    checkpoint of any size. Raises ModelError.
    """
    config = config.whole
    digest = hashlib.sha256(repr((config.num_heads, config.num_kv_heads, config.norm_eps)).encode())
    digest.update(repr((config.rope, config.sliding_windows)).encode())
    if config.ready:
        digest.update(repr(config.ready).encode())
    if own := _own_options(config):
        digest.update(repr(own).encode())
    by_tensor = {source.tensor: source for source in whole_sources(config)}
    sources = [by_tensor[tensor] for tensor in sorted(by_tensor)]
    for source in sources:
        for tensor, num_rows in checkpoint.stored(source):
            rows = [checkpoint.read(tensor, slice(at, at + 1)) for at in (0, num_rows - 1)]
            digest.update(f"{tensor} {source.shape} {rows[0].dtype}".encode())
            for row in rows:
                digest.update(row.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _own_options(config: ModelConfig) -> dict[str, object]:
    """Return the options that change results and that a Llama has not, where they are set."""
    found = {
        "local rope": config.local_rope,
        "long rope": config.rope.long_inv_freq,
        "activation": config.activation if config.activation != "silu" else "",
        "scale": config.attention_scale,
        "softcaps": any(caps := (config.attention_softcap, config.logit_softcap)) and caps,
        "block": config.block if config.block != "sequential" else "",
        "mixture": config.mixture,
        "shared expert": config.mixture and config.mixture.num_shared,
    }
    return {name: value for name, value in found.items() if value}
