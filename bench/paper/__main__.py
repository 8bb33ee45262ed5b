from bench.common.parts import run_part

run_part("bench.paper", ["evaluate", "page", "plot", "simulated", "windows"], default="evaluate")
