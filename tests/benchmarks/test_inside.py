# SPDX-License-Identifier: Apache-2.0
"""The benchmark of chats that are cut inside measures what it says; and on the real model nobody is
steered who should not be.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.distributions import ENGINE_OPTIONS
from benchmarks.harness.texts import long_text
from benchmarks.inside import attack, bars
from benchmarks.inside.measure import measure_cost, measure_edits, measure_index
from tests.engine.choreographies import LOGPROB_TOLERANCE

KL_TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def llm(engine_slot: Callable[..., Any], embedded_model_path: Path) -> Any:
    return engine_slot(embedded_model_path, **ENGINE_OPTIONS)


@pytest.mark.exhaustive  # on a whole model; tests/engine/test_auto_laws.py has attacks in every run
def test_a_chunk_that_an_attacker_sent_before_steers_only_who_reads_as_seen(llm: Any) -> None:
    """HijackKV (arXiv 2607.19957), carried out."""
    rows = attack.measure(llm, num_tokens=3, answer_tokens=0)
    assert {(row["attack"], row["way"]) for row in rows} == {
        (name, way) for name in attack.ATTACKS for way in attack.WAYS
    }
    for row in rows:
        if row["way"] == "seen":
            assert row["largest"] > 0.1, row
        else:
            assert row["kl"] < KL_TOLERANCE and row["largest"] < LOGPROB_TOLERANCE, row


@pytest.mark.exhaustive
def test_an_attack_changes_no_answer_but_maybe_of_who_reads_as_seen(llm: Any) -> None:
    """Distributions of who does are moved; whether his answer is, too, is the model's matter."""
    rows = attack.measure(llm, num_tokens=16, answer_tokens=24)
    assert all(row["answer"] == row["without"] for row in rows if row["way"] != "seen")
    assert all(row["kl"] > 1e-3 for row in rows if row["way"] == "seen")


@pytest.mark.exhaustive
def test_the_benchmark(engine_slot: Callable[..., Any], shallow_model_path: Path) -> None:
    from vllm import SamplingParams

    llm = engine_slot(shallow_model_path)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    tokenizer = llm.get_tokenizer()
    sizes = enumerate((400, 500, 500))
    prompt, *documents = [long_text(tokenizer, size, n, "\n\n") for n, size in sizes]
    rows = [
        {key: str(value) for key, value in row.items()}
        for row in measure_edits(llm, one, prompt, documents, 2)
    ]
    assert len(rows) == 2 * 3 * 2
    for row in rows:
        if row["side"] == "choreo" and row["turn"] != "0":
            assert int(row["reused_tokens"]) > 150, row
    assert bars.edits_reach_bar(rows), "short prompts have no bar"
    (cost,) = measure_cost(llm, one, [attack.VICTIM])
    assert 0 < cost["cut_s"] < cost["first_token_s"]
    assert not bars.cost_reaches_bar([{"share": "0.5"}])
    index = measure_index(10_000, 100)
    assert 0 < index["messages_mb"] < index["pieces_mb"] < 1
    assert 50 <= index["cuts"] <= 200 and index["cut_tokens_per_s"] > 0
