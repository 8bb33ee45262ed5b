from bench.common.parts import run_part

run_part("bench.kernels", ["measure", "few", "sparse"], default="measure")
