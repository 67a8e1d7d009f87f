# SPDX-License-Identifier: Apache-2.0
"""Questions with known answers: made from seeds, or read from files. Neither torch nor vLLM."""

from vllm_choreo.data.documents import fact_pairs, key_values, list_pairs, sentence_facts
from vllm_choreo.data.facts import trivia
from vllm_choreo.data.generate import algebra, arithmetic, counting
from vllm_choreo.data.jsonl import DataError, load_jsonl
from vllm_choreo.data.problem import Kind, Problem
from vllm_choreo.data.word_problems import word_problems
from vllm_choreo.data.words import concept_lists

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
    "sentence_facts",
    "trivia",
    "word_problems",
]
