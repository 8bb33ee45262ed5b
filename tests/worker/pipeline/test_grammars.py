"""Outputs of a pipeline are held to their forms, while several batches are in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.oracles import make_oracle
from bus.messages import RejectReason
from tests.support.pipeline_workers import Line
from tests.support.toy_grammars import ToyGrammars, chosen, form
from tests.worker.pipeline.test_faults import let_go

LAYERS, VOCAB = 4, 211


@pytest.fixture(scope="module")
def oracle() -> Any:
    return make_oracle("llama", num_hidden_layers=LAYERS, seed=3)


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(made)
    return made


def prompt(n: int) -> list[int]:
    drawn: list[int] = torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    return drawn


@pytest.mark.parametrize(("bounds", "tp"), [([0, 1, 3, 4], 1), ([0, 2, 4], 2)])
def test_each_output_has_its_form_beside_others_that_have_none(
    folder: Path, oracle: Any, bounds: list[int], tp: int
) -> None:
    grammars = ToyGrammars(VOCAB)
    with Line(folder, bounds, tp=tp, grammars=grammars) as line:
        leader = line.leader
        lengths = {str(n): n for n in (3, 9, 17, 25, 40)}
        for name, n in lengths.items():
            line.submit(f"free {name}", prompt(n), 20)
            line.submit(f"formed {name}", prompt(n), 60, grammar=form(n))
        leader.call(lambda: setattr(grammars, "is_held", True))
        line.submit("held", prompt(12), 30, grammar=form(20))
        leader.wait_ends(*(f"{kind} {name}" for kind in ("free", "formed") for name in lengths))
        for name, n in lengths.items():
            free, formed = leader.tokens[f"free {name}"], leader.tokens[f"formed {name}"]
            assert free == chosen(oracle, prompt(n), free, has_form=False)
            assert formed == chosen(oracle, prompt(n), formed)
            assert len(formed) == n and leader.ends[f"formed {name}"] == "stop"
        leader.call(leader.engine.check_integrity)
        assert "held" not in leader.ends and line.instance.load.num_waiting == 1
        leader.call(grammars.release)  # nothing is in flight
        leader.wait_ends("held")
        assert leader.tokens["held"] == chosen(oracle, prompt(12), leader.tokens["held"])
        line.end()


def test_what_waits_for_its_grammar_goes_elsewhere_when_the_pipeline_ends(folder: Path) -> None:
    grammars = ToyGrammars(VOCAB)
    grammars.is_held = True
    with Line(folder, [0, 2, 4], grammars=grammars) as line:
        line.submit("held", prompt(9), 20, grammar=form(20))
        line.submit("free", prompt(7), 200)
        line.leader.wait(lambda: bool(line.leader.tokens["free"]), "a token")
        line.end()
        line.leader.wait_ends("held", "free")
        assert set(line.leader.reject_reasons.values()) == {RejectReason.RETIRED}
        assert grammars.is_closed


def test_what_waits_for_its_grammar_goes_elsewhere_when_a_stage_is_lost(folder: Path) -> None:
    grammars = ToyGrammars(VOCAB)
    grammars.is_held = True
    with Line(folder, [0, 2, 4], grammars=grammars) as line:
        let_go(line)
        line.submit("held", prompt(9), 20, grammar=form(20))
        line.submit("free", prompt(7), 200)
        line.leader.wait(lambda: bool(line.leader.tokens["free"]), "a token")
        line.leader.call(lambda: setattr(line.executor.pipeline, "_lost", "stage 1 is gone"))
        line.leader.wait_ends("held", "free")
        assert set(line.leader.reject_reasons.values()) == {RejectReason.RETIRED}
        line.leader.call(line.instance.check_integrity)
