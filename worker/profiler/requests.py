"""Dummy requests to a fingerprint, one engine step at a time."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence

import torch

from bus.deployments import Configuration, LatencySample, MemorySample
from bus.messages import SamplingParams, Submit
from bus.precisions import Precision
from worker.engine.core import EngineCore
from worker.engine.sequence import own_request
from worker.profiler.device_memory import peak_memory
from worker.profiler.fingerprint import Fingerprint
from worker.profiler.grid import Grid, Point, is_settled

# (layers, output tokens) -> seconds of each repetition
Repetitions = dict[tuple[int, int], list[float]]


class RequestFailed(Exception):
    """A request of the profiler failed."""


class Requests:
    """Requests to one instance, whose layers change between them. The generators yield after every step."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        instance: EngineCore,
        grid: Grid,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """Send requests to `instance`, which runs `fingerprint`. say: reports the progress."""
        self._fingerprint, self._instance, self._grid = fingerprint, instance, grid
        self._say, self._clock = say, clock
        self._depths = fingerprint.plan.depths
        self._num_requests = 0
        self._seconds = 0.0  # of all timed steps

    def memory(self) -> Generator[bool, None, list[MemorySample]]:
        """Measure a prefill of the largest batch in each precision.

        The last layer computes only rows whose logits are wanted, so one layer would show less than it takes
        where others follow. So the peak of two layers, which is that of any number, stands for both. Ranks
        are alike.
        """
        plan, made = self._fingerprint.plan, []
        for precision, tp in dict.fromkeys((point.precision, point.tp) for point in self._grid.points):
            self._say(f"memory in {_name(precision, tp)}")
            most = yield from self._peak(self._grid.fullest(precision, tp))
            made += [
                MemorySample(
                    num_layers=num_layers,
                    configuration=Configuration(tp=tp, precision=precision),
                    weight_bytes=plan.weight_bytes(num_layers, precision, tp),
                    activation_bytes=tp * most,
                )
                for num_layers in self._depths
            ]
        return made

    def _peak(self, point: Point) -> Generator[bool, None, int]:
        """Return the most bytes at once on this device."""
        self._submit(self._depths[-1], point, 2)
        most = 0
        while self._instance.has_work:
            with peak_memory(self._instance.device) as peak:
                self._step()
            most = max(most, peak.nbytes)
            yield True
        return most

    def latency(self) -> Generator[bool, None, list[LatencySample]]:
        """Measure in rounds over all points that are not known well enough."""
        found: dict[Point, Repetitions] = {point: defaultdict(list) for point in self._grid.points}
        for number in itertools.count():
            points = [point for point in found if not self._is_known(point, found[point], number)]
            if not points or self._grid.is_over(number, self._seconds):
                break
            points = _in_order(points, number)
            for done, point in enumerate(points):
                self._say(f"round {number + 1}: {done} of {len(points)} points")
                for num_layers in self._depths if number % 2 else reversed(self._depths):
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
        shorter, longer = self._grid.lengths(point)
        prompts = [found[depth, shorter] for depth in self._depths]
        decodes = [
            [both - prompt for both, prompt in zip(found[depth, longer], found[depth, shorter], strict=True)]
            for depth in self._depths
        ]
        num_layers = self._fingerprint.plan.whole.num_layers
        return num_rounds >= self._grid.rounds and all(
            is_settled(by_depth, num_layers) for by_depth in (prompts, decodes)
        )

    def _repetition(self, point: Point, num_layers: int) -> Generator[bool, None, dict[int, float]]:
        """Return seconds by output length, from one run of the longer output.

        The shorter output would take the same but for some steps in which all requests decode: the last ones
        before the first request ends. In runs of their own, disturbed prompts would differ by more than the
        decodes take.
        """
        shorter, longer = self._grid.lengths(point)
        steps = yield from self._run(point, num_layers, longer)
        return {shorter: sum(steps[:shorter]) + sum(steps[longer:]), longer: sum(steps)}

    def _run(self, point: Point, num_layers: int, output_tokens: int) -> Generator[bool, None, list[float]]:
        """Return the seconds of each step."""
        self._submit(num_layers, point, output_tokens)
        seconds = []
        while self._instance.has_work:
            self._fingerprint.turn()
            self._wait_for_device()  # it may still run work of other models
            began = self._clock()
            self._step()
            self._wait_for_device()  # a step that samples nothing has only been launched
            seconds.append(self._clock() - began)
            self._seconds += seconds[-1]
            yield True
        return seconds

    def _submit(self, num_layers: int, point: Point, output_tokens: int) -> None:
        self._fingerprint.use(num_layers, point.precision, point.tp)
        self._instance.reshaped()
        for _ in range(point.batch_size):
            self._instance.submit(self._request(point.prompt_tokens, output_tokens))

    def _request(self, prompt_tokens: int, output_tokens: int) -> Submit:
        self._num_requests += 1
        prompt = [(self._num_requests * 31 + 7 * i) % self._instance.vocab_size for i in range(prompt_tokens)]
        sampling = SamplingParams(max_tokens=output_tokens, seed=0, temperature=0.0)
        return own_request(str(self._num_requests), prompt, sampling)

    def _wait_for_device(self) -> None:
        """Wait for a GPU; a CPU has nothing left to do."""
        if self._instance.device.type == "cuda":
            torch.cuda.synchronize(self._instance.device)

    def _step(self) -> None:
        for output in self._instance.step():
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


def _name(precision: Precision, tp: int) -> str:
    return precision if tp == 1 else f"{precision}, one rank of {tp}"
