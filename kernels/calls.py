"""The kernels: each one's public call, in plain torch, and where its faster implementations are.

The plain ones are the oracles of the others: simple, in float32 inside, and slow.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import kv_codes
from kernels.filters import ranked
from kernels.noise import gumbel
from kernels.packing import TILE
from kernels.plan import AttentionPlan
from kernels.quantized import QuantizedWeight, dequantize
from kernels.registry import kernel
from kernels.routing import Routing

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "choose",
    "clamped_silu_mul",
    "combine",
    "copy_blocks",
    "gelu_mul",
    "grouped_linear",
    "grouped_quantized_linear",
    "layer_norm",
    "least_remaining",
    "linear",
    "linear_t",
    "paged_attention",
    "quantized_linear",
    "rms_norm",
    "rotary",
    "rotary_store_kv",
    "route",
    "silu_mul",
    "stacked_linear",
    "stacked_linear_t",
    "steady_linear",
    "store_kv",
    "take_columns",
]


@kernel(
    lambda s: [(x, s.tensor(x.shape[-1]), 1e-5) for x in (s.x, s.q, s.k)],
    cpu="kernels.cpu.rows",
    cuda="kernels.gpu.rows",
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., H] * rsqrt(mean(x^2) + eps) * weight [H], contiguous (RMSNorm, Zhang & Sennrich 2019).

    Leading dimensions are free: norms of single heads (Qwen3) pass [T, Hq, D]. What is multiplied by the
    weight is rounded to x's dtype first, unless the weight is float32 (Gemma).
    """
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if weight.dtype == x.dtype:
        x32 = x32.to(x.dtype).float()
    return (weight.float() * x32).to(x.dtype)


@kernel(
    lambda s: [(s.x, s.x, s.tensor(s.hidden_size), 1e-5)], cpu="kernels.cpu.rows", cuda="kernels.gpu.rows"
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """Add x [T, H] to residual [T, H] in place; return rms_norm(residual, weight, eps).

    out [T, H], contiguous, of x's dtype: takes the result; it may be x.
    """
    residual.add_(x)
    made = rms_norm.reference(residual, weight, eps)
    return made if out is None else out.copy_(made)


@kernel(lambda s: [(s.x, s.tensor(2, s.hidden_size), 1e-5)], cpu="kernels.cpu.rows", cuda="kernels.gpu.rows")
def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [T, H] less its mean, over its deviation, times weight[0] plus weight[1], contiguous.

    weight [2, H] (layer normalisation, Ba et al. 2016).
    """
    scale, shift = weight.float()
    return F.layer_norm(x.float(), x.shape[-1:], scale, shift, eps).to(x.dtype)


@kernel(
    lambda s: [(s.x, s.x, s.tensor(2, s.hidden_size), 1e-5)],
    cpu="kernels.cpu.rows",
    cuda="kernels.gpu.rows",
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """Add x [T, H] to residual [T, H] in place; return layer_norm(residual, weight, eps).

    out: as in `add_rms_norm`.
    """
    residual.add_(x)
    made = layer_norm.reference(residual, weight, eps)
    return made if out is None else out.copy_(made)


@kernel(lambda s: [(s.q, s.k, s.plan.positions, s.cos_sin)], cpu="kernels.cpu.rows", cuda="kernels.gpu.rows")
def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place by positions int64 [T] (RoFormer, Su et al. 2021).

    cos_sin float32 [max_position, R]: cosines in the first half, sines in the second. Hugging Face's
    convention: dimension i pairs with i + R / 2 ("rotate half"). Dimensions from R on stay as they are.
    """
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
    for x in (q[..., : cos_sin.shape[1]], k[..., : cos_sin.shape[1]]):
        low, high = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))


@kernel(lambda s: [(s.gate, s.gate)], cpu="kernels.cpu.rows", cuda="kernels.gpu.rows")
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate * sigmoid(gate) * up [T, I], a new tensor (SwiGLU, Shazeer 2020).

    gate and up [T, I] may be views of one buffer [T, 2I].
    """
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


@kernel(lambda s: [(s.x, torch.arange(s.hidden_size - 1, -1, -1, dtype=torch.int32))], cpu="kernels.cpu.rows")
def take_columns(x: Tensor, order: Tensor) -> Tensor:
    """Return the columns order int32 [K] of x [T, K], in this order."""
    return x.index_select(1, order)


@kernel(lambda s: [(s.gate, s.gate)], cpu="kernels.cpu.rows", cuda="kernels.gpu.rows")
def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up [T, I], as `silu_mul`; gelu is the approximation by tanh (GeGLU)."""
    return (F.gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)


