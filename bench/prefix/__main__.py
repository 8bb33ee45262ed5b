from bench.common.parts import run_part

run_part("bench.prefix", ["compare"], default="compare")
