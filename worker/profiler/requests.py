"""Dummy requests to a fingerprint, one engine step at a time."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch

from bus.deployments import Configuration, LatencySample, MemorySample
from bus.messages import SamplingParams, Submit
from worker.engine.core import EngineCore
from worker.engine.recorded_batches import RecordedBatches
from worker.engine.sequence import own_request
from worker.profiler.device_memory import peak_memory
from worker.profiler.fingerprint import Fingerprint
from worker.profiler.grid import Grid, Point, is_settled

# (layers, output tokens) -> seconds of each repetition
Repetitions = dict[tuple[int, int], list[float]]


class RequestFailed(Exception):
    """A request of the profiler failed."""


@dataclass(slots=True)
class Requests:
    """Requests to one instance, whose layers change between them. The generators yield after every step."""

    fingerprint: Fingerprint
    instance: EngineCore  # runs the fingerprint
    grid: Grid
    say: Callable[[str], None]  # reports the progress
    clock: Callable[[], float]
    num_sent: int = 0
    seconds: float = 0.0  # time of all timed steps
    recorded: RecordedBatches | None = field(init=False)  # for steps alone, as the worker would run them

    def __post_init__(self) -> None:
        self.recorded = self.instance.local_executor.recorded

    def memory(self) -> Generator[bool, None, list[MemorySample]]:
        """Measure a prefill of the largest batch in each precision.

        The peak of two layers, which is that of any number, stands for one, too: the last layer computes only
        rows whose logits are wanted. Ranks are alike.
        """
        plan, made = self.fingerprint.plan, []
        for precision, tp in dict.fromkeys((point.precision, point.tp) for point in self.grid.points):
            self.say(f"memory in {precision}" if tp == 1 else f"memory in {precision}, one rank of {tp}")
            most = yield from self._peak(self.grid.fullest(precision, tp))
            made += [
                MemorySample(
                    num_layers=num_layers,
                    configuration=Configuration(tp=tp, precision=precision),
                    weight_bytes=plan.weight_bytes(num_layers, precision, tp),
                    activation_bytes=tp * most,
                )
                for num_layers in self.fingerprint.plan.depths
            ]
        return made

    def _peak(self, point: Point) -> Generator[bool, None, int]:
        """Return the most bytes at once on this device."""
        self._submit(self.fingerprint.plan.depths[-1], point, 2)
        most = 0
        while self.instance.has_work:
            with peak_memory(self.instance.device) as peak:
                self._step()
            most = max(most, peak.nbytes)
            yield True
        return most

    def latency(self) -> Generator[bool, None, list[LatencySample]]:
        """Measure in rounds over all points that are not known well enough."""
        depths = self.fingerprint.plan.depths
        found: dict[Point, Repetitions] = {point: defaultdict(list) for point in self.grid.points}
        for number in itertools.count():
            points = [point for point in found if not self._is_known(point, found[point], number)]
            if not points or self.grid.is_over(number, self.seconds):
                break
            for done, point in enumerate(_in_order(points, number)):
                self.say(f"round {number + 1}: {done} of {len(points)} points")
                for num_layers in depths if number % 2 else reversed(depths):
                    timed = yield from self._repetition(point, num_layers)
                    for output_tokens, seconds in timed.items():
                        found[point][num_layers, output_tokens].append(seconds)
        return [
            LatencySample(
                num_layers=num_layers,
                configuration=Configuration(tp=point.tp, precision=point.precision),
                prompt_tokens=point.prompt_tokens,
                output_tokens=output_tokens,
                batch_size=point.batch_size,
                seconds=seconds,
            )
            for point, repetitions in found.items()
            for (num_layers, output_tokens), seconds in sorted(repetitions.items())
        ]

    def _is_known(self, point: Point, found: Repetitions, num_rounds: int) -> bool:
        """Return True if prompts and decodes are known well enough, each on its own.

        Long answers are mostly decodes, but here decodes are the smaller part.
        """
        if num_rounds < self.grid.rounds:
            return False
        shorter, longer = self.grid.lengths(point)
        prompts = [found[depth, shorter] for depth in self.fingerprint.plan.depths]
        both = [found[depth, longer] for depth in self.fingerprint.plan.depths]
        decodes = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(both, prompts, strict=True)]
        num_layers = self.fingerprint.plan.whole.num_layers
        return is_settled(prompts, num_layers) and is_settled(decodes, num_layers)

    def _repetition(self, point: Point, num_layers: int) -> Generator[bool, None, dict[int, float]]:
        """Return seconds by output length, from one run of the longer output.

        The shorter output would take the same but for some steps in which all requests decode: the last ones
        before the first request ends. In runs of their own, disturbed prompts would differ by more than the
        decodes take.
        """
        shorter, longer = self.grid.lengths(point)
        steps = yield from self._run(point, num_layers, longer)
        return {shorter: sum(steps[:shorter]) + sum(steps[longer:]), longer: sum(steps)}

    def _run(self, point: Point, num_layers: int, output_tokens: int) -> Generator[bool, None, list[float]]:
        """Return the seconds of each step."""
        self._submit(num_layers, point, output_tokens)
        seconds = []
        while self.instance.has_work:
            self.fingerprint.turn()
            self._wait_for_device()  # the device may still run work of other models
            began = self.clock()
            self._step()
            self._wait_for_device()  # a step that samples nothing has only been launched
            seconds.append(self.clock() - began)
            self.seconds += seconds[-1]
            yield True
        return seconds

    def _submit(self, num_layers: int, point: Point, output_tokens: int) -> None:
        self.fingerprint.use(num_layers, point.precision, point.tp)
        self.instance.reshaped()
        self.instance.local_executor.recorded = self.recorded if point.tp == 1 else None
        for _ in range(point.batch_size):
            self.instance.submit(self._request(point.prompt_tokens, output_tokens))

    def _request(self, prompt_tokens: int, output_tokens: int) -> Submit:
        self.num_sent += 1
        prompt = [(self.num_sent * 31 + 7 * i) % self.instance.vocab_size for i in range(prompt_tokens)]
        sampling = SamplingParams(max_tokens=output_tokens, seed=0, temperature=0.0)
        return own_request(str(self.num_sent), prompt, sampling)

    def _wait_for_device(self) -> None:
        """Wait for a GPU; a CPU has nothing left to do."""
        if self.instance.device.type == "cuda":
            torch.cuda.synchronize(self.instance.device)

    def _step(self) -> None:
        for output in self.instance.step():
            if output.delta.error:
                raise RequestFailed(f"a fingerprint's request failed: {output.delta.error}")


def _in_order(points: Sequence[Point], number: int) -> list[Point]:
    """Shuffle the points differently in each round, keeping one precision together.

    While nothing else is read, caches keep as much of a small model as of the whole one.
    """
    chance = random.Random(number)
    precisions = sorted({point.precision for point in points})
    chance.shuffle(precisions)
    mixed = chance.sample(points, len(points))
    return sorted(mixed, key=lambda point: precisions.index(point.precision))
