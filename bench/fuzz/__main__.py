from bench.common.parts import run_part

run_part("bench.fuzz", ["routes"], default="routes")
