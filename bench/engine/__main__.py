from bench.common.parts import run_part

run_part("bench.engine", ["offline", "single_stream", "steps", "pipeline_stages", "experts"])
