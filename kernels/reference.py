"""Every kernel in plain torch: the oracles of the others. Simple, in float32 inside, and slow.

`kernels.calls` documents the shapes: the signatures are the same.
"""

from __future__ import annotations

import torch

from kernels.plan import AttentionPlan
from kernels.quantized import QuantizedWeight, dequantize


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * x32.to(x.dtype).float()).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
    for x in (q, k):
        low, high = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def stacked_linear(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.stack([linear(x, weight) for weight in weights], 1)


def linear_t(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, weight)


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    x32 = x.float() if weight.input_scale is None else x.float() * weight.input_scale.float()
    return torch.nn.functional.linear(x32, dequantize(weight), None if bias is None else bias.float()).to(
        x.dtype
    )


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    block_tokens = kv.shape[3]
    blocks, offsets = slot_mapping // block_tokens, slot_mapping % block_tokens
    # Indices on both sides of the slice put the token axis first: [T, Hkv, D].
    kv[:, :, 0][blocks, :, offsets] = k
    kv[:, :, 1][blocks, :, offsets] = v


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None = None,
    sliding_window: int = 0,
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    bounds, contexts = plan.cu_seqlens_q.tolist(), plan.context_lens.tolist()
    for s, context in enumerate(contexts):
        rows = slice(bounds[s], bounds[s + 1])
        num_blocks = -(-context // kv.shape[3])
        blocks = kv[plan.block_table[s, :num_blocks].long()]  # [blocks, Hkv, 2, bt, D]
        keys, values = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :context].float()
        out[rows] = _attend(q[rows], keys, values, scale, sliding_window)
    return out


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, sliding_window: int
) -> torch.Tensor:
    """Attend from q [L, Hq, D], the last L tokens of C, to keys and values [Hkv, C, D]: [L, Hq, D]."""
    length, context = q.shape[0], keys.shape[1]
    group = q.shape[1] // keys.shape[0]
    scores = q.float().transpose(0, 1) @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
    age = torch.arange(context - length, context, device=q.device)[:, None]
    age = age - torch.arange(context, device=q.device)  # [L, C]; how far the key lies behind the query
    hidden = (age < 0) | (age >= sliding_window if sliding_window else False)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values.repeat_interleave(group, 0)).transpose(0, 1).to(q.dtype)


def copy_blocks(kv: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    kv[dst] = kv[src]