@kernel(lambda s: [(s.gate, s.gate, 1.702, 1.0)], cpu="kernels.cpu.rows")
def clamped_silu_mul(gate: Tensor, up: Tensor, slope: float, limit: float) -> Tensor:
    """Return g * sigmoid(slope * g) * (u + 1) [T, I], as `silu_mul` (GPT-OSS).

    g is the gate, at most `limit`; u is up, within `limit` of 0.
    """
    wide, factor = gate.float().clamp(max=limit), up.float().clamp(-limit, limit) + 1
    return (factor * wide * torch.sigmoid(slope * wide)).to(gate.dtype)


@kernel(lambda s: s.products(TILE, s.hidden_size), cpu="kernels.cpu.products", cuda="kernels.gpu.few")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N]."""
    return F.linear(x, weight, bias)


@kernel(lambda s: s.products(TILE, s.hidden_size), cpu="kernels.cpu.products")
def steady_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `linear` does, by a kernel that no timing chooses: all workers get the same bits."""
    return F.linear(x, weight, bias)


@kernel(lambda s: s.products(2, TILE, s.hidden_size), cpu="kernels.cpu.products", cuda="kernels.batched")
def stacked_linear(x: Tensor, weights: Tensor) -> Tensor:
    """Return x [T, K] times each of the M matrices weights [M, N, K], transposed: [T, M, N].

    The matrices may have other data between them. The first two dimensions of the result have any strides.
    """
    return torch.stack([F.linear(x, weight) for weight in weights], 1)


