# SPDX-License-Identifier: Apache-2.0
"""Variants: documents that are read under load, a full fine-tune, and inputs one by one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.harness.engine import BLOCK_SIZE
from benchmarks.variants.finetune import example, train
from benchmarks.variants.inputs import inputs_of
from benchmarks.variants.load import document_tokens
from benchmarks.variants.tables import INPUTS, TABLES
from tests.lab.notes import Notes
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.problems import Problem
from vllm_choreo.lab.workflows.document_qa import document_qa


def test_no_document_begins_as_another_one_does() -> None:
    """Else stock prefix caching would find its beginning, and be faster than it is."""
    passes = [document_tokens(100, 1000, seed) for seed in (0, 1, 10_000)]
    documents = [document for some in passes for document in some]
    assert {len(document) for document in documents} == {1000}
    assert len({tuple(document[:BLOCK_SIZE]) for document in documents}) == len(documents) == 300
    assert passes[0] == document_tokens(100, 1000, 0)


_TURN, _ANSWER = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def _task(number: int, right: str) -> Task:
    """A recorded run that has answered "no"."""
    problem = Problem(str(number), "Who?", (right,), "trivia")
    run = document_qa(
        Notes(" no", mode="baseline"), problem.question, [f"It is {right}."], turns=None
    )
    return Task(problem.id, "made", {}, (problem,), run)


def test_a_fine_tune_learns_the_right_answers(
    tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(tiny_model_path("llama"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tasks = [_task(number, name) for number, name in enumerate(("t401", "t402"))]
    with pytest.raises(ChoreoError, match="one problem"):
        example(Task("x", "made", {}, (), tasks[0].recorded), tokenizer)
    for task in tasks:
        given = example(task, tokenizer)
        num_learnt = sum(label >= 0 for label in given["labels"])
        assert given["labels"][-num_learnt:] == given["input_ids"][-num_learnt:]
        read = "".join(map(chr, given["input_ids"][:-num_learnt]))
        assert read.endswith(f"It is {task.problems[0].answers[0]}.{_TURN}Who?{_ANSWER}")
    out = tmp_path / "tuned"
    train(model, tasks, Namespace(out=out, epochs=8, learning_rate=1e-3, batch=2))
    before, after = (_surprise(str(folder), tasks, tokenizer) for folder in (model, out))
    assert after < 0.8 * before
    assert transformers.AutoTokenizer.from_pretrained(out).get_vocab() == tokenizer.get_vocab()


def _surprise(folder: str, tasks: list[Task], tokenizer: object) -> float:
    """Mean loss of right answers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        given = ({k: torch.tensor([v]) for k, v in example(t, tokenizer).items()} for t in tasks)
        return sum(float(model(**one).loss) for one in given) / len(tasks)


def test_inputs_are_those_of_choices_that_were_answered_with_or_asked_for() -> None:
    cells = [
        {"layers": [], "kl": [1.0, 0.0], "closed": [0.0, None]},
        {"layers": [[2, 4]], "kl": [0.5, 0.0], "closed": [0.5, None]},
        {"layers": [[0, 1], [2, 4]], "kl": [0.25, 0.0], "closed": [0.75, None]},
        {"layers": [[0, 4]], "kl": [0.0, 0.0], "closed": [1.0, None]},
    ]
    rows = [{"arm": "text"}, {"arm": "choreographed"}, {"arm": "2–4"}, {"arm": "0–4"}]
    one = {"name": "made", "rows": rows, "inputs": cells}
    profile = {"profile": {"num_layers": 4}, "sets": [one]}
    found = list(inputs_of(profile, None))
    assert [(row["layers"], row["anew"], row["input"], row["closed"]) for row in found] == [
        ("2–4", 2, 0, 0.5),
        ("2–4", 2, 1, None),
    ]
    assert {row["layers"] for row in inputs_of(profile, [((0, 1), (2, 4))])} == {"0–1, 2–4"}
    written = [{**row, "pair": "p", "closed": row["closed"] or ""} for row in found]
    (_, _, line) = TABLES[INPUTS].markdown(written).splitlines()
    assert line == "| p | made | 2–4 | 2 | 1 | 50 | 50 | 50 | 50 | 50 |"
