"""lm-eval: log-probabilities of prompts by echo, against the model's own choices and the rules of sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lm_eval
import openai
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.api_models import TemplateAPI
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from tests.clients.forms import MODEL
from tests.support.paths import DEMO_MODEL

pytestmark = pytest.mark.clients

PROMPT = "def add(a, b):\n    return"
# What is likelier comes first.
QUESTIONS = [
    {"asked": "import os\nimport", "choices": [" sys\n", " )])\n"]},
    {"asked": "class Queue:\n    def __init__(", "choices": ["self", "\n\n\n"]},
    {"asked": "for i in range(10", "choices": ["):\n", "def"]},
    {"asked": "if __name__ ==", "choices": [" '__main__'", " import"]},
]
TASK = """
task: which
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{asked}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def arguments(base_url: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "base_url": f"{base_url}/completions",
        "tokenizer": str(DEMO_MODEL),
        "num_concurrent": 2,
        "max_length": 2048,
    }


def scores(model: TemplateAPI, *pairs: tuple[str, str]) -> Any:
    """The log-probability of each second text behind its first, and whether greedy choice would write it."""
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    return model.loglikelihood(asked, disable_tqdm=True)


@pytest.mark.parametrize("sends_token_ids", [True, False])
def test_log_probabilities_of_parts_add_up(arguments: dict[str, Any], sends_token_ids: bool) -> None:
    model = LocalCompletionsAPI(**arguments, tokenized_requests=sends_token_ids)
    whole, first, second = scores(model, (PROMPT, " a + b"), (PROMPT, " a"), (f"{PROMPT} a", " + b"))
    assert whole[0] == pytest.approx(first[0] + second[0], abs=1e-3) and whole[0] < 0
    assert whole[1] == (first[1] and second[1])


def test_what_greedy_choice_writes_is_greedy(arguments: dict[str, Any], base_url: str) -> None:
    model = LocalCompletionsAPI(**arguments)
    prompt = model.tok_encode(PROMPT)  # the server would begin a text with a token of its own
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=1)
    written = answer.choices[0].text
    right, wrong = scores(model, (PROMPT, written), (PROMPT, " zebra"))
    assert right[1] and not wrong[1] and right[0] > wrong[0]


def test_a_task_of_ones_own_is_scored(arguments: dict[str, Any], tmp_path: Path) -> None:
    data = tmp_path / "which.json"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    (tmp_path / "which.yaml").write_text(TASK.format(data=data))
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments | {"tokenized_requests": True},
        tasks=["which"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found["results"]["which"]["acc,none"] == 1.0
    assert found["n-samples"]["which"]["effective"] == len(QUESTIONS)
