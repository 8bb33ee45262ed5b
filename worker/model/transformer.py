"""The decoder of every model family (`bus.families`), over packed tokens and a paged cache.

Serving, profiles and the offline tools all run it: it is the only forward pass of a model.

Letters as in `kernels`: T tokens of the step, R rows whose logits are wanted, H hidden size, Hq and Hkv heads
of this rank, D head dimension. Norms and the residual follow the pre-norm Transformer (Llama, Touvron et al.
2023); grouped-query attention, SwiGLU and rotary embeddings are the kernels'.

Tensor parallelism splits heads and FFN rows, and two sums over the group make a layer (Megatron-LM, Shoeybi
et al. 2019). While the degree changes, the layers form two segments: those below a boundary run at one
degree, those above at the other, and a step changes over once between them (Gyges, section 4.3).

A pipeline stage has some of the layers and runs them from residual to residual. The first stage also has the
embedding and the head, so that a step begins and ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from kernels import AttentionPlan, add_rms_norm, linear, rms_norm
from worker.model.config import ModelConfig
from worker.model.layer import Layer
from worker.model.recorded import Parts, RecordedSteps
from worker.model.shard import ReduceGroup, Shard

CachesAt = Callable[[int], list[torch.Tensor]]  # degree -> the cache of each layer in its block numbers


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers [first, end) at one degree.

    Every member plans its own rows: `plan` covers all rows that run here, of every planner of the group, in
    block numbers of this degree. Where a step changes its degree, `rows` of the lower segment are its rows
    among those of the higher one: the lower segment takes them, or one rank of its group gives them. A rank
    without rows takes part too.
    """

    first: int
    end: int
    plan: AttentionPlan
    degree: int = 1
    group: ReduceGroup | None = None  # group of `degree` ranks; None: alone
    rows: slice = field(default_factory=lambda: slice(None))
    is_giver: bool = True  # this rank gives its group's rows


