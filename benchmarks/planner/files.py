# SPDX-License-Identifier: Apache-2.0
"""Inputs of the workflows from files of the paper's data sets, which the user has and names.

| option | file |
|---|---|
| `--tatqa` | TAT-QA's JSON: a list of contexts, each with `table`, `paragraphs` and `questions` |
| `--mmlu` | MMLU's CSV of a subject, without a head: question, four choices, letter of the answer |
| `--reviews` | Amazon Reviews in lines of JSON: `parent_asin` or `asin`, `text` or `reviewText` |
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Inputs = dict[str, list[str]]
QUESTIONS_PER_CONTEXT = 6
REVIEWS_PER_CHUNK = 10
_LETTERS = "ABCD"


def add_files(parser: argparse.ArgumentParser) -> None:
    """Files to read in place of made-up inputs; of those of tasks one."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tatqa", type=Path, metavar="FILE", help="contexts and questions")
    which.add_argument("--mmlu", type=Path, metavar="FILE", help="questions with four choices")
    parser.add_argument("--reviews", type=Path, metavar="FILE", help="chunks of reviews")


def tasks_of(args: argparse.Namespace, num_queries: int) -> tuple[str, Inputs] | None:
    """Name of the data set, and `context` and `question` of each query; None: no file is named."""
    if args.tatqa is not None:
        return "TAT-QA", tatqa(args.tatqa, num_queries)
    if args.mmlu is not None:
        return "MMLU", mmlu(args.mmlu, num_queries)
    return None


def tatqa(path: Path, num_queries: int) -> Inputs:
    """Contexts of TAT-QA, paragraphs and table, with up to six questions each.

    Raises:
        ValueError: the file has fewer questions, or is another one.
    """
    found: list[tuple[str, str]] = []
    try:
        for entry in json.loads(path.read_text(encoding="utf-8")):
            rows = (" | ".join(map(str, row)) for row in entry["table"]["table"])
            paragraphs = (str(paragraph["text"]) for paragraph in entry["paragraphs"])
            context = "\n".join([*paragraphs, *rows])
            asked = entry["questions"][:QUESTIONS_PER_CONTEXT]
            found += [(context, str(question["question"])) for question in asked]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of TAT-QA: {error!r}") from error
    return _tasks(path, found, num_queries)


def mmlu(path: Path, num_queries: int) -> Inputs:
    """Questions of MMLU, each with its four choices.

    Raises:
        ValueError: the file has fewer questions, or is another one.
    """
    found = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.reader(file):
            if len(row) != 6 or row[5] not in _LETTERS:
                raise ValueError(f"{path} is no file of MMLU: {row!r}")
            choices = (f"{letter}. {text}" for letter, text in zip(_LETTERS, row[1:5], strict=True))
            found.append(("Answer with one letter.", "\n".join([row[0], *choices])))
    return _tasks(path, found, num_queries)


def _tasks(path: Path, found: list[tuple[str, str]], num_queries: int) -> Inputs:
    if len(found) < num_queries:
        raise ValueError(f"{path} has {len(found)} questions, {num_queries} are asked for")
    contexts, questions = zip(*found[:num_queries], strict=True)
    return {"context": list(contexts), "question": list(questions)}


def reviews(path: Path, num_queries: int, num_chunks: int) -> Inputs:
    """Chunks of ten reviews of the first products that have enough of them.

    Raises:
        ValueError: there are fewer such products, or the file is another one.
    """
    needed = num_chunks * REVIEWS_PER_CHUNK
    by_item: dict[str, list[str]] = {}
    done: list[list[str]] = []
    with path.open(encoding="utf-8") as file:
        for review in map(json.loads, filter(str.strip, file)):
            item, said = _review(path, review)
            texts = by_item.setdefault(item, [])
            texts.append(said)
            if len(texts) == needed:
                done.append(texts)
            if len(done) == num_queries:
                break
    if len(done) < num_queries:
        raise ValueError(f"{path} has {len(done)} products with {needed} reviews")
    return {
        f"chunk_{chunk}": [_joined(texts[(chunk - 1) * REVIEWS_PER_CHUNK :]) for texts in done]
        for chunk in range(1, num_chunks + 1)
    }


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join([*texts][:REVIEWS_PER_CHUNK])


def _review(path: Path, review: Mapping[str, Any]) -> tuple[str, str]:
    """Product and text of a review, in the fields of either edition."""
    item, said = (
        next((str(review[name]) for name in names if name in review), None)
        for names in (("parent_asin", "asin"), ("text", "reviewText"))
    )
    if item is None or said is None:
        raise ValueError(f"{path} is no file of reviews: {sorted(review)}")
    return item, said
