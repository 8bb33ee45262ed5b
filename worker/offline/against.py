"""`instar profile --against`: the perplexity of a pruned or sparse checkpoint beside that of its model."""

from __future__ import annotations

import torch

from bus.variants import TWO_OF_FOUR, compare
from worker.model.config import ModelConfig, ModelError
from worker.model.layout import plan_model
from worker.model.ready_weights import open_checkpoint
from worker.model.sources import checkpoint_digest
from worker.model.sparse_weights import has_pattern
from worker.offline.calibration import Calibration
from worker.offline.importance import perplexity
from worker.offline.layerwise import LayerwiseModel
from worker.offline.progress import ProgressLine
from worker.shape.base_loss import BaseLoss


def measure_against(
    config: ModelConfig, base: ModelConfig, calibration: Calibration, device: torch.device
) -> BaseLoss:
    """Measure both on the same tokens, one after the other. Raises ModelError.

    A checkpoint that cannot stand for `base` is refused: other tokens have another perplexity.
    """
    if unlike := compare(config.folder, base.folder).unlike:
        raise ModelError(f"{config.folder} cannot stand for {base.folder}: {unlike}")
    progress = ProgressLine("against", base.num_layers + config.num_layers, "layers")
    of_base, of_model = (_Measured(one, calibration, device, progress) for one in (base, config))
    return BaseLoss(
        model=of_model.digest,
        base=of_base.digest,
        calibration=calibration.digest,
        windows=list(calibration.tokens.shape),
        perplexity=[round(of_base.perplexity, 4), round(of_model.perplexity, 4)],
        pattern=TWO_OF_FOUR if of_model.is_sparse else "",
    )


class _Measured:
    """The digest and the perplexity of a checkpoint, and whether all its layers' matrices are 2:4 sparse."""

    def __init__(
        self, config: ModelConfig, calibration: Calibration, device: torch.device, progress: ProgressLine
    ) -> None:
        checkpoint, windows = open_checkpoint(config), calibration.tokens.to(device)
        dtype = torch.float32 if device.type == "cpu" else config.dtype
        model = LayerwiseModel(config, checkpoint, dtype=dtype, device=device, window_tokens=windows.shape[1])
        hidden = [model.embed(window) for window in windows]
        for index in range(config.num_layers):
            layer = model.layer(index)
            hidden = [model.run(layer, x) for x in hidden]
            progress.advance()
        self.perplexity = perplexity(model, hidden, windows)
        self.is_sparse = all(has_pattern(checkpoint.read(name)) for name in _matrices(config))
        self.digest = checkpoint_digest(config, checkpoint)


def _matrices(config: ModelConfig) -> list[str]:
    """Return the names of the matrices that pruning sets to zero: those of layers, but no router."""
    plan = plan_model(config, config.dtype, page_bytes=4096, max_tp=1)
    sources = [source for halves in plan.layers for half in halves for source in half.sources]
    return sorted({one.tensor for one in sources if len(one.shape) > 1 and one.param != "router"})
