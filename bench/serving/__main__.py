from bench.common.parts import run_part

run_part("bench.serving", ["compare"], default="compare")
