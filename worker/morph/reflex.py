"""The reflex of an instance: when layers lose bits for KV blocks, and when they go back. Pure.

The controller grants an `Envelope`. At every step boundary the worker asks `judge`, and for the morph that is
due `worker.morph.sizing`.

Relief is due when steps in a row (MorphServe, section 6), or PRESSED_S of long ones, show that blocks are
missing, or one alone if requests would wait for URGENT of the objective: that is no noise, and the next step,
full of the prompts that found room, may take long. It waits for no cool-down. A return waits for ten times
what the last relief took, and longer each time that layers went back too early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from bus.morphs import HALF_S, Cause
from bus.policy import RELIEF_SHARE, Envelope, Policy, share_for
from bus.precisions import LOWEST, Precision, is_below

Lever = Literal["resize", "kv_down", "kv_up", "swap_down", "swap_up"]
DOWN: Final[frozenset[Lever]] = frozenset({"kv_down", "swap_down"})  # to fewer bits
UP: Final[frozenset[Lever]] = frozenset({"kv_up", "swap_up"})

REGRET_S: Final = 30.0  # layers that are swapped again within this time went back too early
FIRST_PAUSE_S, FIRST_REGRET_S, LONGEST_PAUSE_S = 0.1, 1.0, 8.0  # after a refusal, a regret; doubled each time
LATE: Final = 0.5  # share of the objective; a prediction above it is acted on
AHEAD_S, MOST_AHEAD_S = 0.25, 1.0  # relief is for what comes until it is done, and the next may be decided
HOLD_TIMES: Final = 10  # a return waits for so many times the duration of the last relief
PRESSED_S: Final = 0.05  # pressure that lasts so long is acted on, however few steps it has been
BURST_S: Final = 10.0  # what is withheld again within this time belongs to the same burst
PREEMPTED_S: Final = 1.0  # a preemption counts as pressure for so long


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of an instance at a step boundary: blocks of KV, sequences, seconds."""

    at_s: float
    kv_blocks: int
    kv_used: int
    kv_needed: int  # at the peak of what runs and waits, as far as it can run at once
    running: int = 0
    waiting: int = 0
    waited_s: float = 0.0  # how long the head of the queue has been here, while blocks are missing
    residence_s: float = 0.0  # mean time that a sequence runs; 0: none has ended yet
    preemptions: int = 0  # since the start
    floor_refused: Precision = LOWEST  # highest floor of recently refused requests
    prompt_tokens: int = 0  # to compute before a prompt that comes now has its turn
    prompt_rate: float = 0.0  # prompt tokens per second of the last steps; 0: unknown
    arriving: float = 0.0  # requests per second that came lately
    kv_expected: int = 0  # blocks needed by the controller's forecast; 0: no forecast
    members: int = 1  # workers that have requests of the instance: more than one in a group

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def kv_usage(self) -> float:
        return self.kv_used / self.kv_blocks if self.kv_blocks else 1.0

    @property
    def misses_blocks(self) -> bool:
        return self.waiting > 0 and self.kv_needed > self.kv_blocks

    def kv_coming(self, ahead_s: float) -> int:
        """Return the blocks that are needed beyond `kv_needed` after `ahead_s` if requests go on to come.

        Each needs as many as those that are here; those that end in the meantime leave theirs.
        """
        here = self.running + self.waiting
        asked = self.arriving * self.kv_needed / here if here else 0.0
        left = self.kv_used / self.residence_s if self.residence_s else 0.0
        return int(max(0.0, asked - left) * ahead_s)

    @property
    def predicted_compute_s(self) -> float:
        """The time until a prompt that comes now has its turn, if blocks are no obstacle."""
        return self.prompt_tokens / self.prompt_rate if self.prompt_rate else 0.0

    @property
    def predicted_wait_s(self) -> float:
        """The wait for blocks of a request that comes now.

        Blocks come free at kv_used / residence_s (Little's law). Without a history the wait so far counts.
        """
        if not self.misses_blocks:
            return 0.0
        return self.waited_s + self.frees_s(self.kv_needed - self.kv_blocks)

    def frees_s(self, blocks: int) -> float:
        """Return the time until so many blocks come free by themselves; 0.0 without a history."""
        return blocks * self.residence_s / max(1, self.kv_used)


