# SPDX-License-Identifier: Apache-2.0
"""The benchmark of saved messages measures what it says."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.keep import bars, measure
from tests.engine.oracle import random_tokens
from tests.engine.test_keep import llm, saved

__all__ = ["llm", "saved"]  # the fixtures


@pytest.mark.exhaustive
def test_the_benchmark_measures_what_it_says(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    monkeypatch.setattr(measure, "draw_tokens", lambda start, count: random_tokens(rng, count))
    (row,) = measure.measure(llm, 96, 48, 1)
    assert row["messages"] == 2 and min(row["encode_s"], row["save_s"], row["load_s"]) > 0
    short = {key: str(value) for key, value in row.items()}
    assert bars.bar_reached([short]), "short messages have no bar"
    slow = {**short, "tokens": "8000", "encode_s": "10.0", "load_s": "1.0"}
    assert not bars.bar_reached([slow]) and bars.bar_reached([{**slow, "load_s": "0.1"}])
