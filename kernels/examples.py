"""Small arguments of the calls, in a model's sizes: to compile kernels with, and to check them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.kv_codes import SCALE_BYTES
from kernels.packing import TILE, packed_size
from kernels.plan import AttentionPlan
from kernels.quantized import GROUP_STEP, QuantizedWeight
from kernels.routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model; `make` fills tensors. Tensors are new each time, on torch's default device."""

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    hidden_size: int
    intermediate_size: int
    bits: tuple[int, ...] = ()
    has_codes: bool = False  # the KV cache may be in 8 bits
    rotary_dim: int = 0  # 0: all of a head
    softcap: float = 0.0
    has_sinks: bool = False
    make: Callable[..., Tensor] = torch.zeros

    @property
    def chunk(self) -> int:
        """The tokens of a prefill; one decode follows."""
        return min(self.block_tokens, 16) if self.block_tokens > 1 else 1

    @property
    def plan(self) -> AttentionPlan:
        """A chunk of up to a block's tokens in block 0 and a decode in block 1."""
        chunk = self.chunk
        return AttentionPlan(
            cu_seqlens_q=torch.tensor([0, chunk, chunk + 1], dtype=torch.int32),
            context_lens=torch.tensor([chunk, 1], dtype=torch.int32),
            block_table=torch.tensor([[0], [1]], dtype=torch.int32),
            slot_mapping=torch.cat([torch.arange(chunk), torch.tensor([self.block_tokens])]),
            positions=torch.cat([torch.arange(chunk), torch.tensor([0])]),
            max_q_len=chunk,
            max_context_len=chunk,
        )

    def tensor(self, *shape: int) -> Tensor:
        return self.make(shape, dtype=self.dtype)

    @property
    def x(self) -> Tensor:
        return self.tensor(self.chunk + 1, self.hidden_size)

    @property
    def gate(self) -> Tensor:
        return self.tensor(self.chunk + 1, self.intermediate_size)

    @property
    def q(self) -> Tensor:
        return self.tensor(self.chunk + 1, self.num_heads, self.head_dim)

    @property
    def k(self) -> Tensor:
        return self.tensor(self.chunk + 1, self.num_kv_heads, self.head_dim)

    @property
    def kv(self) -> Tensor:
        return self.tensor(2, self.num_kv_heads, 2, self.block_tokens, self.head_dim)

    @property
    def caches(self) -> list[Tensor]:
        """A cache of the tensors' dtype, and one of codes if there may be one."""
        shape = (*self.kv.shape[:4], self.head_dim + SCALE_BYTES)
        return [self.kv, torch.zeros(shape, dtype=torch.int8)][: 1 + self.has_codes]

    @property
    def cos_sin(self) -> Tensor:
        return self.make((self.chunk + 1, self.rotary_dim or self.head_dim), dtype=torch.float32)

    @property
    def sinks(self) -> Tensor | None:
        return self.tensor(self.num_heads) if self.has_sinks else None

    def products(self, *shape: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and weights of a product: a kernel for few tokens and one for more."""
        for tokens in (None, 1):
            yield self.x[:tokens], self.tensor(*shape)

    def products_of_parts(self, parts: int, inputs: int, outputs: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs [T, parts, inputs] and weights [parts, inputs, outputs], as `products` does."""
        for tokens in (self.chunk + 1, 1):
            yield self.tensor(tokens, parts, inputs), self.tensor(parts, inputs, outputs)

    def choices(self) -> Iterator[tuple[Tensor | None, ...]]:
        """Yield scores of the largest alone, and with one row that draws, by all and by some of them."""
        scores = self.make((2, 5000), dtype=torch.float32)
        yield scores, None
        temperature = torch.tensor([0.7, 0.0]).view(torch.int32)
        draws = torch.stack([temperature, torch.tensor([5, 6]), torch.tensor([-7, 8])], 1).int()
        yield scores, draws
        yield scores, draws, None, torch.tensor([-1.0, 0.0])

    def filters(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield scores of which filters leave some."""
        top_p, min_p = torch.tensor([0.9, 1.0]), torch.tensor([0.0, 0.1])
        is_known = torch.tensor([False, True])
        yield self.make((2, 5000), dtype=torch.float32), torch.tensor([600, 0]), top_p, min_p, is_known

    @property
    def routing(self) -> Routing:
        """Two of four experts for each token."""
        tokens = torch.arange(self.chunk + 1)
        experts = torch.stack([tokens % 4, (tokens + 1) % 4], 1)
        return Routing.of(experts, self.make(experts.shape, dtype=torch.float32), 4)

    def grouped(self) -> Iterator[tuple[Any, ...]]:
        """Yield a product with experts for tokens, and one by place."""
        weights = self.tensor(4, TILE, self.hidden_size)
        yield self.x, weights, self.routing
        yield self.tensor(2 * (self.chunk + 1), self.hidden_size), weights, self.routing, True

    def grouped_quantized(self) -> Iterator[tuple[Any, ...]]:
        """Yield a product with quantised experts for each number of bits."""
        for bits in self.bits:
            inputs = max(TILE, self.hidden_size // TILE * TILE)
            codes = torch.zeros(4, TILE, packed_size(inputs, bits), dtype=torch.uint8)
            levels = torch.zeros(4, TILE, inputs // TILE)
            weight = QuantizedWeight(codes, levels.half(), levels.to(torch.uint8), bits, TILE)
            yield self.tensor(self.chunk + 1, inputs), weight, self.routing

    def quantized(self) -> Iterator[tuple[Any, ...]]:
        """Yield a product for each path: by number of tokens, by input scale and, on a GPU, split or not."""
        inputs = max(TILE, self.hidden_size // TILE * TILE)
        scale = torch.ones(inputs)
        is_cpu = scale.device.type == "cpu"
        sizes = (TILE,) if is_cpu else (TILE, 512 * TILE)
        groups = (TILE, GROUP_STEP) if is_cpu else (TILE,)  # some kernels of a CPU take whole tiles only
        for bits, outputs, tokens, input_scale, group in itertools.product(
            self.bits, sizes, (1, 17, 33, 65), (None, scale), groups
        ):
            level = torch.zeros(1, 1, inputs // group)
            row = torch.zeros(1, 1, packed_size(inputs, bits), dtype=torch.uint8)
            parts = (row, level.half(), level.to(torch.uint8))
            codes, scales, zeros = (part.expand(1, outputs, -1) for part in parts)
            weight = QuantizedWeight(codes, scales, zeros, bits, group, "outputs", input_scale)
            yield self.tensor(tokens, inputs), weight