@kernel(lambda s: s.products(s.hidden_size, TILE), cpu="kernels.cpu.products", cuda="kernels.gpu.few")
def linear_t(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [T, K] times weight [K, N], which is stored with its inputs outermost: [T, N]."""
    return torch.matmul(x, weight)


@kernel(lambda s: s.products_of_parts(2, TILE, s.hidden_size), cpu="kernels.cpu.products")
def stacked_linear_t(x: Tensor, weights: Tensor) -> Tensor:
    """Return x [T, M, K] times weights [M, K, N], summed over M: [T, N]; `linear_t` of one matrix in parts.

    The matrices may have other data between them. Short floats are rounded after each.
    """
    out = torch.matmul(x[:, 0], weights[0])
    for part, weight in zip(x.unbind(1)[1:], weights[1:], strict=True):
        out.addmm_(part, weight)
    return out


@kernel(lambda s: s.quantized(), cpu="kernels.cpu.quantized", cuda="kernels.gpu.quantized")
def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] times the matrix [N, K] that `weight` stands for, transposed, plus bias [N]: [T, N].

    If the weight has an input_scale, x is multiplied by it first. Split by outputs, output n of unit u is
    column u * Nu + n. Raises ValueError if x or bias does not fit the weight.
    """
    weight.check_operands(x, bias)
    x32 = x.float() if weight.input_scale is None else x.float() * weight.input_scale.float()
    return F.linear(x32, dequantize(weight), None if bias is None else bias.float()).to(x.dtype)


@kernel(
    lambda s: [
        (s.tensor(s.chunk + 1, 8), 2, True),
        (s.tensor(s.chunk + 1, 7), 2, False, 2, torch.zeros(8, dtype=torch.int64)),
    ],
    cpu="kernels.cpu.experts",
)
def route(
    logits: Tensor, top_k: int, is_normalised: bool, num_shared: int = 0, use: Tensor | None = None
) -> Routing:
    """Choose the top_k experts of each token by logits [T, E] (Shazeer et al. 2017).

    Their weights are the softmax over all experts or, if normalised, over the chosen ones. Of equal logits
    the lower expert comes first.

    With num_shared > 0 a last logit is that of a shared expert, of which every token uses all slices, each
    with the logit's sigmoid as its weight (Qwen2-MoE). They lie among the experts (`routing.shared_units`).

    use: int64 [experts and slices], contiguous; the pairs of each are added to it.
    """
    routed = logits[:, :-1] if num_shared else logits
    experts = routed.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = routed.float().softmax(-1).gather(1, experts)
    weights = weights / weights.sum(-1, keepdim=True) if is_normalised else weights
    units = routed.shape[1] + num_shared
    if num_shared:
        order = torch.arange(num_shared, device=logits.device)
        shared = (order + 1) * units // num_shared - 1
        experts = experts + torch.searchsorted(shared - order, experts.contiguous(), right=True)
        experts = torch.cat([experts, shared.expand(len(experts), -1)], 1)
        gate = logits[:, -1:].float().sigmoid()
        weights = torch.cat([weights, gate.expand(-1, num_shared)], 1)
    routing = Routing.of(experts, weights, units)
    if use is not None:
        use.add_(routing.bounds.diff())
    return routing


@kernel(lambda s: s.grouped(), cpu="kernels.cpu.experts", cuda="kernels.gpu.experts")
def grouped_linear(
    x: Tensor, weights: Tensor, routing: Routing, is_by_place: bool = False, bias: Tensor | None = None
) -> Tensor:
    """Multiply each pair's x by the matrix of its expert, transposed: [P, N] in the order of the places.

    weights [E, N, K] and bias [E, N] of the experts that the routing has, at any stride. x [T, K], or [P, K]
    if it is by place. Only experts with pairs are read. The rows of pairs of other experts hold anything.
    """
    out = x.new_zeros(routing.rows.shape[0], weights.shape[1])
    for e, (begin, end) in enumerate(pairwise(routing.bounds.tolist())):
        if begin < end:
            part = x[begin:end] if is_by_place else x[routing.rows[begin:end]]
            out[begin:end] = F.linear(part, weights[e], None if bias is None else bias[e])
    return out


@kernel(lambda s: s.grouped_quantized(), cpu="kernels.cpu.experts", cuda="kernels.by_expert")
def grouped_quantized_linear(
    x: Tensor,
    weight: QuantizedWeight,
    routing: Routing,
    is_by_place: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply as grouped_linear does, by a quantised weight: each unit [Nu, Ku] is an expert's matrix.

    x may have fewer columns than a unit has inputs: the codes behind them are padding. Raises ValueError for
    units that are no matrices of their own.
    """
    out = x.new_zeros(routing.rows.shape[0], weight.unit_outputs)
    bounds = routing.bounds.tolist()
    for e, unit in enumerate(weight.matrices()):
        begin, end = bounds[e], bounds[e + 1]
        if begin < end:
            part = unit.padded(x[begin:end] if is_by_place else x[routing.rows[begin:end]])
            out[begin:end] = quantized_linear.reference(part, unit, None if bias is None else bias[e])
    return out


@kernel(lambda s: [(s.tensor(2 * (s.chunk + 1), s.hidden_size), s.routing)], cpu="kernels.cpu.experts")
def combine(y: Tensor, routing: Routing) -> Tensor:
    """Return the weighted sum [T, N] of each token's pairs in y [P, N], of the experts the routing has."""
    begin, end = routing.bounds[0], routing.bounds[-1]
    is_here = (routing.places >= begin) & (routing.places < end)  # [T, k]
    parts = y[routing.places.long()].float() * routing.weights[..., None]
    return parts.where(is_here[..., None], 0.0).sum(1).to(y.dtype)


@kernel(
    lambda s: [(s.k, s.k, kv, s.plan.slot_mapping) for kv in s.caches],
    cpu="kernels.cpu.rows",
    cuda="kernels.gpu.rows",
)
def store_kv(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v [T, Hkv, D] into the cache kv [B, Hkv, 2, bt, D] at slot_mapping int64 [T].

    A slot is block_id * bt + offset; no two tokens may have the same slot. A token whose slot is -1 is not
    written: such rows fill a batch up to the size of a recorded one. A cache of int8 takes codes
    (`kernels.kv_codes`).
    """
    is_written = slot_mapping >= 0
    k, v, slot_mapping = k[is_written], v[is_written], slot_mapping[is_written]
    if kv_codes.is_codes(kv):
        kv_codes.store(k, v, kv, slot_mapping)
        return
    block_tokens = kv.shape[3]
    blocks, offsets = slot_mapping // block_tokens, slot_mapping % block_tokens
    # Indices on both sides of the slice put the token axis first: [T, Hkv, D].
    kv[:, :, 0][blocks, :, offsets] = k
    kv[:, :, 1][blocks, :, offsets] = v


@kernel(
    lambda s: [(s.q, s.k, s.k, s.plan.positions, s.cos_sin, kv, s.plan.slot_mapping) for kv in s.caches],
    cpu="kernels.cpu.rows",
    cuda="kernels.gpu.rows",
)
def rotary_store_kv(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, kv: Tensor, slot_mapping: Tensor
) -> None:
    """Rotate q and k in place (`rotary`), and write the new k and v into the cache (`store_kv`)."""
    rotary.reference(q, k, positions, cos_sin)
    store_kv.reference(k, v, kv, slot_mapping)


@kernel(
    lambda s: [(s.q, kv, s.plan, s.head_dim**-0.5, None, 0, s.softcap, s.sinks) for kv in s.caches],
    cpu="kernels.cpu.attention",
    cuda="kernels.gpu.attention",
)
def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    scale: float,
    out: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally from the step's tokens to their sequences' blocks (PagedAttention, Kwon et al. 2023).

    q [T, Hq, D]; kv [B, Hkv, 2, bt, D] with any strides over the first four dimensions; Hq a multiple of
    Hkv: the heads of a group share one KV head. `store_kv` must have written this step's keys and values. A
    contiguous cache of int8 holds codes (`kernels.kv_codes`).
    sliding_window w > 0: a query sees itself and the w - 1 tokens before it. softcap c > 0: scores s become
    c * tanh(s / c). sinks [Hq], of q's dtype: the score of a key of value 0 that every query sees (Xiao et
    al. 2024). Returns out [T, Hq, D]. A sequence of context 0 fills a row of a recorded step; it gets zeros.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    bounds, contexts = plan.cu_seqlens_q.tolist(), plan.context_lens.tolist()
    for s, context in enumerate(contexts):
        rows = slice(bounds[s], bounds[s + 1])
        if not context:
            out[rows] = 0.0
            continue
        num_blocks = -(-context // kv.shape[3])
        blocks = kv[plan.block_table[s, :num_blocks].long()]  # [blocks, Hkv, 2, bt, D]
        if kv_codes.is_codes(kv):
            blocks = kv_codes.dequantize(*kv_codes.parts_of(blocks))
        keys, values = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :context].float()
        out[rows] = _attend(q[rows], keys, values, scale, sliding_window, softcap, sinks)
    return out


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from q [L, Hq, D], the last L tokens of C, to keys and values [Hkv, C, D]: [L, Hq, D]."""
    length, context = q.shape[0], keys.shape[1]
    group = q.shape[1] // keys.shape[0]
    scores = q.float().transpose(0, 1) @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    age = torch.arange(context - length, context, device=q.device)[:, None]
    age = age - torch.arange(context, device=q.device)  # [L, C]; how far the key lies behind the query
    hidden = (age < 0) | (age >= sliding_window if sliding_window else False)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, length, 1)], -1)
    weights = scores.softmax(-1)[..., :context]
    return (weights @ values.repeat_interleave(group, 0)).transpose(0, 1).to(q.dtype)


