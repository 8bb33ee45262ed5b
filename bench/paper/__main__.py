from bench.common.parts import run_part

run_part("bench.paper", ["evaluate", "page", "plot", "windows"], default="evaluate")
