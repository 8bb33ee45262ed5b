"""What a model loses with all of its layers in fewer bits, as its stored profiles tell."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from bus.messages import Precision
from worker.model.config import ModelConfig
from worker.model.errors import ModelError
from worker.model.sources import Checkpoint
from worker.profile.order import profile_path, read_profile
from worker.quantize.fingerprint import model_fingerprint
from worker.quantize.sets import find_set, set_path

log = logging.getLogger("worker")


def losses(config: ModelConfig, precisions: Iterable[Precision], method: str = "") -> dict[Precision, float]:
    """Shares of perplexity more than at full precision, of the calibration text. method: of the worker's
    settings. A precision without a profile of this very model, made with the method that is served, has
    none. Reads a few MB. Raises ModelError: the checkpoint cannot be read."""
    folder, found = config.folder, dict[Precision, float]()
    paths = {
        name: path for name in precisions if name != "full" and (path := profile_path(folder, name)).is_file()
    }
    model = model_fingerprint(config, Checkpoint(folder)) if paths else ""
    for name, path in paths.items():
        try:
            profile = read_profile(path, model=model, num_layers=config.num_layers)
        except ModelError as error:
            log.warning("what %s loses is not known: %s", name, error)
            continue
        if profile.method == _served(folder, name, method) and profile.loss is not None:
            found[name] = profile.loss
    return found


def _served(folder: Path, precision: Precision, method: str) -> str:
    """The method of the set that a worker would load."""
    path = find_set(folder, precision, method)
    methods = [each for each in ("awq", "gptq") if path == set_path(folder, precision, each)]
    return methods[0] if methods else "rtn"
