"""The morph policy: when the controller changes the shape of an instance, and how far. Standard library only.

Rules, validation, command line and dashboard derive from FIELDS. The defaults are those of MorphServe (§4.1,
appendix D), the modes those of its §5; the numbers of the modes are Instar's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal

from bus.precisions import DEFAULT_SWAP, QUANTIZED, Precision

Mode = Literal["default", "accuracy", "performance", "manual"]

MAX_COUNT: Final = 2**31 - 1
MAX_DELAY_S: Final = 3600


@dataclass(frozen=True, slots=True)
class ModeEffect:
    """A field in one mode, in words and as a function of the policy and the number of layers."""

    summary: str
    value: Callable[[Policy, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyField:
    """The declaration of one field. `maximum` is allowed; so is `minimum`, unless `above_minimum`.

    `below`: the field that must be greater. `choices`: the only values of a field of text, with their
    meanings. `zero`: what 0 means, where it is not a quantity.
    """

    group: str
    label: str
    summary: str
    name: str = ""
    type: Literal["integer", "number", "choice"] = "choice"
    default: float | str = 0
    unit: str = ""
    minimum: int | None = None
    maximum: int | None = None
    above_minimum: bool = False
    below: str = ""
    zero: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    by_mode: Mapping[str, ModeEffect] = field(default_factory=dict)

    @property
    def limits(self) -> str:
        """The allowed values, as in `more than 0 and at most 1`."""
        if self.choices:
            return ", ".join(self.choices)
        if self.above_minimum:
            return f"more than {self.minimum} and at most {self.maximum}"
        return f"{self.minimum} to {self.maximum}" if self.maximum != MAX_COUNT else f"{self.minimum} or more"


def _field(
    default: Any, group: str, label: str, unit: str, limits: tuple[int, int], summary: str, **more: Any
) -> Any:
    minimum, maximum = limits
    declared = PolicyField(
        group=group, label=label, summary=summary, unit=unit, minimum=minimum, maximum=maximum, **more
    )
    return field(default=default, metadata={"policy": declared})


def _choice(default: str, group: str, label: str, summary: str, choices: Mapping[str, str]) -> Any:
    declared = PolicyField(group=group, label=label, summary=summary, choices=choices)
    return field(default=default, metadata={"policy": declared})


def _layers_of(shares: Mapping[str, float], name: str) -> dict[str, ModeEffect]:
    """Return the effects of modes on a number of layers: a share of the model's, at least one, unless set."""

    def effect(share: float) -> ModeEffect:
        def value(policy: Policy, num_layers: int) -> int:
            return min(num_layers, getattr(policy, name) or max(1, round(num_layers * share)))

        return ModeEffect(f"1/{round(1 / share)} of the layers" if share < 1 else "all layers", value)

    return {mode: effect(share) for mode, share in shares.items()}


_WHEN, _HOW_FAR, _GROUPS = "When", "How far", "Groups"
_MODES = {
    "default": "morphs under pressure",
    "accuracy": "morphs later, and fewer layers",
    "performance": "morphs sooner, and more layers",
    "manual": "morphs only by hand",
}
_HALFWAY_TO_1 = ModeEffect("half-way to 1", lambda own, _: (1 + own.kv_usage_high) / 2)
_HALFWAY = ModeEffect("half-way to kv_usage_high", lambda own, _: (own.kv_usage_low + own.kv_usage_high) / 2)
_TWICE_HIGH = ModeEffect("twice as long", lambda own, _: 2 * own.queue_delay_high_s)
_TWICE_LOW = ModeEffect("twice as long", lambda own, _: 2 * own.queue_delay_low_s)
_HALF_AS_MANY = ModeEffect("half as many", lambda own, _: max(1, own.windows // 2))


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
        (0, 1),
        "share of the KV blocks in use above which an instance is under pressure",
        above_minimum=True,
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
        "wait for KV blocks above which an instance is under pressure",
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
        "metrics in a row that must agree before a morph",
        by_mode={"performance": _HALF_AS_MANY},
    )
    cooldown_s: float = _field(
        5.0, _WHEN, "Cool-down", "s", (0, 86_400), "time from a morph until layers go back or groups change"
    )
    step_layers: int = _field(
        0,
        _HOW_FAR,
        "Layers in a morph",
        "layers",
        (0, MAX_COUNT),
        "layers that one morph swaps, or more if the queue needs them",
        zero="as the mode says",
        by_mode=_layers_of({"accuracy": 1 / 8, "default": 1 / 4, "performance": 1 / 2}, "step_layers"),
    )
    max_layers: int = _field(
        0,
        _HOW_FAR,
        "Layers at most",
        "layers",
        (0, MAX_COUNT),
        "layers that may be below the precision they rest in",
        zero="as the mode says",
        by_mode=_layers_of({"accuracy": 1 / 4, "default": 1 / 2, "performance": 1}, "max_layers"),
    )
    precision: Precision = _choice(
        DEFAULT_SWAP, _HOW_FAR, "Precision", "precision of swapped layers", dict.fromkeys(QUANTIZED, "")
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

    def in_force(self, num_layers: int) -> Policy | None:
        """Return the policy as its mode applies it to a model of `num_layers` layers; None in mode manual."""
        if self.mode == "manual":
            return None
        effects = {one.name: one.by_mode[self.mode] for one in FIELDS if self.mode in one.by_mode}
        values: dict[str, Any] = {name: effect.value(self, num_layers) for name, effect in effects.items()}
        return replace(self, **values)


def _table() -> Iterator[PolicyField]:
    kinds: dict[type, Literal["integer", "number", "choice"]] = {int: "integer", float: "number"}
    for one in fields(Policy):
        if declared := one.metadata.get("policy"):
            kind = kinds.get(type(one.default), "choice")
            yield replace(declared, name=one.name, type=kind, default=one.default)


FIELDS: Final = tuple(_table())  # all but `revision`, in the order in which people read them


def describe() -> list[dict[str, Any]]:
    """FIELDS as JSON values: the keys of PolicyField, `limits`, and `by_mode` in words."""
    return [
        asdict(replace(one, by_mode={}))
        | {"limits": one.limits, "by_mode": {mode: effect.summary for mode, effect in one.by_mode.items()}}
        for one in FIELDS
    ]