@dataclass(frozen=True, slots=True)
class Ends:
    """The ends of a model: embedding and head [vocab, H], norm [H] before the head."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor


class Transformer:
    """Everything between token ids and logits, or a stage of it."""

    def __init__(
        self,
        config: ModelConfig,
        layers: list[Layer],
        *,
        ends: Ends | None,
    ) -> None:
        """Build over `layers`, which the owner may replace between steps.

        ends: None for a later stage of a pipeline.
        """
        self.layers, self.eps, self._ends = layers, config.rms_norm_eps, ends
        device = (ends.norm if ends else layers[0].attention.input_norm).device
        self._recorded = RecordedSteps()
        self.cos_sin = config.rope.table(config.max_position_embeddings, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        segments: Sequence[Segment],
        caches_at: CachesAt,
        logit_rows: torch.Tensor,
        own: slice = slice(None),
    ) -> torch.Tensor:
        """Run a step: token_ids int64 [T] of the first segment's rows to float32 [R, vocab].

        logit_rows: int64, rows of the last segment, the same on every rank of its group. own: those of
        logit_rows that this rank's planner wants, R of them. In the last layer only logit_rows continue after
        attention: nothing reads the others any more.

        The result may lie in memory that the next step writes to.

        Raises ValueError for segments that are not the layers as they are, and PeerLost of the group.
        """
        self._check(segments)
        if (logits := self._recorded_step(token_ids, segments, caches_at, logit_rows)) is not None:
            return logits[own]
        residual = self.embed(token_ids)
        x = rms_norm(residual, self.layers[0].attention.input_norm, self.eps)
        before = segments[0]
        for segment in segments:
            if segment.degree > before.degree:
                x, residual = self._gather_to_higher_tp(before, segment, residual)
            elif segment.degree < before.degree:
                x, residual = x[segment.rows], residual[segment.rows]
            is_last = segment.end == len(self.layers)
            rows = logit_rows if is_last else None
            norm = self.ends.norm if is_last else self.layers[segment.end].attention.input_norm
            x, residual = self._run(segment, caches_at(segment.degree), x, residual, rows, norm)
            before = segment
        return linear(x[own], self.ends.head).float()

    def _recorded_step(
        self,
        token_ids: torch.Tensor,
        segments: Sequence[Segment],
        caches_at: CachesAt,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor | None:
        """Run a step alone that decodes a few sequences as one launch; None if it is another one."""
        alone = segments[0]
        if len(segments) > 1 or alone.group is not None:
            return None
        caches = caches_at(alone.degree)

        def forward(residual: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
            x = rms_norm(residual, self.layers[0].attention.input_norm, self.eps)
            segment = replace(alone, plan=plan)
            x, _ = self._run(segment, caches, x, residual, None, self.ends.norm)
            return linear(x, self.ends.head)

        halves = [half for layer in self.layers for half in (layer.attention, layer.feed_forward)]
        parts = Parts(halves, caches)
        logits = self._recorded.run(self.ends.embedding, token_ids, alone.plan, logit_rows, parts, forward)
        return None if logits is None else logits.float()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the residual [T, H] before the first layer of int64 [T]."""
        return self.ends.embedding.index_select(0, token_ids)

    def run(
        self,
        residual: torch.Tensor,
        plan: AttentionPlan,
        caches: list[torch.Tensor],
        rows: torch.Tensor | None = None,
        group: ReduceGroup | None = None,
    ) -> torch.Tensor:
        """Run all layers of this stage: residual [T, H], which is overwritten, to the residual behind them.

        rows, for the last stage: the rows that continue after the last layer's attention; the result is [R,
        H] then. group: the ranks of a stage of several, each of which runs its shard of all rows; then
        PeerLost may be raised.
        """
        x = rms_norm(residual, self.layers[0].attention.input_norm, self.eps)
        stage = Segment(0, len(self.layers), plan, group.size if group else 1, group)
        return self._run(stage, caches, x, residual, rows, None)[1]

    def logits(self, residual: torch.Tensor) -> torch.Tensor:
        """Return float32 [R, vocab] of the residual [R, H] behind the model's last layer."""
        return linear(rms_norm(residual, self.ends.norm, self.eps), self.ends.head).float()

    @property
    def ends(self) -> Ends:
        assert self._ends, "a later stage of a pipeline neither begins nor ends a step"
        return self._ends

    def _run(
        self,
        segment: Segment,
        caches: list[torch.Tensor],
        x: torch.Tensor,
        residual: torch.Tensor,
        last_rows: torch.Tensor | None,
        next_norm: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run x [T, H], normed for the segment's first layer, to the next layer's x; add to the residual.

        last_rows: the rows that continue after the last layer's attention; None: all. next_norm: of the layer
        that follows; None: it runs elsewhere, and x is of no use. Without rows there is nothing to compute or
        to sum, in the whole group.
        """
        if not x.shape[0]:
            return x, residual
        for i in range(segment.first, segment.end):
            layer, is_last = self.layers[i], i == segment.end - 1
            rows = last_rows if is_last else None
            x = layer.attention(x, segment.plan, caches[i], self.cos_sin, rows)
            _sum(x, segment.group)
            residual = residual if rows is None else residual[rows]
            x = add_rms_norm(x, residual, layer.attention.post_norm, self.eps)
            x = layer.feed_forward(x)
            _sum(x, segment.group)
            norm = next_norm if is_last else self.layers[i + 1].attention.input_norm
            if norm is None:
                residual.add_(x)
            else:
                x = add_rms_norm(x, residual, norm, self.eps)
        return x, residual

    def _gather_to_higher_tp(
        self, low: Segment, high: Segment, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and residual of all rows of `high`.

        Each row comes from one rank of the lower degree; the others add zeros to it.
        """
        wide = residual.new_zeros(high.plan.positions.shape[0], residual.shape[1])
        if low.is_giver:
            wide[low.rows] = residual
        _sum(wide, high.group)
        return rms_norm(wide, self.layers[high.first].attention.input_norm, self.eps), wide

    def _check(self, segments: Sequence[Segment]) -> None:
        """Check that the segments are the layers in order, each at its present degree."""
        at = 0
        for segment in segments:
            if not at == segment.first < segment.end:
                raise ValueError(f"a segment of layers [{segment.first}, {segment.end}); layer {at} is next")
            at = segment.end
            shard = Shard(segment.group.rank, segment.group.size) if segment.group else Shard()
            for i in range(segment.first, segment.end):
                if self.layers[i].shard != shard or segment.degree != shard.size:
                    raise ValueError(
                        f"layer {i} is at {self.layers[i].shard}; a segment of degree {segment.degree} cannot"
                        f" run it as {shard}"
                    )
        if at != len(self.layers):
            raise ValueError(f"the segments end at layer {at} of {len(self.layers)}")


def _sum(x: torch.Tensor, group: ReduceGroup | None) -> None:
    if group is not None and x.shape[0]:
        group.all_reduce(x)
