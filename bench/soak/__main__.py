from bench.common.parts import run_part

run_part("bench.soak", ["soak"], default="soak")
