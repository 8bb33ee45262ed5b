"""The plain forward pass of the offline tools: whole windows, no cache, layer by layer.

Letters: B windows of T tokens, H hidden size, D head dimension. The serving transformer
(`worker.model.transformer`) is the measure: tests hold the logits equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from worker.model.config import ModelConfig
from worker.model.layout import plan_model
from worker.model.sources import CheckpointWeights

Tensors = dict[str, torch.Tensor]  # a layer's, named as in the checkpoint without "model.layers.{i}."
Tap = Callable[[str, torch.Tensor], None]  # (a key of INPUTS, what that product reads [B, T, K])


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [start, stop) of every window, computed with these weights."""

    start: int
    stop: int
    weights: Tensors


@dataclass(frozen=True, slots=True)
class Ends:
    """What is outside the layers: embedding and head [vocab, H], norm [H], the rotary table."""

    config: ModelConfig
    embedding: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    cos_sin: torch.Tensor

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] to [B, T, H]."""
        return F.embedding(tokens, self.embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., vocab]."""
        return F.linear(_rms_norm(hidden, self.norm, self.config), self.head)


def load_ends(
    config: ModelConfig, checkpoint: CheckpointWeights, dtype: torch.dtype, device: torch.device
) -> Ends:
    """Raises ModelError."""

    def read(tensor: str) -> torch.Tensor:
        return checkpoint.read(tensor).to(device, dtype)

    embedding = read("model.embed_tokens.weight")
    return Ends(
        config,
        embedding,
        read("model.norm.weight"),
        embedding if config.has_tied_embeddings else read("lm_head.weight"),
        config.rope.table(config.max_position_embeddings, device),
    )


def load_layer(
    config: ModelConfig, checkpoint: CheckpointWeights, layer: int, dtype: torch.dtype, device: torch.device
) -> Tensors:
    """All tensors of one layer. Raises ModelError."""
    prefix = f"model.layers.{layer}."
    parts = plan_model(config, dtype, page_bytes=4096, max_tp=1).layers[layer]
    names = [source.tensor for part in parts for source in part.sources]
    return {name.removeprefix(prefix): checkpoint.read(name).to(device, dtype) for name in names}


def run_layer(
    ends: Ends, layer: int, x: torch.Tensor, spans: Sequence[Span], tap: Tap | None = None
) -> torch.Tensor:
    """x [B, T, H], the residual stream at the layer's entry, to that at its exit.

    The spans cover [0, T) in order. A token's keys and values are made by the weights of its own span, as
    they are when a layer is swapped while a sequence is decoded.
    """
    config = ends.config
    q, k, v = _by_span(x, spans, lambda part, w: _project(config, part, w, tap))
    mixed = _attend(config, layer, *_rotated(ends.cos_sin, q, k), v)
    x = x + _by_span(mixed, spans, lambda part, w: [_product(part, w, "o", "self_attn.o_proj", tap)])[0]
    return x + _by_span(x, spans, lambda part, w: [_feed_forward(config, part, w, tap)])[0]


# --------------------------------------------------------------------------- halves of a layer


def _by_span(
    x: torch.Tensor, spans: Sequence[Span], run: Callable[[torch.Tensor, Tensors], Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Run each span's positions with its weights; what they make, joined along the positions."""
    if len(spans) == 1:
        return list(run(x, spans[0].weights))
    made = [run(x[:, span.start : span.stop], span.weights) for span in spans]
    return [torch.cat(parts, 1) for parts in zip(*made, strict=True)]


def _project(config: ModelConfig, x: torch.Tensor, w: Tensors, tap: Tap | None) -> list[torch.Tensor]:
    """q, k, v [B, T, heads, D], not rotated."""
    x = _rms_norm(x, w["input_layernorm.weight"], config)
    if tap:
        tap("qkv", x)
    q, k, v = (
        _product(x, w, "", f"self_attn.{n}_proj", None).unflatten(-1, (-1, config.head_dim)) for n in "qkv"
    )
    if config.has_qk_norm:
        q = _rms_norm(q, w["self_attn.q_norm.weight"], config)
        k = _rms_norm(k, w["self_attn.k_norm.weight"], config)
    return [q, k, v]


def _feed_forward(config: ModelConfig, x: torch.Tensor, w: Tensors, tap: Tap | None) -> torch.Tensor:
    x = _rms_norm(x, w["post_attention_layernorm.weight"], config)
    if tap:
        tap("gate_up", x)
    mixed = F.silu(F.linear(x, w["mlp.gate_proj.weight"])) * F.linear(x, w["mlp.up_proj.weight"])
    return _product(mixed, w, "down", "mlp.down_proj", tap)


def _product(x: torch.Tensor, w: Tensors, reads: str, matrix: str, tap: Tap | None) -> torch.Tensor:
    if tap:
        tap(reads, x)
    return F.linear(x, w[f"{matrix}.weight"], w.get(f"{matrix}.bias"))


def _rotated(cos_sin: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions count from 0 in every window."""
    cos, sin = cos_sin[: q.shape[1], None].chunk(2, -1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    return rotate(q), rotate(k)


def _attend(
    config: ModelConfig, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """[B, T, heads, D] each to [B, T, q heads * D]; token i sees the last `window` up to itself."""
    window, tokens = config.sliding_windows[layer], q.shape[1]
    mask = None
    if 0 < window < tokens:
        distance = torch.arange(tokens, device=q.device)[:, None] - torch.arange(tokens, device=q.device)
        mask = (distance >= 0) & (distance < window)
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=config.head_dim**-0.5,
        enable_gqa=config.num_heads != config.num_kv_heads,
    )
    return mixed.transpose(1, 2).flatten(2)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, config.rms_norm_eps)
