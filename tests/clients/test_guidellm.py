"""guidellm: streams at a fixed number at once, with synthetic prompts and the model's own tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.forms import MODEL
from tests.support.paths import DEMO_MODEL

pytestmark = pytest.mark.clients

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 12, 48, 16


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_stream_ends_with_the_tokens_that_were_asked_for(
    service_url: str, tmp_path: Path, path: str
) -> None:
    report = tmp_path / "report.json"
    args = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    args += ["--backend", f"kind=openai_http,target={service_url},model={MODEL},request_format={path}"]
    args += ["--tokenizer", f"kind=hf_auto,model={DEMO_MODEL}"]
    args += ["--data", f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_OUTPUT}"]
    args += ["--profile", "kind=concurrent,streams=3", "--output", f"kind=json,path={report}"]
    args += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    done = subprocess.run(
        args, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests: dict[str, list[Any]] = benchmark["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS and not requests["errored"]
    assert {one["output_tokens"] for one in requests["successful"]} == {NUM_OUTPUT}
    assert all(one["time_to_first_token_ms"] > 0 for one in requests["successful"])
