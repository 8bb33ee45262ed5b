from bench.common.parts import run_part

run_part("bench.gpu", ["suite", "transform", "fingerprint"], default="suite")
