"""Tiny checkpoints, a worker's engine that takes them while it runs, and what each makes alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import kernels
from bus.messages import PageCounts, Stage
from bus.morphs import Deploy, MorphReport, Retire
from bus.settings import WorkerSettings
from tests.support.engine_toys import Client, request
from worker.model import read_config
from worker.model.layout import plan_model
from worker.service.start_up import load

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_model(folder: Path, seed: int, **changes: Any) -> Path:
    """A random checkpoint in Hugging Face's format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    plan = plan_model(read_config(folder), torch.float32, 4096, 1)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for source in (source for part in plan.ranges() for source in part.sources):
        drawn = torch.randn(source.shape, generator=random)
        tensors[source.tensor] = 1 + drawn * 0.1 if source.is_norm else drawn * 0.15
    save_file(tensors, folder / "model.safetensors")
    return folder


def settings_for(folder: Path, host_dir: Path, **changes: Any) -> WorkerSettings:
    fields: dict[str, Any] = {
        "id": "w0",
        "models": [f"first={folder}"] if folder else [],
        "memory_mb": 8,
        "page_kib": 4,
        "block_tokens": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_tp": 1,
        "threads": 1,
        "variants": ["int8", "int4"],
        "group_host": "",
        "host_dir": str(host_dir),
    }
    return WorkerSettings(**(fields | changes))


@dataclass
class Place:
    """An engine with one model, `first@w0`, and the executor of its morphs; boundaries and steps by hand."""

    settings: WorkerSettings
    reports: list[MorphReport] = field(default_factory=list)
    client: Client = field(default_factory=Client)

    def __post_init__(self) -> None:
        self.name = self.settings.id
        self.model_host = load(self.settings, self.name, lambda text: None)
        self.engine, self.morphs = self.model_host.engine, self.model_host.morphs
        self.pool = self.model_host.pool

    def deploy(self, name: str, folder: Path, **fields: Any) -> str:
        """Begin it; returns its id."""
        stages = [Stage(workers=[self.name], first=0, end=read_config(folder).num_layers)]
        command = {
            "epoch": 0,
            "instance": f"{name}@{self.name}",
            "model": name,
            "path": str(folder),
            "stages": stages,
        }
        return self.begin(Deploy, **(command | fields))

    def retire(self, name: str, **fields: Any) -> str:
        return self.begin(Retire, **({"epoch": 0, "instance": f"{name}@{self.name}", "wait_s": 5.0} | fields))

    def begin(self, kind: Callable[..., Any], **fields: Any) -> str:
        morph_id = f"m{len(self.reports)}-{time.perf_counter_ns()}"
        self.morphs.begin(kind(id=morph_id, **fields))
        return morph_id

    def submit(self, name: str, model: str, prompt: list[int], max_tokens: int = 8, **sampling: Any) -> None:
        self.engine.submit(f"{model}@{self.name}", request(name, prompt, max_tokens, **sampling))

    def step(self, steps: int = 1) -> None:
        """Boundaries, each with a step if there is something to do."""
        for _ in range(steps):
            self.reports += self.morphs.advance(self.engine.has_work)
            if self.engine.can_step():
                self.client.take(self.engine.step())

    def until(self, true: Callable[[], Any], within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < deadline, "it does not come about"
            self.step()
            time.sleep(0.0002)

    def end_of(self, morph_id: str) -> MorphReport:
        """Steps until it has ended."""
        self.until(lambda: self._end(morph_id))
        end = self._end(morph_id)
        assert end
        return end

    def _end(self, morph_id: str) -> MorphReport | None:
        ends = [one for one in self.reports if one.id == morph_id and one.state != "running"]
        assert len(ends) <= 1
        return ends[0] if ends else None

    def run(self) -> None:
        self.until(lambda: not self.engine.has_work)

    def counts(self) -> PageCounts:
        return self.pool.counts()

    def check(self) -> None:
        self.engine.check_integrity()
        self.pool.check_integrity()
        for target in self.morphs.targets.values():
            target.check_integrity()
        assert self.morphs.targets.keys() == self.engine.instances.keys() == self.model_host.models.keys()

    def close(self) -> None:
        self.morphs.close()
        for hosted in self.model_host.models.values():
            hosted.target.resizer.cache.release()
            hosted.model.release()
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_pages, "every page is back"
        self.pool.close()


kernels.configure(1)
