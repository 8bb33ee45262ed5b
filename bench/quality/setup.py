"""The demo model, its held-out text and its quantised sets, ready to be measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from bench.common.results import DEMO, ROOT
from bus.precisions import BITS, KVPrecision, Precision
from worker.model.config import ModelConfig, read_config
from worker.model.layer import Layer
from worker.model.quantized_sets import find_set, set_path
from worker.model.sources import CheckpointWeights
from worker.offline.calibration import read_calibration
from worker.offline.layerwise import LayerwiseModel
from worker.offline.quantizer import Quantizer
from worker.shape.host_images import find_matrices

MODELS = ROOT / "models"
CPU = torch.device("cpu")
CALIBRATION_WINDOWS = 16  # the default of `instar quantize`


@dataclass(frozen=True, slots=True)
class QualityModel:
    """A model; layers[i] has full weights under "full" and quantised ones under the name that was given."""

    config: ModelConfig
    whole: LayerwiseModel
    layers: list[dict[str, Layer]]


def held_out(tokens: int, count: int) -> torch.Tensor:
    """Return windows spread evenly over text that the model was not trained on, int64 [count, tokens + 1]."""
    if str(MODELS) not in sys.path:
        sys.path.insert(0, str(MODELS))  # path of the model's recipe, as for its own script
    from recipe.corpus import load_corpus
    from recipe.tokenizer import EOS

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    end = tokenizer.token_to_id(EOS)
    found = []
    for file in load_corpus().held_out:
        ids = [*tokenizer.encode(file.text).ids, end]
        found += [ids[start : start + tokens + 1] for start in range(0, len(ids) - tokens, tokens)]
    count = min(count, len(found))
    return torch.tensor([found[i * len(found) // count] for i in range(count)])


def make_missing_sets(folder: Path, methods: Sequence[str], precisions: Sequence[str]) -> None:
    """Link the demo model into `folder`, and make the AWQ sets there that are not committed."""
    for path in DEMO.rglob("*"):
        if path.is_file():
            link = folder / path.relative_to(DEMO)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path)
    missing = [p for p in BITS if p in precisions and find_set(folder, p, "awq") is None]
    if "awq" in methods and missing:
        config = read_config(folder)
        calibration = read_calibration(config, None, CALIBRATION_WINDOWS)
        quantizer = Quantizer(config, CheckpointWeights(folder), calibration, CPU)
        quantizer.make(quantizer.targets(["awq"], [BITS[p] for p in missing]))
    assert all(set_path(folder, p, "awq").is_file() for p in precisions if "awq" in methods)


def open_demo(
    folder: Path, precision: Precision, method: str, name: str, kv_precision: KVPrecision = "full"
) -> QualityModel:
    """Open the demo model in float32, with its quantised layers under `name`."""
    config, checkpoint = read_config(folder), CheckpointWeights(folder)
    matrices = find_matrices(config, checkpoint, precision, method)
    whole = LayerwiseModel(
        config,
        checkpoint,
        dtype=torch.float32,
        device=CPU,
        window_tokens=config.max_position_embeddings,
        kv_precision=kv_precision,
    )
    layers = [
        {"full": whole.layer(i), name: whole.quantized_layer(i, precision, matrices)}
        for i in range(config.num_layers)
    ]
    return QualityModel(config, whole, layers)
