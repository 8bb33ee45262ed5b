"""The offline tools: `instar quantize` and `instar profile`.

`quantizer` makes set files and resumes interrupted runs, `awq` searches scales, `ready_checkpoint` converts
AWQ and GPTQ checkpoints, `importance` finds the order in which layers are swapped, `calibration` reads the
text.
"""
