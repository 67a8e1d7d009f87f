# SPDX-License-Identifier: Apache-2.0
"""The script of the benchmarks of workflows: pieces of the demo's passages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_choreo.testing.script import Script


def scripted(tokenizer: Any, lengths: Mapping[str, int]) -> Script:
    """A script of the demo's passages."""
    from vllm_choreo.lab.cli.demo import TASKS

    words = " ".join(task.question for task in TASKS)
    text = "".join(letter for letter in words if not letter.isdigit())
    return Script(tokenizer, tokenizer.encode(text, add_special_tokens=False), lengths)
