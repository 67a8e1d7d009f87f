# SPDX-License-Identifier: Apache-2.0
"""The benchmark of prompts from schemas without an engine: its schemas, and its bar."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.harness.texts import long_text
from benchmarks.pml import answers, bars, first_token, memory, texts
from vllm_choreo import Choreography
from vllm_choreo.lab.problems import Problem
from vllm_choreo.pml.language.structure import check_documents


class Letters:
    """A tokenizer of characters."""

    unk_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


@pytest.mark.parametrize("task", answers.TASKS, ids=lambda task: task.name)
def test_the_schemas_of_problems_take_their_prompts(task: answers.Task) -> None:
    for number, problem in enumerate(task.make(3, answers.SEED)):
        schema = texts.problem_schema(problem, f"p{number}")
        check_documents([schema, texts.problem_prompt(problem, schema.name)])
        assert len(texts.without_scaffolds(schema).children) == 1 + len(problem.documents)


def test_long_documents_have_the_length_that_is_asked_for_and_differ() -> None:
    one, other = (long_text(Letters(), 2000, seed) for seed in (1, 2))
    assert one != other and all(1500 < len(text) <= 2000 for text in (one, other))
    schema = texts.long_schema("long", one)
    check_documents([schema, texts.long_prompt("long", texts.NUM_ROLES - 1)])


def test_real_documents_are_joined_to_the_length_that_is_asked_for() -> None:
    problems = [
        Problem(str(i), "Who?", ("A",), "trivia", (f"{i} " * 300, f"{i}{i} " * 100))
        for i in range(3)
    ]
    made = first_token.real_texts(Letters(), problems, 1000)
    assert len(made) == 2 and all(900 < len(text) <= 1000 for text in made)
    assert made[0].startswith("0 0 0") and made[0] != made[1]
    (whole,) = first_token.real_texts(Letters(), problems[:1], 1500)
    assert whole.rstrip().endswith("00")
    with pytest.raises(SystemExit, match="documents have"):
        first_token.real_texts(Letters(), problems[:1], 5000)


def test_questions_whose_documents_do_not_fit_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"question": "Who?", "answers": ["A"], "context": "x" * length} for length in (100, 900, 50)
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    llm = SimpleNamespace(get_tokenizer=Letters, model_config=SimpleNamespace(max_model_len=500))
    seen: list[int] = []

    def answered(llm: Any, problems: Any, way: Any, max_tokens: int) -> list[str]:
        seen.append(len(problems))
        return ["A" if way.mode == "choreo" else "B"] * len(problems)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answers, "_answers", answered)
        found = answers.measure_file(llm, path, 10, 8)
        assert {row["task"] for row in found} == {"own"} and set(seen) == {2}
        scores = {row["way"]: row["score"] for row in found}
        assert scores["text"] == 0 and scores["cached"] == 1
        with pytest.raises(SystemExit, match="fit into 12"):
            llm.model_config.max_model_len = 20
            answers.measure_file(llm, path, 10, 8)


def test_ratios_decide_whether_the_bar_is_reached() -> None:
    def row(tokens: int, side: str, seconds: float) -> dict[str, Any]:
        cells = {"document_tokens": tokens, "in_flight": 1, "side": side, "median_s": seconds}
        return {key: str(value) for key, value in cells.items()}

    rows = [row(5000, "text", 10.0), row(5000, "cached", 0.08), row(300, "text", 1.0)]
    rows.append(row(300, "cached", 0.1))
    assert bars.ratio(rows, 5000) == pytest.approx(125)
    assert bars.bar_reached(rows), "short documents have no bar"
    assert not bars.bar_reached([*rows, row(8000, "text", 1.0), row(8000, "cached", 0.1)])
    assert bars.bar_reached([])


def test_bytes_of_a_token_are_those_of_the_paper_where_it_counts_all_heads() -> None:
    for row in memory.rows_of(memory.PAPER):
        assert row["all_heads_mb"] == pytest.approx(row["paper_mb"], abs=0.0085)
        assert row["stored_mb"] <= row["all_heads_mb"]
    fewer = [row["model"] for row in memory.rows_of(memory.PAPER) if row["stored_mb"] < 0.4]
    assert fewer == ["BERT", "Falcon 1B", "Falcon 40B", "Llama 70B", "Falcon 180B"]


def test_bytes_of_a_token_are_those_of_an_engine(
    plain_llama: Any, tiny_model_path: Callable[[str], Path]
) -> None:
    """The oracle is what the engine's cache takes of memory; it stores 32 bits, not 16."""
    path = tiny_model_path("llama")
    shape = memory.shape_of("tiny", AutoConfig.from_pretrained(path))
    assert shape.num_kv_heads < shape.num_heads, "keys are shared, or the test says nothing"
    with Choreography(plain_llama) as c:
        num_bytes = (
            c.stats()["block_bytes"] / plain_llama.llm_engine.vllm_config.cache_config.block_size
        )
    assert num_bytes == 2 * shape.token_bytes
