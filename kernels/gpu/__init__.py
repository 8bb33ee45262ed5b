"""Triton faces of the kernels."""
