from bench.common.parts import run_part

run_part("bench.profiling", ["measure"], default="measure")
