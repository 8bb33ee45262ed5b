"""The weights a device holds: layer variants, their host copies, and the copies between them.

`variants` has what swaps ask of a model, `ranges` the addresses of each variant, `host_images` and
`host_store` the variants' bytes in host memory, `copies` and `copier` the copies beside running steps,
`checks` their verification, `layer_order` the order in which layers are swapped.
"""