@kernel(lambda s: [(kv, torch.tensor([0]), torch.tensor([1])) for kv in s.caches], cuda="kernels.gpu.rows")
def copy_blocks(kv: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy kv[src[i]] to kv[dst[i]] for block ids int64 [n]. No block may be both a source and a target."""
    kv[dst] = kv[src]


@kernel(lambda s: s.choices(), cuda="kernels.gpu.sampling")
def choose(
    scores: Tensor, draws: Tensor | None = None, out: Tensor | None = None, floors: Tensor | None = None
) -> Tensor:
    """Return a token of each row of scores float32 [R, V], int64 [R] (in `out`, if given).

    draws int32 [R, 3]: the bits of a float32 temperature and the two halves of a key. A row with a
    temperature above 0 draws by the softmax of its scores over that (`kernels.noise.gumbel`), of those that
    are at least its floor, float32 [R], if there are floors. Any other row, and every row without draws,
    takes the first of its largest scores.
    """
    made = _largest(scores)
    if draws is not None:
        temperatures = draws[:, 0].contiguous().view(torch.float32)
        rows = (temperatures > 0).nonzero()[:, 0]
        if len(rows):
            ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
            drawn = scores[rows] / temperatures[rows, None]
            if floors is not None:
                drawn = drawn.masked_fill_(drawn < floors[rows, None], -torch.inf)
            made[rows] = _largest(drawn.add_(gumbel(draws[rows, 1:], ids)))
    return made if out is None else out.copy_(made)


@kernel(lambda s: s.filters(), cuda="kernels.gpu.sampling")
def least_remaining(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, is_known: Tensor) -> Tensor:
    """Return the least score that filters leave of each row (`kernels.filters.ranked`), float32 [R].

    scores float32 [R, V]; top_k int64 [R], top_p and min_p float32 [R]. Rows that is_known, bool [R], marks
    cost nothing and get -inf. Of equal scores at the edge all remain.
    """
    out = torch.full_like(top_p, -torch.inf)
    rows = (~is_known).nonzero()[:, 0]
    if len(rows):
        width = scores.shape[1]
        values, _, _ = ranked(scores[rows], top_k[rows], top_p[rows], min_p[rows], width)
        out[rows] = values.masked_fill(values == -torch.inf, torch.inf).amin(-1)
    return out


def _largest(scores: Tensor) -> Tensor:
    """Return the position of the first largest score, int64 [R]."""
    if scores.device.type == "cpu":  # numpy: 1.6 ms for 64 x 150,000 where torch 2.13 takes 24
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)
