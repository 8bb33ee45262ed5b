"""How fast a large, busy cluster is simulated: 10,000 workers, about a fifth of them busy at any time.

    python -m bench.simulated_hour [--workers 10000] [--seconds 120]

Steps cost what `bench.scheduler.costs` states for a 32B model, with KV for 16K tokens in each worker. 0.06
requests a second come for each worker, at random, with 1155 tokens of prompt and 211 of output on average, as
in the Azure conversation trace. An hour of 10,000 workers has 2.16 million of them. Prints the CPU time, and
what an hour takes at this rate.
"""

from __future__ import annotations

import random
import time

import msgspec

from bench.common.results import parser, say
from bench.scheduler import costs
from bus.policy import Policy
from instar.replay.schemas import Arrival
from instar.simulate.calibration import EngineCalibration, TransformCosts
from instar.simulate.cluster import SimulatedCluster

RATE, PROMPT, OUTPUT, KV_BLOCKS, CONTEXT, HOUR_S = 0.06, 1155, 211, 1024, 8192, 3600.0


def calibration() -> EngineCalibration:
    found = costs.calibration()
    memory = msgspec.structs.replace(found.memory, kv_blocks=KV_BLOCKS, kv_pages=KV_BLOCKS * found.num_layers)
    limits = msgspec.structs.replace(found.limits, max_model_len=CONTEXT)
    return msgspec.structs.replace(found, memory=memory, limits=limits, transform=TransformCosts())


def arrivals(workers: int, seconds: float, seed: int = 1) -> list[Arrival]:
    rng, found, at_s = random.Random(seed), list[Arrival](), 0.0
    while (at_s := at_s + rng.expovariate(RATE * workers)) < seconds:
        prompt, output = (1 + int(rng.expovariate(1 / mean)) for mean in (PROMPT, OUTPUT))
        found.append(Arrival(at_s, min(prompt, CONTEXT // 2), min(output, CONTEXT // 4)))
    return found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, default=10_000)
    options.add_argument("--seconds", type=float, default=120.0)
    args = options.parse_args()
    requests = arrivals(args.workers, args.seconds)
    cluster = SimulatedCluster(calibration(), args.workers, Policy())
    began_s = time.process_time()
    record = cluster.run(requests, drain_s=60.0)
    took_s = time.process_time() - began_s
    busy_s = sum(one.last_s - one.opened_s for one in record.outcomes if one.last_s and one.opened_s)
    busy = busy_s / args.workers / args.seconds
    say(
        f"{len(requests)} requests, {record.tally.steps} steps, {busy:.0%} of {args.workers} workers busy: "
        f"{took_s:.1f} s of CPU, {1e6 * took_s / len(requests):.0f} us each; an hour at this rate "
        f"{took_s * HOUR_S / args.seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
