"""The assembly that decodes weights on a GPU, run instruction by instruction."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
import torch

from kernels.gpu import codes

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def run(assembly: str, values: list[int]) -> list[int]:
    """Run assembly on words $2, $3, ... and return the words $0 and $1."""
    words = {f"${place}": value for place, value in enumerate(values, 2)}
    for line in assembly.strip("{}\n").splitlines():
        name, *rest = re.split(r"[ ,]+", line.rstrip(";"))
        if name != ".reg":
            target, *operands = rest
            words[target] = step(name, [words[at] if at in words else int(at, 0) for at in operands])
    return [words["$0"], words["$1"]]


def step(name: str, values: list[int]) -> int:
    if name == "mov.b32":
        return values[0]
    if name == "and.b32":
        return values[0] & values[1]
    if name == "or.b32":
        return values[0] | values[1]
    if name == "shr.b32":
        return values[0] >> values[1]
    if name == "prmt.b32":
        source = struct.pack("<II", *values[:2])
        return int.from_bytes(bytes(source[values[2] >> 4 * i & 7] for i in range(4)), "little")
    if name in ("add.rn.f32", "mul.rn.f32"):
        a, b = (np.uint32(value).view(np.float32) for value in values)
        return int((a + b if name.startswith("add") else a * b).view(np.uint32))
    if name == "cvt.rn.bf16x2.f32":
        high, low = (torch.tensor(np.uint32(value).view(np.float32)).bfloat16() for value in values)
        return word_of(torch.stack([low, high]))
    kind = re.fullmatch(r"fma\.rn\.(\w+)x2", name)
    assert kind, name
    a, b, c = (pair_of(value, DTYPES[kind[1]]).double() for value in values)
    return word_of((a * b + c).to(DTYPES[kind[1]]))


def pair_of(word: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.uint16).view(dtype)


def word_of(pair: torch.Tensor) -> int:
    low, high = pair.view(torch.uint16).tolist()
    return int(low | high << 16)


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "part"), [(8, 0), (4, 0), (4, 1), (3, 0), (3, 1), (3, 2), (3, 3)])
def test_assembly_decodes_every_code(dtype: torch.dtype, bits: int, part: int, is_scaled: bool) -> None:
    assembly = codes.assembly(bits, part, dtype == torch.bfloat16, is_scaled)
    registers = codes.constraints(bits, dtype == torch.bfloat16, is_scaled)
    random = np.random.default_rng(part)
    scale = torch.tensor(0.0123).half()
    for zero in (0, 2**bits // 2 + 1, 2**bits - 1):
        every = np.arange(2**bits).repeat(1 if bits == 8 else 4)
        random.shuffle(every)
        for four in every.reshape(-1, 4).tolist():
            given = operands(bits, part, dtype, four, zero, scale if is_scaled else None)
            assert len(given) == registers.split(",").count("r")
            words = run(assembly, given)
            made = torch.cat([pair_of(word, dtype) for word in words])
            exact = (torch.tensor(four) - zero).float() * (scale.float() if is_scaled else 1)
            if dtype == torch.bfloat16 and bits < 8 and is_scaled:
                exact = (torch.tensor(four) - zero).float() * scale.bfloat16().float()
            assert torch.equal(made, exact.to(dtype)), (four, zero)


def operands(
    bits: int, part: int, dtype: torch.dtype, four: list[int], zero: int, scale: torch.Tensor | None
) -> list[int]:
    """Return the words that `weights_of` passes for four codes of a part; other parts' bits are ones."""
    width = {8: 8, 4: 4, 3: 2}[bits]
    others = 255 & ~((2**width - 1) << part * width)
    pieces = bytes((code & 2**width - 1) << part * width | others for code in four)
    words = [int.from_bytes(pieces, "little")]
    if dtype == torch.bfloat16 and bits == 8:
        words += [int(np.float32(-8388608.0 - zero).view(np.uint32))] * 4
        return words if scale is None else [*words, *[int(scale.float().numpy().view(np.uint32))] * 4]
    power = 128.0 if dtype == torch.bfloat16 else 1024.0
    words += [word_of(torch.tensor([-power - zero] * 2).to(dtype))] * 2
    if scale is not None:
        words += [word_of(scale.expand(2).contiguous().to(dtype))] * 2
    if bits == 3:
        high = bytes(0xFB | (code & 4) for code in four)
        words.append(int.from_bytes(high, "little"))
    return words
