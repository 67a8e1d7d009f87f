# SPDX-License-Identifier: Apache-2.0
"""Files of the paper's data sets, in their formats, become inputs of its workflows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.planner.files import mmlu, reviews, tatqa
from benchmarks.planner.rivals.workloads import add_sizes, asked_workload


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_sizes(parser)
    return parser.parse_args(given)


def context(number: int, num_questions: int) -> dict[str, object]:
    return {
        "table": {"uid": "t", "table": [["", "2019"], ["Revenue", f"{number}"]]},
        "paragraphs": [{"uid": "p", "order": 1, "text": f"Report {number}."}],
        "questions": [{"question": f"Q{number}.{i}?"} for i in range(num_questions)],
    }


def test_tatqa(tmp_path: Path) -> None:
    file = tmp_path / "tatqa.json"
    file.write_text(json.dumps([context(1, 8), context(2, 1)]))
    found = tatqa(file, 7)
    assert found["context"][0] == "Report 1.\n | 2019\nRevenue | 1"
    assert found["question"][5:] == ["Q1.5?", "Q2.0?"], "six questions of a context"
    with pytest.raises(ValueError, match="has 7 questions, 8"):
        tatqa(file, 8)
    file.write_text(json.dumps([{"rows": []}]))
    with pytest.raises(ValueError, match="no file of TAT-QA"):
        tatqa(file, 1)


def test_mmlu(tmp_path: Path) -> None:
    file = tmp_path / "anatomy_test.csv"
    file.write_text('"Which, of these?",one,two,three,four,C\n')
    assert mmlu(file, 1)["question"] == ["Which, of these?\nA. one\nB. two\nC. three\nD. four"]
    file.write_text("question,A,B\n")
    with pytest.raises(ValueError, match="no file of MMLU"):
        mmlu(file, 1)


def test_reviews(tmp_path: Path) -> None:
    file = tmp_path / "reviews.jsonl"
    lines = [{"parent_asin": item, "text": f"{item} {i}"} for i in range(20) for item in ("x", "y")]
    lines += [{"asin": "z", "reviewText": "old"}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = reviews(file, 2, 2)
    assert list(found) == ["chunk_1", "chunk_2"]
    assert found["chunk_2"][1].split("\n\n") == [f"y {i}" for i in range(10, 20)]
    with pytest.raises(ValueError, match="has 0 products with 30 reviews"):
        reviews(file, 1, 3)


def test_workflows_read_the_files_that_are_named(tmp_path: Path) -> None:
    file = tmp_path / "tatqa.json"
    file.write_text(json.dumps([context(1, 6)]))
    args = arguments("--queries", "2", "--tatqa", str(file))
    name, one = asked_workload("debate", args)
    given = {one.batch.graph.nodes[n].name: values for n, values in one.batch.inputs.items()}
    assert name == "debate, TAT-QA" and given["question"] == ("Q1.0?", "Q1.1?")
    name, one = asked_workload("trading", args)
    assert name == "trading"
