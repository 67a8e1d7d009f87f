# SPDX-License-Identifier: Apache-2.0
"""The benchmark of models with states measures what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.harness import record
from benchmarks.states import __main__ as states
from benchmarks.states import bars, orders


@pytest.mark.exhaustive  # two engines in processes of their own
def test_both_sides_say_the_same_and_the_chain_reads_what_stock_does_not_find(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    short = ["states", "--turns", "4", "--passes", "1", "--requests", "2", "--batches", "1"]
    monkeypatch.setattr(sys, "argv", short)
    assert states.main() in (0, 1)  # so few turns decide nothing
    rows = record.read_csv("states")
    chain = [row for row in rows if row["side"] == "chain"]
    for row in chain:
        # All but the turn itself.
        said = int(row["text_tokens"]) - int(row["new_tokens"])
        assert int(row["reused_tokens"]) == said
    assert int(chain[1]["stock_reused_tokens"]) == 0
    assert (
        bars.found_by_stock(chain[0]) == "first turn" and bars.found_by_stock(chain[1]) == "nothing"
    )
    ordinary = record.read_csv("states_ordinary")
    assert len(ordinary) == 2 * 3  # nothing in common; and something, in a cold and in a warm cache
    warm = [row for row in ordinary if row["is_warm"] == "1"]
    assert all(int(row["cached_tokens"]) >= 2 * 1024 for row in warm)


@pytest.mark.exhaustive  # four engines in processes of their own
def test_readers_in_any_order_reuse_all_documents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    sizes = ["--documents", "2", "--tokens", "40", "--readers", "2"]
    short = ["orders", "--turns", "1", "--passes", "1", "--judged", "1", *sizes]
    monkeypatch.setattr(sys, "argv", short)
    assert orders.main() == 0  # it ends where answers differ, or a reader reuses less
    timed = {row["side"]: row for row in record.read_csv("states_orders")}
    assert int(timed["composed"]["reused_tokens"]) == 2 * 2 * 40
    assert {row["model"] for row in record.read_csv("states_quality")} == {"hybrid", "dense"}


def test_bars() -> None:
    rows = [
        {"turn": "1", "stock_reused_tokens": "0", "side": side, "first_token_s": seconds}
        for side, seconds in (("stock", "3.0"), ("chain", "1.0"))
    ]
    batches = [
        {"shared_tokens": "0", "is_warm": "0", "side": side, "tokens_per_s": "100"}
        for side in ("plugin", "stock")
    ]
    assert bars.bars_reached(rows, batches)
    assert not bars.bars_reached([{**row, "first_token_s": "2.0"} for row in rows], batches)
    slower = [{**batches[0], "tokens_per_s": "97"}, batches[1]]
    assert not bars.bars_reached(rows, slower)
