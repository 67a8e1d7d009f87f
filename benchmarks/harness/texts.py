# SPDX-License-Identifier: Apache-2.0
"""Texts of a given length."""

from __future__ import annotations

from typing import Any

from vllm_choreo.lab.problems.long_documents import reports


def long_text(tokenizer: Any, num_tokens: int, seed: int, between: str = " ") -> str:
    """A text of `num_tokens` tokens, or up to one report less, that no other seed has.

    Args:
        between: what stands between two reports; those are of about 100 tokens.
    """
    text, number = f"Collection {seed}.", 0
    while True:
        (problem,) = reports(1, seed * 1000 + number)
        for report in problem.documents:
            longer = f"{text}{between}{report}"
            if len(tokenizer.encode(longer, add_special_tokens=False)) > num_tokens:
                return text
            text = longer
        number += 1
