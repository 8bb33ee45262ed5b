"""The morph policy: when the shape of an instance changes, and how far. Standard library only.

Rules, validation, command line and dashboard derive from FIELDS. The defaults are those of MorphServe (§4.1,
appendix D), the modes those of its §5; the numbers of the modes are Instar's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from bus.fields import MAX_COUNT, Field, FieldType, declared, declared_fields
from bus.precisions import DEFAULT_SWAP, QUANTIZED, KVPrecision, Precision

Mode = Literal["default", "accuracy", "performance", "manual"]

MAX_DELAY_S: Final = 3600
URGENT: Final = 0.25  # share of the objective; after this wait morphs may take all of the time
RELIEF_SHARE: Final = 0.25  # of the time at least for relief under way: a prompt admitted hides the next
NEWS_S: Final = 3.0  # what an envelope says of requests holds for so long unless it is repeated
MOVES_S: Final = 0.2  # what it says of moves holds for so long: by then they are done, or in vain


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The time of a step with all layers in one precision, as a multiple of that in full precision."""

    prompt: float = 1.0  # factor of the time for prompt tokens
    decode: float = 1.0  # factor of the rest


@dataclass(frozen=True, slots=True)
class ModeEffect:
    """A field in one mode, in words and as a function of the policy."""

    summary: str
    value: Callable[[Policy], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyField(Field):
    """The declaration of one field of the policy.

    `below`: the field that must be greater. `zero`: what 0 means, where it is not a quantity. Of a field
    without a value, the mode decides.
    """

    group: str
    below: str = ""
    zero: str = ""
    by_mode: Mapping[str, ModeEffect] = field(default_factory=dict)


def _field(
    default: Any, group: str, label: str, unit: str, limits: tuple[float, float], summary: str, **more: Any
) -> Any:
    kind: FieldType = "integer" if isinstance(default, int) else "number"
    words: dict[str, Any] = {"group": group, "label": label, "summary": summary, "unit": unit}
    minimum, maximum = limits
    return declared(
        PolicyField(type=kind, default=default, minimum=minimum, maximum=maximum, **words, **more)
    )


def _choice(default: str, group: str, label: str, summary: str, choices: Mapping[str, str]) -> Any:
    words: dict[str, Any] = {"group": group, "label": label, "summary": summary}
    return declared(PolicyField(type="choice", default=default, choices=choices, **words))


def _unless_set(name: str, values: Mapping[str, float]) -> dict[str, ModeEffect]:
    """Return the effects of modes on a field that has no value unless it is set."""

    def effect(value: float) -> ModeEffect:
        return ModeEffect(
            f"{value:g}", lambda own: value if getattr(own, name) is None else getattr(own, name)
        )

    return {mode: effect(value) for mode, value in values.items()}


_WHEN, _HOW_FAR, _GROUPS = "When", "How far", "Groups"
_MODES = {
    "default": "morphs under pressure",
    "accuracy": "morphs later, and loses less",
    "performance": "morphs sooner, and may lose more",
    "manual": "morphs only by hand",
}
_HALFWAY_TO_1 = ModeEffect("half-way to 1", lambda own: (1 + own.kv_usage_high) / 2)
_HALFWAY = ModeEffect("half-way to kv_usage_high", lambda own: (own.kv_usage_low + own.kv_usage_high) / 2)
_TWICE_HIGH = ModeEffect("twice as long", lambda own: 2 * own.queue_delay_high_s)
_TWICE_LOW = ModeEffect("twice as long", lambda own: 2 * own.queue_delay_low_s)
_HALF_AS_MANY = ModeEffect("half as many", lambda own: max(1, own.windows // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The key `policy`. The admin API writes it with the next revision; the controller reads it."""

    revision: int = 0
    mode: Mode = _choice("default", "Mode", "Mode", "how readily the service morphs", _MODES)
    kv_usage_high: float = _field(
        0.85,
        _WHEN,
        "KV use above",
        "share",
        (0.01, 1),
        "share of the KV blocks in use above which an instance is under pressure",
        by_mode={"accuracy": _HALFWAY_TO_1},
    )
    kv_usage_low: float = _field(
        0.5,
        _WHEN,
        "KV use below",
        "share",
        (0, 1),
        "share of the KV blocks in use below which layers may go back",
        below="kv_usage_high",
        by_mode={"accuracy": _HALFWAY},
    )
    queue_delay_high_s: float = _field(
        0.1,
        _WHEN,
        "Queue delay above",
        "s",
        (0, MAX_DELAY_S),
        "predicted wait for KV blocks above which an instance is under pressure",
        above_minimum=True,
        by_mode={"accuracy": _TWICE_HIGH},
    )
    queue_delay_low_s: float = _field(
        0.02,
        _WHEN,
        "Queue delay below",
        "s",
        (0, MAX_DELAY_S),
        "wait for KV blocks below which layers may go back",
        below="queue_delay_high_s",
        by_mode={"accuracy": _TWICE_LOW},
    )
    windows: int = _field(
        3,
        _WHEN,
        "Windows in a row",
        "windows",
        (1, 1000),
        "steps of a worker in a row (for groups: metrics) that must agree before a morph; "
        "ordered swaps need one",
        by_mode={"performance": _HALF_AS_MANY},
    )
    cooldown_s: float = _field(
        5.0,
        _WHEN,
        "Cool-down",
        "s",
        (0, 86_400),
        "longest wait after relief until layers go back; wait after a morph until groups change",
    )
    ttft_slo_s: float = _field(
        2.0,
        _WHEN,
        "TTFT objective",
        "s",
        (0.001, MAX_DELAY_S),
        "time to the first token; the nearer its prediction comes, the more of the time morphs may take",
    )
    loss_budget: float | None = _field(
        None,
        _HOW_FAR,
        "Loss at most",
        "share",
        (0, 1),
        "share of the perplexity that swapped layers may add, by the model's profile",
        unset="mode",
        by_mode=_unless_set("loss_budget", {"accuracy": 0.001, "default": 0.0025, "performance": 0.05}),
    )
    max_layers: int = _field(
        0,
        _HOW_FAR,
        "Layers at most",
        "layers",
        (0, MAX_COUNT),
        "layers that may be below the precision they rest in",
        zero="as many as the loss allows",
    )
    precision: Precision = _choice(
        DEFAULT_SWAP, _HOW_FAR, "Precision", "fewest bits of swapped layers", dict.fromkeys(QUANTIZED, "")
    )
    max_tp: int = _field(
        0,
        _GROUPS,
        "Highest degree",
        "workers",
        (0, MAX_COUNT),
        "highest degree of tensor parallelism of a group",
        zero="what the workers are prepared for",
    )
    long_patience_s: float = _field(
        30.0,
        _GROUPS,
        "Patience",
        "s",
        (0, MAX_DELAY_S),
        "time that a long request waits for a busy group before another one is made",
    )
    scale_down_free: float = _field(
        0.5,
        _GROUPS,
        "Part when free",
        "share",
        (0, 1),
        "share of a group's KV blocks that must be free before it parts",
    )

    @property
    def most_loss(self) -> float:
        """The share of the perplexity that layers may lose, with the mode applied."""
        return self.loss_budget or 0.0

    def in_force(self) -> Policy | None:
        """Return the policy as its mode applies it; None in mode manual."""
        if self.mode == "manual":
            return None
        effects = {one.name: one.by_mode[self.mode] for one in FIELDS if self.mode in one.by_mode}
        values: dict[str, Any] = {name: effect.value(self) for name, effect in effects.items()}
        return replace(self, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The limits within which an instance's reflex acts; the controller sends them to the leading worker.

    It is sent again when it changes, and four times while it is valid. Without a fresh one the reflex takes
    no more loss, and goes on to give layers back. `floor` and `expected_blocks` are valid for NEWS_S alone,
    `moved_blocks` for MOVES_S.
    """

    id: str
    epoch: int  # epoch of the worker
    instance: str
    policy: Policy  # policy with its mode applied; mode manual: no morph
    resting: Precision = "full"  # precision that layers go back to
    precisions: list[Precision] = field(default_factory=list)  # below it, that layers may be held in
    kv_precisions: list[KVPrecision] = field(default_factory=list)  # of fewer bits, for the KV cache
    slowdowns: dict[Precision, Slowdown] = field(default_factory=dict)  # of steps; absent: unknown, so none
    floor: Precision | Literal[""] = ""  # floor of a request that waits at a gateway; "": none
    expected_blocks: int = 0  # KV blocks needed by the forecast; 0: no forecast
    moved_blocks: int = 0  # KV blocks of queued prompts that are being moved elsewhere
    valid_s: float = 60.0


FIELDS: Final = declared_fields(
    Policy, PolicyField
)  # all but `revision`, in the order in which people read them


def share_for(wait_s: float, ttft_slo_s: float) -> float:
    """Return the share (0..1) of a busy worker's time that morphs may take for requests that wait so long."""
    return min(1.0, wait_s / (ttft_slo_s * URGENT))


def describe() -> list[dict[str, Any]]:
    """FIELDS as JSON values: the keys of PolicyField, `limits`, and `by_mode` in words."""
    return [
        asdict(replace(one, by_mode={}))
        | {"limits": one.limits, "by_mode": {mode: effect.summary for mode, effect in one.by_mode.items()}}
        for one in FIELDS
    ]
