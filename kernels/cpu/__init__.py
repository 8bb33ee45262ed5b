"""The CPU backend: vector code in numba where torch is slow, MKL where it is fast.

Sizes that are not whole vectors run on the reference.
"""
