# SPDX-License-Identifier: Apache-2.0
"""The page of the time to first token, from its CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median
from benchmarks.harness.tables import table, with_spread

BAR = 12.0  # ratio of the medians of rounds 2 and 3, baseline / choreo
MODES = ("baseline", "choreo")


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV files."""
    rows = read_csv("ttft")
    if not rows:
        return ""
    ratios = ratios_of(rows)
    verdict = "reached" if min(ratios.values()) >= BAR else "MISSED"
    return "\n\n".join(
        [
            "## Time to first token: parallel debate",
            f"Three agents, three rounds, answers of {rows[0]['generated_tokens']} tokens, one "
            "engine, modes in turn, every generated token forced to be the same. The baseline is "
            "vLLM's prefix caching on the same texts. Milliseconds: median [quartiles] over the "
            "calls of rounds 2 and 3. "
            f"Bar: ratio of medians at least {BAR:.0f}: {verdict}.",
            _main_table(rows, ratios),
            _cost_model(rows, read_csv("ttft_steps")),
            "One call without parents, by the length of its header:",
            _step_table(read_csv("ttft_steps")),
            "Where the time goes, in milliseconds, medians over the parallel calls of rounds 2 and "
            "3 (separate runs with timers in the engine; each part without the parts it calls):",
            _part_table(read_csv("ttft_parts")),
            machine_line(rows),
        ]
    )


def _main_table(rows: Sequence[Mapping[str, str]], ratios: Mapping[str, float]) -> str:
    lines = [
        (
            number,
            *(with_spread([1e3 * t for t in ttfts(rows, mode, number)]) for mode in MODES),
            f"{ratio:.1f}",
        )
        for number, ratio in ratios.items()
    ]
    return table(("pass", "baseline", "choreographed", "ratio"), lines)


def _per_round(rows: Sequence[Mapping[str, str]], mode: str) -> float:
    """Tokens that the calls of one round after the first must prefill together."""
    late = [row for row in rows if row["mode"] == mode and row["stage"] != "round 1"]
    rounds = {(row["pass"], row["rep"], row["stage"]) for row in late}
    return sum(int(row["prefilled_tokens"]) for row in late) / len(rounds)


def _step_median(steps: Sequence[Mapping[str, str]], tokens: int) -> float:
    return median(float(s["ttft_s"]) for s in steps if int(s["header_tokens"]) == tokens)


def _cost_model(rows: Sequence[Mapping[str, str]], steps: Sequence[Mapping[str, str]]) -> str:
    base, choreo = (_per_round(rows, mode) for mode in MODES)
    seals = len({row["author"] for row in rows})
    small, large = _step_median(steps, 24), _step_median(steps, 1024)
    rate = 1024 / large
    expected = 1e3 * base / rate
    # Between the probes of 24 and 1024 tokens time grows in proportion to the tokens.
    slope = (large - small) / 1000
    ours = 1e3 * (small + max(0.0, choreo + seals - 24) * slope)
    return (
        f"Cost model: a round of the baseline must prefill {base:.0f} tokens in front of its first "
        f"tokens, which at the measured {rate:.0f} tokens/s take {expected:.0f} ms. Choreographed, "
        f"it is the headers, {choreo:.0f} tokens, and the last token of each of the {seals} "
        f"answers before: one step of {choreo + seals:.0f} tokens, {ours:.0f} ms by the table "
        f"below. Expected ratio: {expected / ours:.1f}."
    )


def _step_table(steps: Sequence[Mapping[str, str]]) -> str:
    lengths = list(dict.fromkeys(step["header_tokens"] for step in steps))
    lines = []
    for length in lengths:
        times = [1e3 * float(s["ttft_s"]) for s in steps if s["header_tokens"] == length]
        lines.append(
            (length, with_spread(times, ".1f"), f"{1e3 * int(length) / median(times):.0f}")
        )
    return table(("header tokens", "ms to first token", "tokens/s"), lines)


def _part_table(parts: Sequence[Mapping[str, str]]) -> str:
    late = [row for row in parts if int(row["round"]) > 1]
    names = list(dict.fromkeys(row["part"] for row in late))
    cells: dict[str, list[float]] = {}
    for name in names:
        cells[name] = [
            median(
                [float(r["ms"]) for r in late if r["mode"] == mode and r["part"] == name] or [0.0]
            )
            for mode in MODES
        ]
    names.sort(key=lambda name: -cells[name][1])
    lines = [(name, *(f"{ms:.1f}" for ms in cells[name])) for name in names]
    lines.append(("sum", *(f"{sum(c[i] for c in cells.values()):.1f}" for i in range(2))))
    steps = [sorted({r["steps"] for r in late if r["mode"] == mode}) for mode in MODES]
    lines.append(("model steps (tokens of requests)", *("; ".join(found) for found in steps)))
    return table(("part", "baseline", "choreographed"), lines)


def ttfts(
    rows: Sequence[Mapping[str, Any]], mode: str, number: Any = None, rep: Any = None
) -> list[float]:
    """Seconds to first token of the calls after round 1."""
    return [
        float(row["ttft_s"])
        for row in rows
        if row["mode"] == mode
        and row["stage"] != "round 1"
        and number in (None, row["pass"])
        and rep in (None, row["rep"])
    ]


def ratios_of(rows: Sequence[Mapping[str, Any]]) -> dict[Any, float]:
    """Per pass: median TTFT of the baseline / of choreography."""
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    return {
        number: median(ttfts(rows, "baseline", number)) / median(ttfts(rows, "choreo", number))
        for number in passes
    }
