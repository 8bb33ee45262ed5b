"""A calibration: what steps and morphs of one model on one device cost, as measured, and what that covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from bus.messages import PARTS, Part
from bus.policy import Slowdown
from bus.precisions import PRECISIONS, Precision
from instar.errors import InputError

VERSION: Final = 2
DEFAULT: Final = "demo.json"  # models/demo on a CPU, in this package
MADE_BY: Final = "`instar simulate --calibrate RUN_DIR --out FILE` makes one"

AboveZero = Annotated[float, msgspec.Meta(gt=0)]
FromZero = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds of a step with all layers in one precision: a sum of four terms."""

    fixed_s: FromZero
    prompt_token_s: FromZero
    decode_s: FromZero  # seconds for each sequence that gets a token
    kv_token_s: FromZero  # seconds for each token of KV that the step reads

    def seconds(self, num_prompt: float, num_decodes: float, kv_tokens: float, num_steps: float = 1) -> float:
        """Return the time of steps with so many tokens of prompts, tokens of outputs, and KV read in all."""
        base_s = num_steps * self.fixed_s + num_decodes * self.decode_s
        return num_prompt * self.prompt_token_s + (base_s + kv_tokens * self.kv_token_s)

    def times(self, factor: float) -> StepCosts:
        """Return the costs multiplied by a factor."""
        return StepCosts(*(factor * getattr(self, name) for name in self.__struct_fields__))


class MorphCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds that a half of a layer takes, with all of the time for it: a busy worker has `share`."""

    half_s: FromZero
    byte_s: FromZero  # seconds for each byte of the new variant
    share: Annotated[float, msgspec.Meta(gt=0, le=1)]
    disk_byte_s: FromZero = 0.0  # the same of a disk, which reads beside that, whatever the share
    kv_layer_s: FromZero = 0.0  # seconds between two steps in which the KV of a layer is converted


class Degree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group: its speed relative to a worker alone, and the tokens of its whole KV cache."""

    speed: AboveZero
    kv_tokens: Count


class TransformCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of a change of degree, in which one layer changes in each step.

    The defaults are those of bench/results/transform.json: 211 ms for 12 layers of an idle group, and 3 % and
    7.6 % more time for the steps of a busy one. layer_s: the shortest step that changes a layer. slowdown: of
    the steps meanwhile. degrees: of the groups that can form; without any none does.
    """

    layer_s: FromZero = 0.0176
    slowdown: Annotated[float, msgspec.Meta(ge=1)] = 1.05
    degrees: dict[int, Degree] = {}


class CalibratedMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's pages and KV blocks while all layers are in full precision.

    spare_pages: free ones beyond the reserve for swaps. layer_pages, attention_pages: of one layer. kv_gain:
    KV blocks in 8 bits for each in the model's dtype. kv_loss: the share of perplexity that they cost;
    without it the KV cache is never converted. Steps are taken to be as fast in 8 bits.
    """

    page_bytes: Count
    kv_pages: Count
    kv_blocks: Count
    spare_pages: Annotated[int, msgspec.Meta(ge=0)]
    layer_pages: dict[Precision, int]
    attention_pages: dict[Precision, int]
    kv_gain: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    kv_loss: FromZero | None = None

    def half_pages(self, part: Part, precision: Precision) -> int:
        """Return the pages of the attention or the FFN of a layer."""
        attention = self.attention_pages[precision]
        return attention if part == PARTS[0] else self.layer_pages[precision] - attention

    @property
    def reserve_pages(self) -> int:
        """Pages that stay free, with which any layer can be swapped."""
        return max((pages for name, pages in self.layer_pages.items() if name != "full"), default=0)


class EngineLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of one instance, as in the worker's settings."""

    max_model_len: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    block_tokens: Count


