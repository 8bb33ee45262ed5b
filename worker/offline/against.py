"""`instar profile --against`: the perplexity of a pruned or sparse checkpoint beside that of its model."""

from __future__ import annotations

import torch

from bus.variants import TWO_OF_FOUR, compare
from worker.model.config import ModelConfig, ModelError
from worker.model.layout import plan_model
from worker.model.ready_weights import open_checkpoint
from worker.model.sources import CheckpointWeights, checkpoint_digest
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
        self.is_sparse = _is_sparse(config, checkpoint)
        self.digest = checkpoint_digest(config, checkpoint)


def _is_sparse(config: ModelConfig, checkpoint: CheckpointWeights) -> bool:
    """Return True if all matrices that pruning sets to zero are 2:4 sparse: those of layers, but no router.

    The pattern is along the inputs, which are the rows of a stack [E, K, N] of experts.
    """
    if config.has_mxfp4_experts:
        return False  # they are codes, which no tool makes so sparse
    plan = plan_model(config, config.dtype, page_bytes=4096, max_tp=1)
    sources = [source for halves in plan.layers for half in halves for source in half.sources]
    matrices = {
        one.tensor: one.expert is not None
        for one in sources
        if len(one.part_shape) > 1 and one.param != "router"
    }
    for name, is_stack in sorted(matrices.items()):
        weight = checkpoint.read(name)
        if not has_pattern(weight.mT if is_stack else weight):
            return False
    return True
