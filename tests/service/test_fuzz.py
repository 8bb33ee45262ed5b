"""A few hundred of the cases of `make test-fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.common.service import Service
from bench.fuzz.rounds import SETTINGS, Fuzzer
from bench.fuzz.routes import measure


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_request_brings_an_undocumented_answer_or_takes_memory(tmp_path: Path) -> None:
    with Service(settings=SETTINGS) as service, service.explained():
        result = measure(service, Fuzzer(service.url(), tmp_path), cases=300, processes=1)
        assert all(one["is_met"] for one in result["bars"].values()), result
