"""The offline tools: `instar quantize` and `instar profile`.

`quantizer` makes set files and resumes interrupted runs, `awq` searches scales, `ready_checkpoint` converts
AWQ and GPTQ checkpoints, `importance` finds the order in which layers are swapped, `calibration` reads the
text.

A set is MODEL/instar/{precision}-{method}.safetensors: precision int8, int4 or int3; method awq, gptq or
rtn. For every matrix of every layer, named as in the checkpoint without ".weight" (for example
`model.layers.3.mlp.down_proj`), with N outputs and K inputs:

=================  ===========================  ==========================================================
tensor             dtype and shape              meaning
=================  ===========================  ==========================================================
{name}.codes       uint8 [N, Kp * bits / 8]     packed as `kernels.packing` says; Kp is K rounded up to a
                                                multiple of 64; codes past K mean nothing
{name}.scales      float16 [N, ceil(K/group)]   w[n, k] = scale * (code - zero)
{name}.zeros       uint8 [N, ceil(K/group)]
{name}.input_scale float32 [K], may be missing  inputs are multiplied by it first
=================  ===========================  ==========================================================

Groups begin at input 0 and the last may be short. q, k and v of a layer have the same input_scale, and so do
gate and up, since each of these products reads one input. Metadata: `format`, `bits`, `group`, `method`,
`model` (the fingerprint of the checkpoint, `fingerprint`), `calibration` (SHA-256 of its tokens, empty
without) and `crc32` (JSON, of each matrix's tensors in the order above).
"""
