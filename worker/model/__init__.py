"""Models: a Hugging Face folder becomes weights in the page pool and a forward pass over them.

`load_model` is the way in; `config` reads the folder, `families` says what differs between architectures,
`layout` and `quantized_layout` say where every weight lies, `sources` where its values come from, `weights`
fills the ranges, `halves` makes of a variant's tensors what a layer runs (`layer`), `transformer` runs them.
"""

from worker.model.config import ModelConfig, ModelError, read_config
from worker.model.model import Model, load_model
from worker.model.shard import Shard
from worker.model.transformer import Segment

__all__ = ["Model", "ModelConfig", "ModelError", "Segment", "Shard", "load_model", "read_config"]
