# SPDX-License-Identifier: Apache-2.0
"""The problems that each workflow is given where no file is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from vllm_choreo.lab.problems import (
    Problem,
    algebra,
    arithmetic,
    concept_lists,
    fact_pairs,
    functions,
    key_values,
    list_pairs,
    reports,
    sentence_facts,
    stated_numbers,
    trivia,
    word_problems,
)

DEFAULT_MAX_TOKENS = 128
DEFAULT_SHORT_TOKENS = 16  # of calls that need to say one word only, as votes and decisions


class ProblemSet(NamedTuple):
    """`make(num, seed)` gives the problems; an answer has at most `max_tokens`."""

    make: Callable[[int, int], list[Problem]]
    max_tokens: int = DEFAULT_MAX_TOKENS


# By workflow and name; the first one is the default.
SETS: dict[str, dict[str, ProblemSet]] = {
    "direct": {"trivia": ProblemSet(trivia)},
    "tree_of_thoughts": {"word_problems": ProblemSet(word_problems)},
    "parallel_debate": {
        "arithmetic": ProblemSet(arithmetic),
        "stated_numbers": ProblemSet(stated_numbers, 32),
    },
    "iterative_debate": {"algebra": ProblemSet(algebra)},
    "multi_qa": {
        "trivia": ProblemSet(trivia),
        "stated_numbers": ProblemSet(stated_numbers, 32),
    },
    # No answer has room for all that was read, unless it is asked for.
    "document_qa": {
        "reports": ProblemSet(reports, 8),
        "key_values": ProblemSet(key_values, 8),
        "sentence_facts": ProblemSet(sentence_facts, 8),
        "fact_pairs": ProblemSet(fact_pairs, 20),
        "list_pairs": ProblemSet(list_pairs, 60),
    },
    "code_review": {"functions": ProblemSet(functions, 160)},
    "branch_solve_merge": {"concepts": ProblemSet(functools.partial(concept_lists, size=10))},
}
