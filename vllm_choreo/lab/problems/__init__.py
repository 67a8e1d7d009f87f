# SPDX-License-Identifier: Apache-2.0
"""Questions with known answers: made from seeds, or read from files. Neither torch nor vLLM."""

from vllm_choreo.lab.problems.documents import (
    fact_pairs,
    key_values,
    list_pairs,
    sentence_facts,
    stated_numbers,
)
from vllm_choreo.lab.problems.facts import trivia
from vllm_choreo.lab.problems.functions import functions
from vllm_choreo.lab.problems.generate import algebra, arithmetic, counting
from vllm_choreo.lab.problems.jsonl import DataError, load_jsonl
from vllm_choreo.lab.problems.long_documents import reports
from vllm_choreo.lab.problems.problem import Kind, Problem
from vllm_choreo.lab.problems.word_problems import word_problems
from vllm_choreo.lab.problems.words import concept_lists

__all__ = [
    "DataError",
    "Kind",
    "Problem",
    "algebra",
    "arithmetic",
    "concept_lists",
    "counting",
    "fact_pairs",
    "functions",
    "key_values",
    "list_pairs",
    "load_jsonl",
    "reports",
    "sentence_facts",
    "stated_numbers",
    "trivia",
    "word_problems",
]
