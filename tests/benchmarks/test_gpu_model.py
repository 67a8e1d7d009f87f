# SPDX-License-Identifier: Apache-2.0
"""The cost model of GPUs: cases that a hand computes, limits, and that slower is not faster."""

from __future__ import annotations

import csv
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.cases import Heads
from benchmarks.gpu.model.bounds import BOUNDS, GPUS, MODELS, Rates, rates
from benchmarks.gpu.model.compare import compare
from benchmarks.gpu.model.cost import GRAPHS, STOCK, TODAY, WAYS, Machine, Times, Way, times
from benchmarks.gpu.model.counts import (
    DECODE,
    FIRST,
    PREFILL,
    Counts,
    count_readers,
    count_workflow,
)
from benchmarks.gpu.model.predict import break_even_answer, break_even_rows, workflow_rows
from benchmarks.gpu.step import paper_workflows
from benchmarks.gpu.transformer import Shape
from benchmarks.harness.record import read_csv
from vllm_choreo.lab.workflows.parallel_debate import parallel_debate

# Everything at the GPU's full rates, and nothing that lasts by itself.
PERFECT = Rates(
    **{f.name: 0.0 for f in fields(Rates)}
    | dict.fromkeys(("weights", "products", "link", "stock_reading", "stock_products"), 1.0)
    | dict.fromkeys(("reading", "products_of_spans"), 1.0)
)
LLAMA = Machine(GPUS["H100"], 1, MODELS["Llama-3.1-8B"])
# Per layer: queries and output, keys and values, then gate, up and down; and the head.
WEIGHTS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
HEAD = 4096 * 128256
KV_BYTES = 2 * 8 * 128 * 2


def steps(**given: Any) -> Counts:
    """One step that decodes, and reads nothing, where nothing else is said."""
    plain = {"kind": DECODE, "calls": 0, "tokens": 1, "requests": 1, "read": 0, "pairs": 0}
    return Counts(**{
        name: np.array([value], float)
        for name, value in (plain | {"spans": 1, "is_planned": 0} | given).items()
    })  # fmt: skip


def seconds(way: Way = STOCK, of: Rates = PERFECT, machine: Machine = LLAMA, **given: Any) -> float:
    (found,) = machine.seconds(steps(**given), way, of)
    return float(found)


# -- by hand ---------------------------------------------------------------------------------------


def test_a_token_takes_what_its_weights_take_to_read() -> None:
    assert MODELS["Llama-3.1-8B"].num_weights() == WEIGHTS
    assert seconds() == pytest.approx(2 * (WEIGHTS + HEAD) / 3.35e12)
    half = replace(PERFECT, weights=0.5)
    assert seconds(of=half) == pytest.approx(2 * seconds())


def test_many_tokens_take_what_their_products_take() -> None:
    found = seconds(kind=FIRST, tokens=5000, requests=1)
    assert found == pytest.approx(2 * WEIGHTS * 5000 / 989e12 + 2 * HEAD / 3.35e12)


def test_attention_takes_what_it_reads_or_what_it_computes() -> None:
    read = seconds(read=10**6, pairs=10**6) - seconds()
    assert read == pytest.approx(32 * KV_BYTES * 10**6 / 3.35e12)
    computed = seconds(read=10**4, pairs=10**9) - seconds()
    assert computed == pytest.approx(32 * 4 * 4096 * 10**9 / 989e12)


def test_the_host_counts_where_it_takes_longer_than_the_device() -> None:
    slow = replace(PERFECT, layer=1.0, stock_layer=0.5)
    assert seconds(TODAY, slow) == pytest.approx(32.0)
    assert seconds(GRAPHS, slow) == seconds(STOCK, slow) == pytest.approx(seconds())
    # What is no decode step has no full graph.
    assert seconds(GRAPHS, slow, kind=FIRST) == pytest.approx(32.0)
    assert seconds(STOCK, slow, kind=FIRST) == pytest.approx(16.0)


def test_planning_is_paid_where_spans_are_laid_out() -> None:
    slow = replace(PERFECT, plan=2.0)
    more = {"is_planned": 1, "spans": 30, "tokens": 3}
    plain = seconds(TODAY, slow, tokens=3)
    assert seconds(TODAY, slow, **more) - plain == pytest.approx(2 * (0.9e-3 + 30e-5 + 6e-6))
    assert seconds(STOCK, slow, **more) == seconds(STOCK, slow, tokens=3)


