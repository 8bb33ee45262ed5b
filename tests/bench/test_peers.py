"""`bench.peers`: what is asked, what its numbers mean, the table in the README, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaConfig

from bench.common.dummy_model import CONFIGS, model_folder
from bench.common.machine import describe_machine, processor_in
from bench.peers import compare, gguf_file
from bench.peers.contenders import INSTAR, LLAMA, TRANSFORMERS, Contender, Running, contenders, version_of
from bench.peers.report import (
    BEGIN,
    END,
    PAGE,
    QUANTITIES,
    Row,
    check_page,
    num_alike,
    page_table,
    report,
    rewritten,
    rows_as_json,
    say_card,
)
from bench.peers.workloads import AT_ONCE, ONE_BY_ONE, OPEN_LOOP, WORKLOADS, PeerLoad, WorkloadValues

MACHINE = {"processor": "A Processor", "cores": 2, "memory_gb_s": 21.5}
AS_FAST = {INSTAR: 2.0, LLAMA: 1.0, TRANSFORMERS: 0.5}  # as llama.cpp


def rows(*names: str, rounds: int = 3, foreign_cores: float = 0.02) -> list[Row]:
    """Round r is (1, 2, 10)[r] times as slow as the first; llama.cpp has 100 of everything there."""
    return [
        Row(
            "30M",
            name,
            workload,
            number,
            {
                one.name: 100 * (AS_FAST[name] / slow if one.is_rate else slow / AS_FAST[name])
                for one in QUANTITIES
                if one.workload == workload
            },
            foreign_cores,
            text=f"abc{name}" if workload == ONE_BY_ONE else "",
        )
        for number, slow in zip(range(rounds), (1.0, 2.0, 10.0), strict=False)
        for name in names
        for workload in WORKLOADS
        if not (name == TRANSFORMERS and workload == OPEN_LOOP)
    ]


# ------------------------------------------------------------------------------------- the load


def test_every_contender_is_asked_the_same() -> None:
    load = PeerLoad()
    assert load.at_once() == load.at_once() and load.open_loop() == load.open_loop()
    assert len(load.at_once()) == 64 and all(64 <= len(prompt) <= 512 for prompt in load.at_once())
    assert [len(prompt) for prompt in load.one_by_one()] == [128] * 3
    assert load.longest == 640
    everything = [*load.at_once(), *load.one_by_one(), load.warm_up()]
    assert len({tuple(prompt[:16]) for prompt in everything}) == len(everything), (
        "no prompt begins as another"
    )


def test_the_open_loop_has_its_rate() -> None:
    arrivals = PeerLoad(seconds=600.0).open_loop()
    assert len(arrivals) == pytest.approx(1200, rel=0.1)
    assert all(0 <= one.at_s < 600 and 64 <= one.prompt_tokens <= 256 for one in arrivals)
    assert PeerLoad(seconds=0.001).open_loop(), "there is always one"


# ------------------------------------------------------------------------------------- the numbers


def test_medians_are_over_rounds_and_ratios_say_how_many_times_as_fast() -> None:
    found = report(rows(INSTAR, LLAMA, TRANSFORMERS), MACHINE, "b7000")
    models = found["models"]["30M"]
    rate, token = QUANTITIES[0].key, QUANTITIES[1].key
    assert models[LLAMA]["median"][rate] == 50.0 and models[LLAMA]["median"][token] == 200.0
    assert models[INSTAR]["median"][rate] == 100.0 and models[INSTAR]["median"][token] == 100.0
    for name in (INSTAR, TRANSFORMERS):
        assert set(models[name]["times_llama"].values()) == {AS_FAST[name]}, "rates and times alike"
    assert len(models[INSTAR]["times_llama"]) == len(QUANTITIES) and not models[LLAMA]["times_llama"]
    assert found["rounds"] == 3 and found["llama_version"] == "b7000"
    assert found["same_text"] == {"30M, llama.cpp": [3, 12], "30M, transformers": [3, 15]}
    assert num_alike("", "x") == 0 and num_alike("xy", "xy") == 2


def test_a_row_that_others_disturbed_is_marked() -> None:
    quiet = rows(INSTAR, LLAMA, foreign_cores=0.15)
    loud = Row("30M", LLAMA, OPEN_LOOP, 0, quiet[-1].values, 0.16)
    assert "disturbed" in str(loud) and "disturbed" not in str(quiet[0])
    assert "others 0.16 cores" in str(loud)
    text = page_table(report([*quiet, loud], MACHINE, "b7000"))
    marked = [line for line in text.splitlines() if r"\*" in line and line.startswith("|")]
    assert len(marked) == 4 and all(line.startswith("| 30M, 2 requests/s") for line in marked)
    assert all(line.split("|")[3].strip().endswith(r"\*") for line in marked), "in llama.cpp's column"
    assert r"\*: other programs took more than 0.15 cores in a round." in text
    assert r"\*" not in page_table(report(quiet, MACHINE, "b7000"))


# ------------------------------------------------------------------------------------- the table


def test_the_table_names_the_machine_and_what_its_columns_are() -> None:
    text = page_table(report(rows(INSTAR, LLAMA, TRANSFORMERS), MACHINE, "b7000"))
    assert "A Processor, 2 cores, 21.5 GB/s in a plain sum." in text
    assert "medians of 3 rounds" in text and "llama.cpp's server (b7000," in text
    assert "| model, load | Instar | llama.cpp | transformers |" in text
    assert "| 30M, 64 requests at once: output, tokens/s | 100 (2.00) | 50.0 | 25.0 (0.50) |" in text
    assert "| 30M, one at a time: TPOT, ms | 100 (2.00) | 200 | 400 (0.50) |" in text
    assert "| 30M, 2 requests/s: TTFT P95, ms | 100 (2.00) | 200 | - |" in text


def test_without_llama_cpp_the_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(rows(INSTAR, TRANSFORMERS, rounds=1), MACHINE, "")
    say_card(found)
    text = capsys.readouterr().out
    assert "llama.cpp was not measured: that needs `--llama-server PATH`." in text
    assert "| model, load | Instar | transformers |" in text and "one round" in text
    assert "| 30M, 64 requests at once: output, tokens/s | 200 | 50.0 |" in text
    assert "transformers: the first greedy text is Instar's for 3 of 15 characters" in text


def test_rows_are_kept_without_their_texts() -> None:
    (row,) = rows_as_json(rows(INSTAR, rounds=1)[:1])
    assert row == {
        "size": "30M",
        "contender": INSTAR,
        "workload": AT_ONCE,
        "round": 0,
        "values": {"tokens_per_s": 200.0},
        "foreign_cores": 0.02,
    }


def test_only_what_is_between_the_markers_changes() -> None:
    page = f"before\n\n{BEGIN}old\nlines\n{END}\n\nafter {END}\n"
    once = rewritten(page, "new")
    assert once == f"before\n\n{BEGIN}new\n{END}\n\nafter {END}\n"
    assert rewritten(once, "newer") == once.replace("new", "newer")


@pytest.mark.parametrize("page", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}{END}\n{BEGIN}{END}"])
def test_a_page_without_a_place_for_the_table_is_refused(page: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(page)
    with pytest.raises(
        ValueError, match=r"page\.md: the page must have the marker '<!-- numbers: peers -->'"
    ):
        check_page(tmp_path / "page.md")


def test_the_readme_has_a_place_for_the_table() -> None:
    check_page()
    assert BEGIN in PAGE.read_text()


# ------------------------------------------------------------------------------------- the machine


def test_the_processor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    text = "processor\t: 0\nmodel name\t: A  Processor\nmodel\t\t: 17\nmodel name\t: Another\n"
    assert processor_in(text) == "A Processor"
    assert processor_in("Features: fp asimd\n"), "the architecture, where no name is told"
    found = describe_machine(summed_bytes=1 << 20)
    assert found["processor"] and found["cores"] >= 1 and found["memory_gb_s"] > 0


# ------------------------------------------------------------------------------------- the command


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr("sys.argv", ["bench.peers", *words])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_errors_name_what_is_missing_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "--models names '31M'; there are: 4M, 30M" in refusal(monkeypatch, capsys, "--models", "30M,31M")
    assert "--rounds is 0; at least 1" in refusal(monkeypatch, capsys, "--rounds", "0")
    told = refusal(monkeypatch, capsys, "--llama-server", str(tmp_path / "none"))
    assert "none is not a program that can be run; build it with `cmake" in told


def test_a_llama_server_must_tell_its_version(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho 'version: 7000 (abc)' >&2\necho 'built with cc' >&2\n")
    program.chmod(0o755)
    assert version_of(program) == "7000 (abc)"
    program.write_text("#!/bin/sh\necho 'libllama.so: cannot open' >&2\nexit 127\n")
    with pytest.raises(ValueError, match=r"does not print a version, but 'libllama\.so: cannot open'; build"):
        version_of(program)


def contender(name: str, running: list[str], workloads: Any = WORKLOADS) -> Contender:
    """A contender of which only one runs at a time, with 1 for everything."""

    @contextmanager
    def start(folder: Path, load: PeerLoad) -> Iterator[Running]:
        assert not running, "one runs at a time"
        running.append(name)
        values = {one.name: 1.0 for one in QUANTITIES}
        yield Running([], lambda workload: WorkloadValues(values, text=f"{folder.name} {workload}"))
        running.clear()

    return Contender(name, start, workloads)


def test_contenders_take_turns_in_each_workload(tmp_path: Path) -> None:
    assert [one.name for one in contenders(None)] == [INSTAR, TRANSFORMERS]
    assert [one.name for one in contenders(tmp_path)] == [INSTAR, LLAMA, TRANSFORMERS]
    running: list[str] = []
    there = [contender("a", running), contender("b", running), contender("c", running, WORKLOADS[:2])]
    found = list(compare.play(there, {"4M": tmp_path / "4M", "30M": tmp_path / "30M"}, 2, PeerLoad()))
    first = [(row.workload, row.contender) for row in found if row.round == 0 and row.size == "4M"]
    assert first == [
        *((AT_ONCE, name) for name in "abc"),
        *((ONE_BY_ONE, name) for name in "abc"),
        *((OPEN_LOOP, name) for name in "ab"),
    ]
    second = [row.contender for row in found if row.round == 1 and row.size == "30M"]
    assert "".join(second) == "bcabcaba", "another is first"
    assert all(row.text == f"{row.size} {row.workload}" for row in found) and len(found) == 32


def test_a_full_run_writes_the_result_and_the_table_and_a_quick_one_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"{BEGIN}{END}\n")
    monkeypatch.setattr(compare, "PAGE", page)
    monkeypatch.setattr("bench.common.results.RESULTS", tmp_path)
    monkeypatch.setattr(compare, "describe_machine", lambda: MACHINE)
    monkeypatch.setattr(compare, "OtherPrograms", lambda _: SimpleNamespace(cores=lambda: 0.0))
    monkeypatch.setattr(compare, "contenders", lambda _: [contender(INSTAR, [])])
    monkeypatch.setattr("sys.argv", ["bench.peers", "--quick"])
    assert compare.main() == 0
    assert page.read_text() == f"{BEGIN}{END}\n" and not (tmp_path / "peers.json").exists()
    monkeypatch.setattr("sys.argv", ["bench.peers", "--models", "4M", "--rounds", "2"])
    assert compare.main() == 0
    assert "| 4M, 2 requests/s: TTFT P95, ms | 1.00 |" in page.read_text()
    kept = json.loads((tmp_path / "peers.json").read_text())
    assert kept["rounds"] == 2 and len(kept["rows"]) == 6 and kept["machine"] == MACHINE


# ------------------------------------------------------------------------------------- GGUF


def test_rows_of_queries_and_keys_are_paired_as_llama_cpp_rotates_them() -> None:
    config = LlamaConfig(**CONFIGS["4M"])
    config.num_attention_heads, config.num_key_value_heads = 2, 1
    rows_of = torch.arange(8.0)[:, None]
    name = "model.layers.0.self_attn.{}.weight"
    queries = gguf_file.arranged(name.format("q_proj"), rows_of, config).flatten().tolist()
    assert queries == [0, 2, 1, 3, 4, 6, 5, 7]
    keys = gguf_file.arranged(name.format("k_proj"), rows_of, config).flatten().tolist()
    assert keys == [0, 4, 1, 5, 2, 6, 3, 7]
    assert gguf_file.arranged(name.format("v_proj"), rows_of, config) is rows_of


def test_a_gguf_file_has_every_tensor_and_token() -> None:
    with model_folder("4M") as folder:
        path = gguf_file.write_gguf(folder)
        found = gguf.GGUFReader(path)
        shapes = {one.name: list(one.shape) for one in found.tensors}
        tokens = found.fields["tokenizer.ggml.tokens"].contents()
    assert len(shapes) == 3 + 9 * CONFIGS["4M"]["num_hidden_layers"]
    assert shapes["token_embd.weight"] == shapes["output.weight"] == [256, 4096]
    assert shapes["blk.1.attn_k.weight"] == [256, 128] and shapes["blk.0.ffn_down.weight"] == [1408, 256]
    assert len(tokens) == 4096 and tokens[:2] == ["<|bos|>", "<|eos|>"]
