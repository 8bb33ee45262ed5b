"""Recorded kernel calls, run again and again by one launch."""

from __future__ import annotations

import weakref

import pytest
import torch

import kernels
from kernels.cpu.program import KernelProgram, NotRecordable


def test_a_program_computes_anew_at_each_run() -> None:
    x, weight, norm = torch.randn(3, 64), torch.randn(96, 64), torch.randn(64)
    program = KernelProgram(lambda: kernels.linear(kernels.rms_norm(x, norm, 1e-5), weight))
    for _ in range(50):
        x.normal_()
        assert program.run().equal(kernels.linear(kernels.rms_norm(x, norm, 1e-5), weight))


def test_a_program_keeps_what_its_calls_read() -> None:
    """Calls read by address: memory that nothing else refers to any more would belong to others."""

    def record() -> tuple[KernelProgram, weakref.ref[torch.Tensor]]:
        x, weight = torch.ones(1, 64), torch.ones(96, 64)
        return KernelProgram(lambda: kernels.linear(x, weight)), weakref.ref(x)

    program, x = record()
    others = [torch.full((1, 64), 1e-40) for _ in range(100)]  # would take the place of x
    assert x() is not None
    assert program.run().equal(torch.full((1, 96), 64.0))
    assert len(others) == 100


def test_each_call_sees_all_that_the_ones_before_wrote() -> None:
    """A chain of products, each of many items, on more threads than there are cores."""
    before = torch.get_num_threads()
    weights = torch.randn(20, 512, 512) / 23
    x = torch.randn(2, 512)

    def chain() -> torch.Tensor:
        made = x
        for weight in weights:
            made = kernels.linear(made, weight)
        return made

    try:
        kernels.configure(5)
        program = KernelProgram(chain)
        for _ in range(20):
            x.normal_()
            assert program.run().equal(chain())
        kernels.configure(1)
        assert program.run().equal(chain())
    finally:
        kernels.configure(before)


def test_what_torch_would_compute_is_refused() -> None:
    x = torch.randn(2, 64)
    with pytest.raises(NotRecordable, match=r"torch\.add"):
        KernelProgram(lambda: kernels.rms_norm(x + 1, x[0], 1e-5))
    assert kernels.rms_norm(x, x[0], 1e-5).isfinite().all()  # recording has ended
