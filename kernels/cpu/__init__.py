"""Numba and MKL faces of the kernels."""
