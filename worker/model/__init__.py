"""Models: a Hugging Face folder becomes weights in the page pool and a forward pass over them.

`config` reads the folder (`bus.families` has the differences between architectures), `layout` and
`quantized_layout` place every weight, `sources`, `ready_weights` and `quantized_sets` read them, `weights`
reserves the ranges, `layer` builds what a step runs out of a variant's tensors, `transformer` runs the
layers.
"""

from worker.model.config import ModelConfig, ModelError, read_config
from worker.model.model import Model
from worker.model.shard import Shard
from worker.model.transformer import Segment

__all__ = ["Model", "ModelConfig", "ModelError", "Segment", "Shard", "read_config"]
