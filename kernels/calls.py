"""The public calls: shapes, meaning, errors. Each runs the face of its tensors' device."""

from __future__ import annotations

import torch

from kernels.plan import AttentionPlan
from kernels.quantized import QuantizedWeight
from kernels.registry import pick


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] * rsqrt(mean(x^2) + eps) * weight [H], a new contiguous tensor (Zhang & Sennrich 2019).

    Leading dimensions are free: norms of single heads (Qwen3) pass [T, Hq, D].
    """
    result: torch.Tensor = pick("rms_norm", x)(x, weight, eps)
    return result


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual [T, H] += x [T, H] in place; returns rms_norm(residual, weight, eps)."""
    result: torch.Tensor = pick("add_rms_norm", x)(x, residual, weight, eps)
    return result


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by positions int64 [T] (RoFormer, Su et al. 2021).

    cos_sin float32 [max_position, D]: cosines in the first half, sines in the second. Hugging Face's
    convention: dimension i pairs with i + D / 2 ("rotate half").
    """
    pick("rotary", q)(q, k, positions, cos_sin)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(gate) * up, both [T, I] (views of one [T, 2I] buffer are fine); a new tensor [T, I]
    (SwiGLU, Shazeer 2020)."""
    result: torch.Tensor = pick("silu_mul", gate)(gate, up)
    return result


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]; returns [T, N]."""
    result: torch.Tensor = pick("linear", x)(x, weight, bias)
    return result


def stacked_linear(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [T, K] times each of M matrices weights [M, N, K] transposed; returns [T, M, N]. For matrices with
    something else between them; the first two dimensions of the result may have any strides."""
    result: torch.Tensor = pick("stacked_linear", x)(x, weights)
    return result


def linear_t(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [K, N]; returns [T, N]. For weights stored with their inputs outermost."""
    result: torch.Tensor = pick("linear_t", x)(x, weight)
    return result


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K] times the matrix [N, K] that `weight` stands for, transposed, plus bias [N]; returns [T, N].

    Where the weight has an input_scale, x is multiplied by it first. Split by outputs, output n of unit u is
    column u * Nu + n. Raises ValueError where x or bias do not fit the weight.
    """
    if x.dim() != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"x is {list(x.shape)}; the weight takes [tokens, {weight.num_inputs}]")
    if bias is not None and bias.shape != (weight.num_outputs,):
        raise ValueError(f"bias is {list(bias.shape)}; the weight has {weight.num_outputs} outputs")
    result: torch.Tensor = pick("quantized_linear", x)(x, weight, bias)
    return result


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write k and v [T, Hkv, D] into kv [B, Hkv, 2, bt, D] at slot_mapping int64 [T]
    (block_id * bt + offset). Slots must differ from each other."""
    pick("store_kv", k)(k, v, kv, slot_mapping)


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None = None,
    sliding_window: int = 0,
) -> torch.Tensor:
    """Causal attention of the step's tokens over their sequences' blocks (PagedAttention, Kwon et al. 2023).

    q [T, Hq, D]; kv [B, Hkv, 2, bt, D] with any strides over the first four dimensions; Hq a multiple of
    Hkv, heads of a group share one KV head. This step's keys and values must be in kv already (`store_kv`).
    sliding_window w > 0: a query sees itself and the w - 1 tokens before it. Returns out [T, Hq, D].
    """
    result: torch.Tensor = pick("paged_attention", q)(q, kv, plan, scale, out, sliding_window)
    return result


def copy_blocks(kv: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """kv[dst[i]] = kv[src[i]] for int64 [n] block ids. No block may be both a source and a target."""
    pick("copy_blocks", kv)(kv, src, dst)
