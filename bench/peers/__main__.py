from bench.common.parts import run_part

run_part("bench.peers", ["compare"], default="compare")
