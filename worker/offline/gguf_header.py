"""The header of a GGUF file: its metadata, and where its tensors lie. Reads no weights.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. Each length
is compared with what is left of the file before it is used. The reader of the package `gguf` makes objects of
every token, and follows a length that is wrong until memory is full.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gguf

from worker.model.config import ModelError
from worker.offline.bin_shard import shown

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_LEAST_BYTES: Final = 13  # of an entry: two lengths or numbers and a type
_MOST_DIMS: Final = 4
_ALIGNMENT: Final = 32  # where the metadata do not say


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of the metadata, which is not kept."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file. `kind`: its type, a number of ggml; `first`: its first byte in the file."""

    name: str
    shape: tuple[int, ...]  # rows first, as torch has it
    kind: int
    first: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row, which is a whole number of blocks."""
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        return int(self.shape[-1] // block * size)

    @property
    def nbytes(self) -> int:
        return self.numel // self.shape[-1] * self.row_bytes

    def part(self, index: int) -> GgufTensor:
        """Return one of the tensors that are stacked in this one, such as an expert's."""
        return replace(self, shape=self.shape[1:], first=self.first + index * (self.nbytes // self.shape[0]))

    @property
    def kind_name(self) -> str:
        return kind_name(self.kind)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata and the tensors of a file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def kind_name(kind: int) -> str:
    """Return the name of a type of tensors, such as Q4_0; its number if ggml has another one."""
    try:
        return str(gguf.GGMLQuantizationType(kind).name)
    except ValueError:
        return f"number {kind}"


def read_header(path: Path) -> GgufHeader:
    """Read the header of a file. Raises ModelError: none, broken, cut short, or one of several parts."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelError(f"{path}: not a GGUF file; one begins with the letters GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _HeaderReader(path, content).header()


class _HeaderReader:
    """Reads a header from its beginning to its end."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._at = path, content, len(MAGIC)

    def header(self) -> GgufHeader:
        version = self._number("I")
        if version not in _VERSIONS:
            why = (
                "written for big-endian processors"
                if version and not version & 0xFFFF
                else f"of version {version}"
            )
            raise ModelError(f"{self._path}: {why}; GGUF of versions 2 and 3 for this processor is read")
        num_tensors, num_keys = self._count("tensors"), self._count("keys")
        metadata = {self._text(): self._value() for _ in range(num_keys)}
        split = metadata.get("split.count", 1)
        if split != 1:
            raise ModelError(
                f"{self._path}: one of {split} parts of a model; `llama-gguf-split --merge` of llama.cpp "
                "joins them"
            )
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._broken(f"general.alignment is {alignment!r}")
        data = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in described:
            if name in tensors:
                raise self._broken(f"it has two tensors {shown(name)}")
            tensors[name] = self._checked(GgufTensor(name, shape, kind, data + offset))
        return GgufHeader(self._path, metadata, tensors)

    def _checked(self, tensor: GgufTensor) -> GgufTensor:
        """Return a tensor whose bytes are in the file."""
        if tensor.kind not in gguf.GGML_QUANT_SIZES:
            raise ModelError(
                f"{self._path}: tensor {shown(tensor.name)} has an unknown type, {tensor.kind_name}; "
                "a newer version of the package gguf may know it"
            )
        block, _ = gguf.GGML_QUANT_SIZES[tensor.kind]
        if not tensor.numel or tensor.shape[-1] % block:
            raise self._broken(f"tensor {shown(tensor.name)} is {list(tensor.shape)} of {tensor.kind_name}")
        if tensor.first + tensor.nbytes > len(self._content):
            raise ModelError(
                f"{self._path}: cut short: tensor {shown(tensor.name)} ends at byte "
                f"{tensor.first + tensor.nbytes}, and the file has {len(self._content)}; download it again"
            )
        return tensor

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape, type, and the offset from the first tensor."""
        name, num_dims = self._text(), self._number("I")
        if not 1 <= num_dims <= _MOST_DIMS:
            raise self._broken(f"tensor {shown(name)} has {num_dims} dimensions")
        sizes = [self._number("Q") for _ in range(num_dims)]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _value(self) -> Any:
        kind = self._number("I")
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._broken(f"a value has type {kind}")
        of, length = self._number("I"), self._number("Q")
        if of == _STRING:
            for _ in range(length):
                self._take(self._number("Q"))
        elif of in _SCALARS:
            self._take(length * struct.calcsize(f"<{_SCALARS[of]}"))
        else:
            raise self._broken(f"an array has values of type {of}")
        return GgufArray(length)

    def _text(self) -> str:
        begin, end = self._take(self._number("Q"))
        return self._content[begin:end].decode(errors="replace")

    def _number(self, code: str) -> Any:
        begin, _ = self._take(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self._content, begin)[0]

    def _count(self, of: str) -> int:
        """Return a number of entries, for which there must be room."""
        count = int(self._number("Q"))
        if count * _LEAST_BYTES > len(self._content):
            raise self._broken(f"it would have {count} {of}")
        return count

    def _take(self, size: int) -> tuple[int, int]:
        """Return where the next `size` bytes begin and end."""
        begin, self._at = self._at, self._at + size
        if self._at > len(self._content):
            raise self._broken("its header is cut short")
        return begin, self._at

    def _broken(self, why: str) -> ModelError:
        return ModelError(f"{self._path}: not a whole GGUF file: {why}; download it again")
