# SPDX-License-Identifier: Apache-2.0
"""Questions with known answers: made from seeds, or read from files. Neither torch nor vLLM."""

from vllm_choreo.workflows.problems.documents import (
    fact_pairs,
    key_values,
    list_pairs,
    sentence_facts,
    stated_numbers,
)
from vllm_choreo.workflows.problems.facts import trivia
from vllm_choreo.workflows.problems.generate import algebra, arithmetic, counting
from vllm_choreo.workflows.problems.jsonl import DataError, load_jsonl
from vllm_choreo.workflows.problems.long_documents import reports
from vllm_choreo.workflows.problems.problem import Kind, Problem
from vllm_choreo.workflows.problems.word_problems import word_problems
from vllm_choreo.workflows.problems.words import concept_lists

__all__ = [
    "DataError",
    "Kind",
    "Problem",
    "algebra",
    "arithmetic",
    "concept_lists",
    "counting",
    "fact_pairs",
    "key_values",
    "list_pairs",
    "load_jsonl",
    "reports",
    "sentence_facts",
    "stated_numbers",
    "trivia",
    "word_problems",
]