def test_two_gpus_take_half_of_it_and_their_sums() -> None:
    pair = replace(LLAMA, count=2)
    assert seconds(machine=pair, of=replace(PERFECT, link=1e12)) == pytest.approx(seconds() / 2)
    summed = seconds(machine=pair, of=replace(PERFECT, link=1e12, reduce=1.0))
    assert summed == pytest.approx(seconds() / 2 + 64)
    sent = seconds(machine=pair) - seconds() / 2
    assert sent == pytest.approx(64 * 4096 * 2 / 450e9)


def test_a_model_gets_the_gpus_that_hold_it() -> None:
    needed = {
        (gpu, model): Machine.of(GPUS[gpu], MODELS[model]).count for gpu in GPUS for model in MODELS
    }
    assert [needed[gpu, "Llama-3.3-70B"] for gpu in GPUS] == [4, 2, 1]
    assert [needed[gpu, "Llama-3.1-8B"] for gpu in GPUS] == [1, 1, 1]


# -- laws ------------------------------------------------------------------------------------------


def test_without_costs_of_its_own_and_nothing_shared_choreography_is_stock() -> None:
    same = {"read": 5000, "pairs": 5000, "is_planned": 1, "tokens": 7, "requests": 7}
    of = replace(PERFECT, kernel=1e-6, step=1e-4)
    for way in (TODAY, GRAPHS):
        assert seconds(way, of, **same) == pytest.approx(seconds(STOCK, of, **same))


@pytest.mark.parametrize("name", BOUNDS)
def test_slower_is_never_faster_and_matters_somewhere(name: str) -> None:
    machine = Machine.of(GPUS["H100"], MODELS["Llama-3.3-70B"])
    slow, fast = (replace(rates(), **{name: getattr(BOUNDS[name], e)}) for e in ("slow", "fast"))
    kinds = [
        {"read": 10**6, "pairs": 10**6, "is_planned": 1},
        {"kind": FIRST, "tokens": 10**4, "read": 10**4, "pairs": 10**9},
        {"kind": FIRST, "tokens": 20},
    ]
    # Where the device has little to do the host counts.
    small = Machine(GPUS["B200"], 1, Shape(32, 512, Heads(8, 8, 64), 1024, 1000))
    found = [
        (seconds(way, slow, on, **kind), seconds(way, fast, on, **kind))
        for way in WAYS
        for kind in kinds
        for on in (machine, small)
    ]
    assert all(a >= b for a, b in found) and any(a > b for a, b in found)


def test_more_work_never_takes_less() -> None:
    plain = {"kind": FIRST, "tokens": 600, "requests": 3, "read": 10**5, "pairs": 10**8}
    plain |= {"spans": 9, "is_planned": 1}
    for way in WAYS:
        for name in ("tokens", "requests", "read", "pairs", "spans"):
            assert seconds(way, rates(), **plain | {name: 2 * plain[name]}) >= seconds(
                way, rates(), **plain
            )


def test_every_bound_has_a_source() -> None:
    kinds = ("measured", "published", "assumed")
    assert {f.name for f in fields(Rates)} == set(BOUNDS)
    for name, bound in BOUNDS.items():
        assert bound.source.startswith(kinds), name
        assert bound.slow != bound.fast and min(bound.slow, bound.fast) > 0, name


# -- counts ----------------------------------------------------------------------------------------


