# SPDX-License-Identifier: Apache-2.0
"""Rates against the costs from which measurements were drawn."""

from __future__ import annotations

import math
import random

import pytest

from vllm_choreo.fleet.measured import MeasuredRates


@pytest.mark.parametrize(
    ("start", "per_byte"), [(2e-3, 2e-9), (0.03, 1e-10), (1e-4, 5e-8), (0.0, 1e-8)]
)
def test_rates_are_those_that_moves_were_drawn_from(start: float, per_byte: float) -> None:
    draw, measured = random.Random(1), MeasuredRates(1.0)
    for _ in range(200):
        num_tokens = draw.randrange(10, 5000)
        num_bytes = 1000 * num_tokens
        measured.on_moved(num_tokens, num_bytes, start + per_byte * num_bytes)
    rates = measured.rates()
    assert rates.move == pytest.approx(1000 * per_byte, rel=0.02)
    assert rates.move_start == pytest.approx(start, abs=1e-4 + 0.02 * start)
    assert measured.bytes_of(7) == 7000


def test_rates_are_never_negative() -> None:
    """Moves of all sizes that take as long as they like."""
    draw, measured = random.Random(2), MeasuredRates(1.0)
    for _ in range(500):
        measured.on_moved(1, draw.randrange(1, 10**7), draw.random() / draw.randrange(1, 1000))
        rates = measured.rates()
        assert rates.move >= 0 and rates.move_start >= 0


def test_encoding_is_measured_and_what_cannot_be_moved_is_not() -> None:
    measured = MeasuredRates(100.0, can_move=False, rest_tokens=16)
    for _ in range(200):
        measured.on_encoded(100, 0.5)
    measured.on_encoded(0, 1.0)
    measured.on_encoded(5, 0.0)
    assert measured.rates().encode == pytest.approx(5e-3)
    assert measured.rates().move == math.inf and measured.moves() == (None, None)
    measured.can_move = True
    # Half a block is encoded all the same.
    start, _ = measured.moves()
    assert start is not None and measured.rates().move_start == pytest.approx(start + 16 * 5e-3)


def test_before_any_move_one_of_a_long_message_is_tried() -> None:
    measured = MeasuredRates(1e5, rest_tokens=16)
    assert measured.rates().is_moved(200) and not measured.rates().is_moved(16)
