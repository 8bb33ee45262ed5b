from bench.common.parts import run_part

run_part("bench.placement", ["compare"], default="compare")
