from bench.common.parts import run_part
from bench.gpu.parts import NAMES

run_part("bench.gpu", ["all", *NAMES, "compiled"], default="all")
