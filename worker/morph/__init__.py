"""Morphs: what serves is changed between two steps of the engine, while requests decode.

====================================  =================================================================
`executor`, `job`                     commands begun, carried on at every boundary, ended with a report
`plan`                                which halves of which layers a Swap is about; pure
`swapper`, `resizer`                  a swap and a resize as they run; who needs pages asks here
`copier`, `pace`                      the thread that copies; how much time all of it may take
`target`, `verbs`                     an instance as morphs see it, and what they ask of its variants
`variants`, `variants_check`          the variants: their pages, copies, checks
`ranges`, `reshard`                   which pages a shard needs; a layer from one degree to another
`host_copy`, `source_copy`, `sums`    weights into their pages, and whether they are there
`host`, `host_file`, `host_images`    their images in host memory, made once for all workers of a host
====================================  =================================================================
"""
