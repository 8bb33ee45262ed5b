"""The Triton backend, for GPUs; for CPU tensors too under TRITON_INTERPRET=1, in tests.

Products with dense weights run on the reference: torch calls cuBLAS.
"""
