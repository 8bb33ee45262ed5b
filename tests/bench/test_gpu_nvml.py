"""`python -m bench.gpu nvml` over C functions that the tests make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu import nvml as gpu_nvml
from bench.gpu.common import Found
from bench.gpu.parts import FOLDER
from tests.support.fake_nvml import NAME, NOT_SUPPORTED, UUID, FakeNvml
from worker.service.nvml import NoNvml


def test_the_table_has_a_gpu_at_rest_and_at_work_and_what_it_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_nvml, "LOAD_S", 0.01)
    monkeypatch.setattr(gpu_nvml, "WAIT_S", 0.01)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    fake = FakeNvml().install(monkeypatch)
    fake.failing = {"nvmlDeviceGetTotalEccErrors": NOT_SUPPORTED}
    fake.utilization = 0
    found = Found("nvml")
    found.put(uuid=UUID)
    gpu_nvml.read(UUID, lambda: setattr(fake, "utilization", 99), found)
    told = list(gpu_nvml.lines(found.values))
    assert told[0] == f"{NAME}, {UUID}"
    table = {line[:24].strip(): line[24:].split() for line in told}
    assert table["utilization"] == ["0", "0.99"]
    assert table["throttling"] == ["power_cap", "power_cap"]
    assert table["ecc_corrected_errors"] == ["-", "-"]
    assert table["not told here"] == ["ECC", "errors"] and table["XIDs"] == ["told"]
    with pytest.raises(NoNvml, match="NVML knows no GPU"):
        gpu_nvml.read("none", lambda: None, found)


def test_on_a_cpu_it_says_why_nothing_is_reported() -> None:
    found = Found("nvml", is_kept=False)
    gpu_nvml.measure(torch.device("cpu"), found)
    assert list(gpu_nvml.lines(found.values)) == ["NVML: nothing is reported here: the device is a CPU"]
