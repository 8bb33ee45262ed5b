"""A minute of `make soak`: as many deaths as fit, and no request lost."""

from __future__ import annotations

import pytest

from bench.soak.soak import measure, service_to_soak


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_minute_of_load_deaths_and_morphs_loses_no_request() -> None:
    with service_to_soak() as service, service.explained():
        result = measure(service, seconds=75, num_clients=3)
        assert all(one["is_met"] for one in result["bars"].values()), result
        assert sum(result["served"].values()) > 20 and len(result["turns"]) >= 1, result
