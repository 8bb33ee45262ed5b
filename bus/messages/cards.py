"""Cards: the state of workers and their instances, in keys of the registry (`bus.registry`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bus.messages.shapes import Stage
from bus.precisions import PRECISIONS, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceCard:
    """A model that a worker serves.

    Each member of a tensor-parallel group has a card of its own, with the same `tp` and `workers`. The card
    of the first member stands for the group; each member takes requests on the stream of its own card. A
    pipeline (`pp` above 1) has only the card of its leader: `workers` lists the workers of all stages, and
    `tp` is the degree of each stage.
    """

    id: str
    model: str
    model_path: str  # readable by the gateway too, which loads the tokenizer from it
    max_model_len: int
    vocab_size: int
    num_layers: int
    dtype: str
    block_tokens: int
    tp: int = 1
    pp: int = 1
    workers: list[str] = field(default_factory=list)  # in the order of their shards
    variants: list[Precision] = field(default_factory=lambda: ["full"])  # what its layers can be held in
    order: list[int] = field(default_factory=list)  # in which layers are swapped; [0] goes first
    order_name: str = ""  # "profile", "front-to-back", "back-to-front", "random"
    min_blocks: int = 0  # the fewest KV blocks: the longest sequence must fit
    max_blocks: int = 0  # the most that one worker can have; a group can have `tp` times that; 0: unknown
    layer_pages: dict[Precision, int] = field(default_factory=dict)  # of its largest layer, by precision
    attention_pages: dict[Precision, int] = field(default_factory=dict)  # of that layer's attention alone
    kv_heads: int = 0  # 0: unknown
    degrees: list[int] = field(default_factory=lambda: [1])  # tensor-parallel degrees it can be part of
    tokens_at: dict[int, int] = field(default_factory=dict)  # by degree: tokens of KV it would have room for
    deployed: str = ""  # id of the Deploy that loaded it; "": the worker's settings named it
    precision: Precision = "full"  # that it was deployed in
    stages: list[Stage] = field(default_factory=list)  # of a pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCard:
    """A worker; key `card:{worker}`. Valid only while `lease:{worker}` holds the same epoch."""

    id: str
    epoch: int
    host: str
    pid: int
    device: str
    page_bytes: int
    state: Literal["loading", "serving", "draining"]
    instances: list[InstanceCard] = field(default_factory=list)
    progress: str = ""  # while loading: what is loading, and how far
    link: str = ""  # "host:port" for other workers; "": it joins no group and no pipeline
    link_key: bytes = b""  # that they authenticate with
    variants: list[Precision] = field(default_factory=lambda: list(PRECISIONS))  # that it keeps of each model
    loading: list[str] = field(default_factory=list)  # models that it loads while it serves others
    device_kind: str = ""  # "cpu" or the name of the GPU; "": not known yet

    @property
    def kind(self) -> str:
        """The kind of device that profiles are keyed by: devices of one kind measure alike."""
        return self.device_kind or self.device.partition(":")[0]
