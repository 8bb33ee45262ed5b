"""The morph policy: when the controller changes the shape of an instance, and how far. Standard library only.

Each field of `Policy` is declared once, with its default, limits, unit, meaning and what the modes make of
it. The controller's rules, the validation of `PUT /admin/policy`, `instar morph policy --help` and the
dashboard's form (`GET /admin/policy/fields`) all derive from FIELDS, the table of these declarations. The
defaults are those of MorphServe (§4.1, appendix D), the modes those of its §5; the numbers of the modes are
Instar's own.
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
    """What one mode makes of a field, in words and as a function of the policy and the number of layers."""

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


def _about(**declaration: Any) -> dict[str, PolicyField]:
    return {"policy": PolicyField(**declaration)}


def _layers_of(shares: Mapping[str, float], name: str) -> dict[str, ModeEffect]:
    """Return the effects of modes on a number of layers: a share of the model's, at least one, unless set."""

    def effect(share: float) -> ModeEffect:
        def value(policy: Policy, num_layers: int) -> int:
            return min(num_layers, getattr(policy, name) or max(1, round(num_layers * share)))

        return ModeEffect(f"1/{round(1 / share)} of the layers" if share < 1 else "all layers", value)

    return {mode: effect(share) for mode, share in shares.items()}


_WHEN, _HOW_FAR, _GROUPS = "When", "How far", "Groups"
_DOUBLED: Final = "twice as long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The key `policy`. The admin API writes it with the next revision; the controller reads it."""

    revision: int = 0
    mode: Mode = field(
        default="default",
        metadata=_about(
            group="Mode",
            label="Mode",
            summary="how readily the service morphs",
            choices={
                "default": "morphs under pressure",
                "accuracy": "morphs later, and fewer layers",
                "performance": "morphs sooner, and more layers",
                "manual": "morphs only by hand",
            },
        ),
    )
    kv_usage_high: float = field(
        default=0.85,
        metadata=_about(
            group=_WHEN,
            label="KV use above",
            unit="share",
            summary="share of the KV blocks in use above which an instance is under pressure",
            minimum=0,
            maximum=1,
            above_minimum=True,
            by_mode={"accuracy": ModeEffect("half-way to 1", lambda own, _: (1 + own.kv_usage_high) / 2)},
        ),
    )
    kv_usage_low: float = field(
        default=0.5,
        metadata=_about(
            group=_WHEN,
            label="KV use below",
            unit="share",
            summary="share of the KV blocks in use below which layers may go back",
            minimum=0,
            maximum=1,
            below="kv_usage_high",
            by_mode={
                "accuracy": ModeEffect(
                    "half-way to kv_usage_high",
                    lambda own, _: (own.kv_usage_low + own.kv_usage_high) / 2,
                )
            },
        ),
    )
    queue_delay_high_s: float = field(
        default=0.1,
        metadata=_about(
            group=_WHEN,
            label="Queue delay above",
            unit="s",
            summary="wait for KV blocks above which an instance is under pressure",
            minimum=0,
            maximum=MAX_DELAY_S,
            above_minimum=True,
            by_mode={"accuracy": ModeEffect(_DOUBLED, lambda own, _: 2 * own.queue_delay_high_s)},
        ),
    )
    queue_delay_low_s: float = field(
        default=0.02,
        metadata=_about(
            group=_WHEN,
            label="Queue delay below",
            unit="s",
            summary="wait for KV blocks below which layers may go back",
            minimum=0,
            maximum=MAX_DELAY_S,
            below="queue_delay_high_s",
            by_mode={"accuracy": ModeEffect(_DOUBLED, lambda own, _: 2 * own.queue_delay_low_s)},
        ),
    )
    windows: int = field(
        default=3,
        metadata=_about(
            group=_WHEN,
            label="Windows in a row",
            unit="windows",
            summary="metrics in a row that must agree before a morph",
            minimum=1,
            maximum=1000,
            by_mode={"performance": ModeEffect("half as many", lambda own, _: max(1, own.windows // 2))},
        ),
    )
    cooldown_s: float = field(
        default=5.0,
        metadata=_about(
            group=_WHEN,
            label="Cool-down",
            unit="s",
            summary="time between two morphs of one instance",
            minimum=0,
            maximum=86_400,
        ),
    )
    step_layers: int = field(
        default=0,
        metadata=_about(
            group=_HOW_FAR,
            label="Layers in a morph",
            unit="layers",
            summary="layers that one morph swaps",
            minimum=0,
            maximum=MAX_COUNT,
            zero="as the mode says",
            by_mode=_layers_of({"accuracy": 1 / 8, "default": 1 / 4, "performance": 1 / 2}, "step_layers"),
        ),
    )
    max_layers: int = field(
        default=0,
        metadata=_about(
            group=_HOW_FAR,
            label="Layers at most",
            unit="layers",
            summary="layers that may be below the precision they rest in",
            minimum=0,
            maximum=MAX_COUNT,
            zero="as the mode says",
            by_mode=_layers_of({"accuracy": 1 / 4, "default": 1 / 2, "performance": 1}, "max_layers"),
        ),
    )
    precision: Precision = field(
        default=DEFAULT_SWAP,
        metadata=_about(
            group=_HOW_FAR,
            label="Precision",
            summary="precision of swapped layers",
            choices=dict.fromkeys(QUANTIZED, ""),
        ),
    )
    max_tp: int = field(
        default=0,
        metadata=_about(
            group=_GROUPS,
            label="Highest degree",
            unit="workers",
            summary="highest degree of tensor parallelism of a group",
            minimum=0,
            maximum=MAX_COUNT,
            zero="what the workers are prepared for",
        ),
    )
    long_patience_s: float = field(
        default=30.0,
        metadata=_about(
            group=_GROUPS,
            label="Patience",
            unit="s",
            summary="time that a long request waits for a busy group before another one is made",
            minimum=0,
            maximum=MAX_DELAY_S,
        ),
    )
    scale_down_free: float = field(
        default=0.5,
        metadata=_about(
            group=_GROUPS,
            label="Part when free",
            unit="share",
            summary="share of a group's KV blocks that must be free before it parts",
            minimum=0,
            maximum=1,
        ),
    )

    def in_force(self, num_layers: int) -> Policy | None:
        """Return the policy with the effects of its mode on a model of `num_layers` layers.

        None in mode manual: nothing morphs by itself.
        """
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