@dataclass(frozen=True, slots=True)
class LeverPause:
    """A pause that doubles with every time in a row."""

    times: int = 0
    until_s: float = float("-inf")

    def again(self, at_s: float, first_s: float = FIRST_PAUSE_S) -> LeverPause:
        """Return the pause after one more time; a long quiet time ends the row."""
        times = self.times + 1 if at_s < self.until_s + 2 * REGRET_S else 1
        return LeverPause(times, at_s + min(LONGEST_PAUSE_S, first_s * 2 ** min(times - 1, 16)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReflexState:
    """The memory of the reflex about an instance.

    `pressure`, `ease`: steps in a row. `pauses`: by lever, after refusals and regrets; that of `swap_up`
    holds back every return. `is_by_hand`: layers or the KV cache changed by hand, and nothing has run since.
    `stands_until_s`: no layer goes back before, as another's order says. `withheld`: by code, when relief was
    withheld last.
    """

    pressure: int = 0
    pressed_s: float = float("inf")  # when the row of pressure began
    ease: int = 0
    preemptions: int = 0
    preempted_s: float = float("-inf")
    relieved_s: float = float("-inf")  # the last relief was decided, or ended
    returned_s: float = float("-inf")  # the last return was decided
    relief_took_s: float = 0.0
    relief_half_s: float = 0.0  # of it, for each half of a layer; 0: none was swapped yet
    half_work_s: float = HALF_S  # of the last relief for each half, if it had had all of the time
    is_by_hand: bool = False
    stands_until_s: float = float("-inf")
    withheld: Mapping[str, float] = field(default_factory=dict)
    pauses: Mapping[Lever, LeverPause] = field(default_factory=dict)

    @property
    def ahead_s(self) -> float:
        """The time for which relief that is decided now must suffice."""
        return min(MOST_AHEAD_S, max(AHEAD_S, self.relief_took_s))

    def is_paused(self, lever: Lever, at_s: float) -> bool:
        """Return True while `lever` pauses."""
        return lever in self.pauses and at_s < self.pauses[lever].until_s

    def return_due_s(self, policy: Policy) -> float:
        """Return the time before which no layer goes back."""
        hold_s = min(policy.cooldown_s, HOLD_TIMES * self.relief_took_s)
        pause = self.pauses.get("swap_up", LeverPause())
        return max(self.relieved_s + hold_s, pause.until_s, self.stands_until_s)

    def paused(self, lever: Lever, at_s: float, first_s: float = FIRST_PAUSE_S) -> ReflexState:
        """Lengthen the pause of `lever`."""
        pause = self.pauses.get(lever, LeverPause()).again(at_s, first_s)
        return replace(self, pauses={**self.pauses, lever: pause})


@dataclass(frozen=True, slots=True)
class Need:
    """Why a morph is due; `words` are for people."""

    goal: Literal["relief", "return"]
    cause: Cause
    words: str


@dataclass(frozen=True, slots=True)
class Withheld:
    """Why no morph is decided where requests wait; `reason` is for people."""

    code: str
    reason: str


# ----------------------------------------------------------------------------- is a morph due?


def judge(state: ReflexState, load: Load, envelope: Envelope) -> tuple[ReflexState, list[Need]]:
    """Count one step boundary. Returns what is due; the first that has a morph is done."""
    policy, at_s = envelope.policy, load.at_s
    state = replace(state, is_by_hand=state.is_by_hand and load.is_idle)
    if policy.mode == "manual":
        return replace(state, pressure=0, ease=0, preemptions=load.preemptions), []
    if load.preemptions > state.preemptions:
        state = replace(state, preempted_s=at_s)
    pressure, ease = _pressure(state, load, policy), _ease(state, load, policy)
    state = replace(
        state,
        preemptions=load.preemptions,
        pressure=state.pressure + 1 if pressure else 0,
        pressed_s=state.pressed_s if state.pressure else at_s,
        ease=state.ease + 1 if ease else 0,
    )
    needs = []
    if load.floor_refused != LOWEST and not state.is_paused("swap_up", at_s):
        words = f"a request waits that takes no layer below {load.floor_refused}"
        needs.append(Need("return", "precision_floor", words))
    is_sure = state.pressure >= policy.windows or at_s >= state.pressed_s + PRESSED_S
    if pressure and (is_sure or (load.waiting and urgency(load, policy) == 1.0)):
        needs.append(Need("relief", *pressure))
    is_calm = load.is_idle or state.ease >= policy.windows
    if ease and is_calm and not state.is_by_hand and at_s >= state.return_due_s(policy):
        needs.append(Need("return", *ease))
    return state, needs


def _pressure(state: ReflexState, load: Load, policy: Policy) -> tuple[Cause, str] | None:
    wait_s = load.predicted_wait_s
    if wait_s > policy.queue_delay_high_s:
        return "queue_delay", (
            f"{load.waiting} requests wait, the next for {wait_s:.2f} s by prediction, above "
            f"{policy.queue_delay_high_s:g} s: {load.kv_needed} KV blocks are needed of {load.kv_blocks}"
        )
    if load.misses_blocks and load.predicted_compute_s > LATE * policy.ttft_slo_s:
        return "queue_delay", f"{_compute_words(load, policy)}, and KV blocks are missing too"
    if load.kv_usage > policy.kv_usage_high:
        return "kv_usage", f"KV use {load.kv_usage:.2f} is above {policy.kv_usage_high:g}"
    if load.at_s < state.preempted_s + PREEMPTED_S and load.kv_usage >= policy.kv_usage_low:
        return "preemptions", "requests lose their blocks"
    if load.kv_expected > policy.kv_usage_high * load.kv_blocks:
        return "forecast", f"{load.kv_expected} KV blocks are expected to be needed of {load.kv_blocks}"
    return None


def _ease(state: ReflexState, load: Load, policy: Policy) -> tuple[Cause, str] | None:
    if load.kv_expected >= policy.kv_usage_low * load.kv_blocks:
        return None
    if load.is_idle:
        return "ease", "nothing runs"
    is_calm = load.predicted_wait_s < policy.queue_delay_low_s and not load.waited_s
    if is_calm and load.kv_usage < policy.kv_usage_low and load.at_s >= state.preempted_s + PREEMPTED_S:
        return (
            "ease",
            f"KV use {load.kv_usage:.2f} is below {policy.kv_usage_low:g} and nothing waits for blocks",
        )
    return None


def _compute_words(load: Load, policy: Policy) -> str:
    return (
        f"{load.prompt_tokens} prompt tokens are due at {load.prompt_rate:.0f} a second, so the next request "
        f"waits for {load.predicted_compute_s:.2f} s, above half of the objective of {policy.ttft_slo_s:g} s"
    )


def waits_for_compute(load: Load, envelope: Envelope) -> Withheld | None:
    """Return why no morph helps requests whose first token will be late; None if that is not so."""
    policy = envelope.policy
    is_late = load.predicted_compute_s > LATE * policy.ttft_slo_s
    if policy.mode == "manual" or not is_late or load.misses_blocks:
        return None
    words = f"requests wait for compute, not for KV blocks: {_compute_words(load, policy)}"
    return Withheld("compute", f"{words}; {load.kv_needed} KV blocks are needed of {load.kv_blocks}")


def soon_over(state: ReflexState, load: Load, need: Need) -> Withheld | None:
    """Return why no layer loses bits for requests that wait: they get blocks before a half is swapped.

    None if it is not over so soon, or if that is not known. A full cache is pressure all the same: gateways
    send no more than it holds. The prediction is by requests that have ended: if one waits for longer than a
    half takes, those that run now are longer, and it has failed.
    """
    missing = load.kv_needed - load.kv_blocks
    frees_s = load.frees_s(missing)
    if load.waited_s > state.relief_half_s:
        return None
    if need.cause != "queue_delay" or load.kv_coming(state.ahead_s) or not 0 < frees_s <= state.relief_half_s:
        return None
    return Withheld(
        "soon",
        f"the {missing} KV blocks that are missing come free within {frees_s:.2f} s, and a half of a layer "
        f"takes {state.relief_half_s:.2f} s",
    )


def is_stale(envelope: Envelope, granted_s: float, at_s: float) -> bool:
    """Return True if an envelope that came at `granted_s` allows no further loss."""
    return at_s >= granted_s + envelope.valid_s


def is_at_rest(precision: Precision, resting: Precision) -> bool:
    """Return True unless `precision` has fewer bits than at rest."""
    return not is_below(precision, resting)


def urgency(load: Load, policy: Policy, *, is_relieving: bool = False) -> float:
    """Return the share of the time (0..1) that morphs may take.

    A queue for compute alone counts for nothing: copies would only hold it up. is_relieving: relief is under
    way that somebody needs now, and gets RELIEF_SHARE also while what waits has just been admitted.
    """
    compute_s = load.predicted_compute_s if load.misses_blocks else 0.0
    wanted = share_for(max(load.predicted_wait_s, load.waited_s, compute_s), policy.ttft_slo_s)
    return max(wanted, RELIEF_SHARE if is_relieving else 0.0)


# ----------------------------------------------------------------------------- what became of it


def decided(state: ReflexState, lever: Lever, at_s: float) -> ReflexState:
    """Note that a morph was ordered. What loses bits soon after it went back did so too early."""
    state = replace(state, pressure=0, ease=0)
    if lever in UP:
        return replace(state, returned_s=at_s)
    if lever in DOWN and at_s < state.returned_s + REGRET_S:
        state = replace(state, returned_s=float("-inf")).paused("swap_up", at_s, FIRST_REGRET_S)
    return replace(state, relieved_s=at_s)


def ended(
    state: ReflexState,
    lever: Lever,
    is_applied: bool,
    seconds: float,
    at_s: float,
    halves: int = 0,
    work_s: float = 0.0,
) -> ReflexState:
    """Note the end of an ordered morph, `seconds` after it began.

    halves: of layers, that were swapped, with `work_s` of work.

    Pressure that was counted meanwhile stays: if it is there at the next step too, more relief is due.
    """
    state = replace(state, ease=0)
    if lever in DOWN:
        half_s = seconds / halves if halves else state.relief_half_s
        work_s = work_s / halves if halves and work_s else state.half_work_s
        state = replace(
            state, relieved_s=at_s, relief_took_s=seconds, relief_half_s=half_s, half_work_s=work_s
        )
    # An applied resize took what it could: the same pages would be asked for again at once.
    if not is_applied or lever == "resize":
        return state.paused(lever, at_s)
    return state


def withhold(state: ReflexState, why: Withheld, at_s: float) -> tuple[ReflexState, bool]:
    """Note that relief is withheld. Returns also whether to tell: once in a burst."""
    is_new = at_s >= state.withheld.get(why.code, float("-inf")) + BURST_S
    return replace(state, withheld={**state.withheld, why.code: at_s}), is_new


def ordered(state: ReflexState, stands_s: float, at_s: float) -> ReflexState:
    """Note that layers were swapped by another's order, which stands so long; 0: until something runs."""
    state = replace(state, pressure=0, ease=0, is_by_hand=not stands_s)
    return replace(state, stands_until_s=at_s + stands_s) if stands_s else state