def test_readers_read_together_and_encode_their_headers_alone() -> None:
    counts = count_readers(read=1000, readers=2, answer=3)
    ours, stock = counts[True], counts[False]
    # The message and both roles, then two headers of 16 tokens; stock has no messages.
    assert ours.tokens.tolist() == [1000, 64, 32, 2, 2]
    assert ours.kind.tolist() == [PREFILL, PREFILL, FIRST, DECODE, DECODE]
    assert stock.tokens.tolist() == [2 * (32 + 1000 + 16), 2, 2]
    # Roles of 32 tokens, read by one reader each; queries of a header read each for itself.
    assert ours.read.tolist()[2:] == [2 * 1048, 1000 + 2 * 49, 1000 + 2 * 50]
    assert stock.read.tolist() == [2 * 1048, 2 * 1049, 2 * 1050]
    assert ours.pairs.tolist()[2:] == [2 * (16 * 1032 + 16 * 17 // 2), 2 * 1049, 2 * 1050]
    assert stock.pairs.tolist()[0] == 2 * (1048 * 1049 // 2)
    assert ours.spans.tolist()[2:] == [6, 6, 6] and ours.calls.tolist() == [0, 0, 2, 0, 0]


def test_both_sides_of_a_workflow_generate_the_same() -> None:
    counts = count_workflow(
        lambda c: parallel_debate(
            c, "How many?", agents=2, rounds=2, sampling_params={"max_tokens": 5}
        )
    )
    decoded = [of.tokens[of.kind == DECODE].tolist() for of in counts.values()]
    assert decoded[0] == decoded[1] == [2] * 8
    assert counts[True].tokens.sum() < counts[False].tokens.sum()
    assert counts[True].calls.sum() == counts[False].calls.sum() == 4


# -- predictions -----------------------------------------------------------------------------------


def test_times_are_means_over_calls_and_steps() -> None:
    both = [steps(kind=FIRST, calls=3, tokens=9000), steps(), steps(read=10**6, pairs=10**6)]
    counts = Counts(**{
        f.name: np.concatenate([getattr(step, f.name) for step in both]) for f in fields(Counts)
    })  # fmt: skip
    first, plain, long = LLAMA.seconds(counts, STOCK, PERFECT)
    found = times(LLAMA, counts, STOCK, PERFECT)
    assert found == Times(first, (plain + long) / 2, first + plain + long)


def test_both_end_at_once_at_the_answer_that_breaks_even() -> None:
    stock, ours = Times(0.10, 0.005, 0.0), Times(0.02, 0.007, 0.0)
    tokens = break_even_answer(stock, ours)
    assert tokens == pytest.approx(41.0)
    ends = [t.first_token + (tokens - 1) * t.decode_step for t in (stock, ours)]
    assert ends[0] == pytest.approx(ends[1])
    assert break_even_answer(stock, replace(ours, decode_step=0.005)) == float("inf")
    assert break_even_answer(ours, stock) == 0.0


def test_the_file_holds_what_the_model_says() -> None:
    """A part of it: iterative debate on one GPU. All of it is exhaustive."""
    name = "iterative debate"
    counts = count_workflow(paper_workflows(is_tiny=False)[name])
    rows = list(workflow_rows(name, counts, ["B200"], ["Llama-3.1-8B"]))
    _assert_in_file("gpu_model", rows)
    for row in rows:
        for figure in ("ttft_mean_ms", "decode_step_ms", "total_ms"):
            assert row[f"{figure}_low"] <= row[figure] <= row[f"{figure}_high"]
        if row["side"] != STOCK.name:
            for figure in ("first_token_ratio", "decode_step_ratio", "total_ratio"):
                assert row[f"{figure}_low"] <= row[figure] <= row[f"{figure}_high"]


@pytest.mark.exhaustive
def test_the_files_hold_all_that_the_model_says() -> None:
    rows = []
    for name, workflow in paper_workflows(is_tiny=False).items():
        rows += workflow_rows(name, count_workflow(workflow))
    _assert_in_file("gpu_model", rows)
    assert len(rows) == len(read_csv("gpu_model"))
    lengths = list(break_even_rows())
    _assert_in_file("gpu_model_lengths", lengths)
    assert len(lengths) == len(read_csv("gpu_model_lengths"))


def _assert_in_file(name: str, rows: list[Any]) -> None:
    found = read_csv(name)
    for row in rows:
        said = {key: str(value) for key, value in row.items()}
        assert any(said.items() <= line.items() for line in found), said


def test_a_run_is_compared_with_its_prediction(tmp_path: Path) -> None:
    predicted = read_csv("gpu_model")
    (of,) = (r for r in predicted if _is_compared(SimpleNamespace(**r)))
    given = {
        "ttft_mean_ms": of["ttft_mean_ms"],
        "decode_step_ms": float(of["decode_step_ms_high"]) + 1,
        "estimated_seconds": float(of["total_ms_low"]) / 1e3 - 1,
    }
    path = _step_csv(tmp_path, device="NVIDIA H200", **given)
    lines = compare(path, predicted).splitlines()[2:]
    assert [line.split("| ")[-1].strip(" |") for line in lines] == ["within", "slower", "faster"]
    for wrong in ({"device": "NVIDIA A100"}, {"device": "cpu", "dry_run": "yes"}):
        with pytest.raises(ValueError, match=r"A100|measures nothing"):
            compare(_step_csv(tmp_path, **given, **wrong), predicted)


def _is_compared(row: SimpleNamespace) -> bool:
    found = (row.gpu, row.model, row.workflow, row.side)
    return found == ("H200", "Llama-3.1-8B", "parallel debate", TODAY.name)


def _step_csv(folder: Path, **given: Any) -> Path:
    row = {"workflow": "parallel debate", "side": TODAY.name, **given}
    with (folder / "step.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    return folder / "step.csv"
