# SPDX-License-Identifier: Apache-2.0
"""Engines of one process have one number of threads, or oneDNN would misread their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from tests.engine.engines import SLOT, start_engine, stop_engine

PROMPT = list(range(20, 60))


@pytest.fixture
def num_threads() -> Iterator[int]:
    """Number of threads of this process, which is put back."""
    before = torch.get_num_threads()
    yield before
    torch._C.set_num_threads(before)


def test_a_second_engine_of_another_number_of_threads(
    num_threads: int, tiny_model_path: Callable[[str], Path]
) -> None:
    """BLOOM's weights have shapes that oneDNN lays out by the number of threads."""
    SLOT.stop()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = []
    for threads in (num_threads, num_threads + 1):
        torch._C.set_num_threads(threads)
        llm = start_engine(tiny_model_path("bloom"))
        assert torch.get_num_threads() == num_threads
        answers.append(llm.generate({"prompt_token_ids": PROMPT}, params)[0].outputs[0].token_ids)
        stop_engine(llm)
    assert answers[0] == answers[1]
