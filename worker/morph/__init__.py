"""Morphs: variants of layers in host memory and in pages, and commands that change what serves between steps.

`host_file` and `host` keep the byte images of all variants once for a host, `host_images` makes them,
`variants` maps, copies, checks and installs them.
"""
