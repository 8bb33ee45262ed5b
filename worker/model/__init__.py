"""Models: a Hugging Face folder becomes weights in the page pool and a forward pass over them.

`load_model` loads a folder. `config` reads it, `families` has the differences between architectures, `layout`
and `quantized_layout` place every weight, `sources` and `quantized_sets` read them, `weights` fills the
ranges, `layer` builds what a step runs out of a variant's tensors, `transformer` runs the layers.
"""

from worker.model.config import ModelConfig, ModelError, read_config
from worker.model.model import Model, load_model
from worker.model.shard import Shard
from worker.model.transformer import Segment

__all__ = ["Model", "ModelConfig", "ModelError", "Segment", "Shard", "load_model", "read_config"]
