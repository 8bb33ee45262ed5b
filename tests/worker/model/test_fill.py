"""The values of a checkpoint's tensors come to the device that the targets are on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from worker.model.layout import CheckpointTensor
from worker.model.row_units import RowUnits
from worker.model.sources import CheckpointWeights

ROWS, COLUMNS = 700, 4000  # more than one piece
UNITS = RowUnits(ROWS, 2, 16)
TENSORS = [
    CheckpointTensor("up", (ROWS, COLUMNS), "p", units=UNITS),
    CheckpointTensor("up", (ROWS, COLUMNS), "p", rows=range(1, ROWS, 3), columns=range(0, COLUMNS, 2)),
    CheckpointTensor("down", (COLUMNS, ROWS), "p", is_transposed=True, units=UNITS),
    CheckpointTensor("norm", (COLUMNS,), "p", offset=1.0),
]


def wanted(each: CheckpointTensor, stored: torch.Tensor) -> torch.Tensor:
    part = stored if each.rows is None else stored[each.rows.start :: each.rows.step]
    part = part if each.columns is None else part[:, :: each.columns.step]
    return (part.T if each.is_transposed else part).bfloat16() + each.offset


def filled(folder: Path, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what each of `TENSORS` makes of a checkpoint in float32 on the device, and what it should."""
    random = torch.Generator().manual_seed(5)
    stored = {each.tensor: torch.randn(each.shape, generator=random) for each in TENSORS}
    save_file(stored, folder / "model.safetensors")
    source, made = CheckpointWeights(folder), []
    for each in TENSORS:
        expected = wanted(each, stored[each.tensor])
        param = torch.zeros_like(expected, device=device)
        source.fill([param[rows.start : rows.stop] for rows in each.units or RowUnits(len(param))], each)
        made.append((param, expected))
    return made


def test_on_a_cpu_and_on_another_device_each_value_comes_to_its_place(tmp_path: Path) -> None:
    assert all(torch.equal(param, expected) for param, expected in filled(tmp_path, torch.device("cpu")))
    # A device without memory stands for a GPU: what would mix devices raises there, too.
    assert all(param.is_meta for param, _ in filled(tmp_path, torch.device("meta")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gets_the_same_bits(tmp_path: Path) -> None:
    for param, expected in filled(tmp_path, torch.device("cuda")):
        assert param.is_cuda and torch.equal(param.cpu(), expected)
