from bench.common.parts import run_part

run_part("bench.morph", ["burst", "cost", "disk"])