class Coverage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The range of the measurements: most sequences at once, the longest prompt, and the precisions."""

    running: int
    prompt_tokens: int
    precisions: list[Precision]


class EngineCalibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A calibration file.

    step: in full precision. below_full: with all layers in one other precision; a step of several costs what
    the shares of its halves say. order: in which layers are swapped. losses: by precision and part, the share
    of perplexity that each layer's half adds; those that are missing are assumed, as by a worker without a
    profile. transit_s: from the client to the worker and back. error: median relative error of the fit.
    """

    version: int
    model: str
    source: str
    num_layers: Count
    order: list[int]
    limits: EngineLimits
    memory: CalibratedMemory
    step: StepCosts
    below_full: dict[Precision, StepCosts]
    morph: MorphCosts
    covers: Coverage
    transform: TransformCosts = TransformCosts()
    transit_s: FromZero = 0.0
    losses: Mapping[Precision, Mapping[str, Sequence[float]]] = {}
    error: float = 0.0

    @property
    def tokens_at(self) -> dict[int, int]:
        """The tokens of the KV cache of a worker alone, and of a group of each degree."""
        alone = self.memory.kv_blocks * self.limits.block_tokens
        return {1: alone} | {degree: one.kv_tokens for degree, one in self.transform.degrees.items()}

    def step_of(self, shares: Mapping[Precision, float]) -> StepCosts:
        """Return the costs of a step with these shares of halves below full precision."""
        if not shares:
            return self.step
        parts = [(1 - sum(shares.values()), self.step)]
        parts += [(share, self.below_full[precision]) for precision, share in shares.items()]
        return StepCosts(
            *(
                max(0.0, sum(share * getattr(costs, name) for share, costs in parts))
                for name in StepCosts.__struct_fields__
            )
        )

    def slowed(self, factor: float) -> EngineCalibration:
        """Return the calibration of a machine on which steps take `factor` times as long."""
        return msgspec.structs.replace(
            self,
            step=self.step.times(factor),
            below_full={name: costs.times(factor) for name, costs in self.below_full.items()},
        )

    @property
    def slowdowns(self) -> dict[Precision, Slowdown]:
        """The times of steps as multiples of those in full precision, at as many sequences as were measured.

        So a deployment's profile has them (`controller.planning.latency.slowdowns_of`).
        """
        full_s = self.step.seconds(0, self.covers.running, 0)
        return {
            precision: Slowdown(
                costs.prompt_token_s / self.step.prompt_token_s if self.step.prompt_token_s else 1.0,
                costs.seconds(0, self.covers.running, 0) / full_s if full_s else 1.0,
            )
            for precision, costs in self.below_full.items()
        }

    @property
    def variants(self) -> list[Precision]:
        """The precisions that layers can have, from the most bits on."""
        return [name for name in PRECISIONS if name in self.memory.layer_pages]


def load(path: Path | None) -> EngineCalibration:
    """Read a calibration, or the one of models/demo. Raises InputError."""
    try:
        text = files("instar.simulate").joinpath(DEFAULT).read_bytes() if path is None else path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; {MADE_BY}") from error
    return parse(text, str(path or DEFAULT))


def parse(text: bytes, name: str) -> EngineCalibration:
    """Parse and check a calibration. Raises InputError."""
    try:
        found: Any = msgspec.json.decode(text)
        version = found.get("version") if isinstance(found, dict) else None
        if version != VERSION:
            raise InputError(
                f"{name}: is no calibration of version {VERSION}: its version is {version}; {MADE_BY}"
            )
        calibration = msgspec.convert(found, EngineCalibration, str_keys=True)
    except msgspec.ValidationError as error:
        raise InputError(f"{name}: is not a calibration: {error}; {MADE_BY}") from error
    except msgspec.DecodeError as error:
        raise InputError(f"{name}: is not JSON: {error}; {MADE_BY}") from error
    if problem := _problem(calibration):
        raise InputError(f"{name}: is not a calibration: {problem}; {MADE_BY}")
    return calibration


def _problem(found: EngineCalibration) -> str:
    """Return what contradicts itself, or ""."""
    memory, limits = found.memory, found.limits
    if sorted(found.order) != list(range(found.num_layers)):
        return f"order is {found.order}, not one of {found.num_layers} layers"
    if "full" not in memory.layer_pages or memory.layer_pages.keys() != memory.attention_pages.keys():
        return "layer_pages and attention_pages must have the same precisions, full among them"
    if missing := [one for one in found.variants if one != "full" and one not in found.below_full]:
        return f"below_full lacks {missing[0]}"
    costs = {"step": found.step} | {f"below_full of {name}": one for name, one in found.below_full.items()}
    if free := [name for name, one in costs.items() if not one.seconds(1, 1, 1)]:
        return f"{free[0]}: a step takes no time; one of its four costs must be above 0"
    if wrong := [
        f"{name} of the {part}"
        for name, parts in found.losses.items()
        for part in PARTS
        if len(parts.get(part, [])) != found.num_layers
    ]:
        return f"losses in {wrong[0]} needs {found.num_layers} numbers, one for each layer"
    if odd := [one for one in found.transform.degrees if one < 2 or one & (one - 1)]:
        return f"transform.degrees has {odd[0]}; degrees are powers of two, from 2 on"
    if max(found.tokens_at.values()) < limits.max_model_len:
        return (
            f"{memory.kv_blocks} KV blocks of {limits.block_tokens} tokens hold no sequence of "
            f"{limits.max_model_len} tokens"
        )
    return ""


def not_covered(
    calibration: EngineCalibration, longest_prompt: int, precisions: list[Precision]
) -> list[str]:
    """Return what is asked for and was not measured: what, the value and the limit."""
    covers, missing = calibration.covers, []
    if longest_prompt > covers.prompt_tokens:
        limit = covers.prompt_tokens
        missing.append(f"prompts of {longest_prompt} tokens, and the longest measured has {limit}")
    if unknown := [one for one in precisions if one not in covers.precisions]:
        measured = ", ".join(covers.precisions)
        missing.append(f"layers in {' and '.join(unknown)}, and measured are {measured}")
    return missing
