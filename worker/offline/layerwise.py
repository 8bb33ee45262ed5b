"""The serving model over windows of tokens, one layer at a time: the forward pass of the offline tools."""

from __future__ import annotations

import torch

from bus.precisions import KVPrecision, Precision
from kernels import AttentionPlan
from kernels.kv_codes import cache_format
from worker.model.config import ModelConfig
from worker.model.layer import Layer, build_layer
from worker.model.layout import RangePlan, plan_model
from worker.model.sources import CheckpointWeights
from worker.model.transformer import Ends, Transformer
from worker.model.weights import Tensors, tensors_in
from worker.shape.copier import lay_out
from worker.shape.host_images import MatrixSource, plan_variants, write_half

_BLOCK_TOKENS = 16
_PAGE_BYTES = 4096  # pages of the layout; nothing is mapped here


class LayerwiseModel:
    """Embedding, head and single layers of a checkpoint, in plain tensors without a page pool.

    Layers and the transformer that runs them are those of serving. One window runs at a time; its keys and
    values of one layer are kept from call to call.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: CheckpointWeights,
        *,
        dtype: torch.dtype,
        device: torch.device,
        window_tokens: int,
        kv_precision: KVPrecision = "full",
    ) -> None:
        """Read the embedding and the head. Raises ModelError for a tensor that is missing or misshapen.

        window_tokens: the longest window to come; longrope has the frequencies of this length for all.
        """
        self.config, self._checkpoint, self.dtype, self.device = config, checkpoint, dtype, device
        self._plan = plan_model(config, dtype, _PAGE_BYTES, max_tp=1)
        checkpoint.check([tensor for part in self._plan.ranges() for tensor in part.sources])
        assert self._plan.embedding and self._plan.head, "an offline tool reads whole models"
        ends = Ends.of(self._read(self._plan.embedding), self._read(self._plan.head))
        self._transformer = Transformer(config.up_to(window_tokens), [], ends=ends)
        num_blocks = -(-window_tokens // _BLOCK_TOKENS)
        kv_dtype, width = cache_format(kv_precision, config.head_dim, dtype)
        shape = (num_blocks, config.num_kv_heads, 2, _BLOCK_TOKENS, width)
        self._cache = torch.empty(shape, dtype=kv_dtype, device=device)

    def tensors(self, index: int) -> tuple[Tensors, Tensors]:
        """Read (attention, FFN) of a layer in full precision, as the layout names them. Raises ModelError."""
        attention, feed_forward = self._plan.layers[index]
        return self._read(attention), self._read(feed_forward)

    def layer(self, index: int) -> Layer:
        """Read a layer in full precision. Raises ModelError."""
        return build_layer(self.config, index, *self.tensors(index))

    def quantized_layer(self, index: int, precision: Precision, matrices: MatrixSource) -> Layer:
        """Build a layer in fewer bits from its matrices. Raises ModelError."""
        plans = plan_variants(self.config, self._plan, _PAGE_BYTES, {precision: matrices})
        made = []
        for plan, full in zip(plans.values(), self.tensors(index), strict=True):
            made.append(tensors_in(torch.zeros(plan.nbytes, dtype=torch.uint8, device=self.device), plan))
            write_half(self.config, made[-1], matrices, index, full)
        return build_layer(self.config, index, *made, precision=precision)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the residual [T, H] before the first layer of int64 [T]."""
        return self._transformer.embed(token_ids.to(self.device))

    def run(self, layer: Layer, residual: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Run tokens first, first + 1, ... of a window through a layer: residual [T, H] to another [T, H].

        The tokens before `first` must have run through this layer, in whatever precision, just before.
        """
        num_tokens = residual.shape[0]
        end = first + num_tokens
        positions = torch.arange(first, end, device=self.device)
        counts = torch.tensor([0, num_tokens, end], dtype=torch.int32, device=self.device)
        blocks = torch.arange(-(-end // _BLOCK_TOKENS), dtype=torch.int32, device=self.device)
        plan = AttentionPlan(
            cu_seqlens_q=counts[:2],
            context_lens=counts[2:],
            block_table=blocks[None],
            slot_mapping=positions,  # block i holds tokens i * _BLOCK_TOKENS on
            positions=positions,
            max_q_len=num_tokens,
            max_context_len=end,
        )
        self._transformer.layers[:] = [layer]
        return self._transformer.run(residual.clone(), plan, [self._cache])

    def logits(self, residual: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, vocab] of the residual [T, H] behind the last layer."""
        return self._transformer.logits(residual)

    def _read(self, plan: RangePlan) -> Tensors:
        return tensors_in(lay_out(plan, self._checkpoint, self.device), plan)
