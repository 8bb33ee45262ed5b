from bench.common.parts import run_part

run_part("bench.planner", ["compare"], default="compare")
