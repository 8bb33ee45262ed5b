"""Humming's products on a GPU: what it is given, with a stand-in for it that packs as it does."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels
from bench.gpu.humming import Humming
from bench.gpu.sweep import weight_of


class Layer:
    """A layer that multiplies by what was loaded, and keeps the numbers of tokens of its configs."""

    def __init__(
        self, *, shape_n: int, shape_k: int, weight_config: dict[str, Any], torch_dtype: torch.dtype
    ):
        """Keep the config of the weight."""
        self.config = weight_config | {"shape": (shape_n, shape_k), "torch_dtype": torch_dtype}
        self.tensors: dict[str, torch.Tensor] = {}
        self.humming_config = "unset"

    def to(self, device: torch.device) -> Layer:
        return self

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def transform(self) -> None:
        self.humming_config = "set"

    def __call__(self, x: torch.Tensor, *, tuning_config: tuple[str, int]) -> torch.Tensor:
        assert tuning_config == ("set", x.shape[0])
        group = self.config["group_size"]
        zeros, scales = (
            each.repeat_interleave(group, 1)
            for each in (unpacked(self.tensors["zero_point"].t()).t(), self.tensors["weight_scale"].float())
        )
        return (x.float() @ ((unpacked(self.tensors["weight"]) - zeros) * scales).t()).to(x.dtype)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes int32 [R, N] as humming does, for bits that divide 32."""
    assert codes.dtype == torch.int32 and codes.is_contiguous() and bits == 4
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (codes.unflatten(1, (-1, 8)) << shifts).sum(-1).to(torch.int32)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    return (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15).flatten(-2)


def test_humming_gets_codes_scales_and_zeros_of_the_own_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = SimpleNamespace(get_heuristics_config=lambda config, tokens: (config, tokens))
    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=Layer))
    monkeypatch.setitem(sys.modules, "humming.ops", SimpleNamespace(pack_weight=packed))
    monkeypatch.setitem(sys.modules, "humming.tune", tune)
    weight = weight_of(128, 64, 4, torch.device("cpu"))
    one = Humming.of(weight, {})
    assert one.layer.config == {
        "dtype": "uint4",
        "group_size": 64,
        "has_zero_point": True,
        "shape": (64, 128),
        "torch_dtype": torch.bfloat16,
    }
    assert one.layer.tensors["zero_point"].shape == (64 * 4 // 32, 128 // 64)
    for tokens in (3, 1):
        x = torch.randn(tokens, 128, dtype=torch.bfloat16)
        expected = kernels.quantized_linear.reference(x, weight).float()
        assert float((one(x).float() - expected).norm() / expected.norm()) < 1e-2
    assert one.configs == {3: ("set", 3), 1: ("set", 1)}
