"""A lean Llama for training: the same numbers as Hugging Face's, in fewer and larger operations.

Parameters keep Hugging Face's names, so the checkpoint is the state dict; tests hold the logits equal.
Shapes: b sequences, t tokens, d = hidden, h query heads, g key/value heads, e = head size, v = vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The demo model's dimensions.

    688 FFN rows divide into 64 KiB pages neither as float32 (64 rows a page) nor as bfloat16 (128 rows):
    the last page of each FFN matrix is part empty, which is the case a page-wise system must get right.
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    ffn_size: int = 688
    context_len: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    @property
    def head_size(self) -> int:
        """Channels of one head."""
        return self.hidden_size // self.num_heads


class Attention(nn.Module):  # type: ignore[misc]  # mypy skips torch
    """Grouped-query causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        kv_size = shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """X [b, t, d]; cos, sin [t, e] -> [b, t, d]."""
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(x.shape))

    def _heads(self, x: Tensor) -> Tensor:
        """[b, t, heads * e] -> [b, heads, t, e]."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class FeedForward(nn.Module):  # type: ignore[misc]  # mypy skips torch
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, d] -> [b, t, d]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):  # type: ignore[misc]  # mypy skips torch
    """One layer: attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[b, t, d] -> [b, t, d]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):  # type: ignore[misc]  # mypy skips torch
    """Everything that Hugging Face keeps under `model.`: embedding, layers, last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)


class Llama(nn.Module):  # type: ignore[misc]  # mypy skips torch
    """The language model; the output matrix is the embedding (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = _rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [b, t] int64 -> logits [b, t, v]."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Tokens [b, t + 1] -> mean nats per predicted token, a scalar."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def _init_weights(self) -> None:
        """Initialise normally; scale the two matrices that write into the stream by depth, as in GPT-2."""
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth_scale = (2 * self.shape.num_layers) ** -0.5 if writes else 1.0
                nn.init.normal_(weight, std=self.shape.init_std * depth_scale)


def _rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cos and sin [context_len, e], each half the same, as Hugging Face lays Llama out."""
    channel = torch.arange(0, shape.head_size, 2, dtype=torch.float32)
    frequency = shape.rope_theta ** (-channel / shape.head_size)
    angle = torch.outer(torch.arange(shape.context_len).float(), frequency)
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """X [b, heads, t, e], rotated by position."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
