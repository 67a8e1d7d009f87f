# SPDX-License-Identifier: Apache-2.0
"""The page of prompts from schemas, from its CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median, paired_ratio_interval
from benchmarks.harness.tables import table

BAR = 100.0  # text / cached, one prompt in flight, at every length of at least LONG tokens
LONG = 5000
Row = Mapping[str, str]


def section() -> str:
    """This benchmark's part of RESULTS.md."""
    parts = [*_first_token(read_csv("pml_first_token")), *_answers(read_csv("pml_answers"))]
    return "\n\n".join(["## Prompts from schemas", *parts]) if parts else ""


def ratios(rows: Sequence[Row]) -> dict[tuple[int, int], tuple[float, tuple[float, float]]]:
    """By length of the document and prompts in flight: text / cached, with its interval."""
    found = {}
    for tokens, count in sorted({(int(r["document_tokens"]), int(r["in_flight"])) for r in rows}):
        text, cached = (_times(rows, tokens, count, side) for side in ("text", "cached"))
        ratio = median(text) / median(cached)
        found[tokens, count] = (ratio, paired_ratio_interval(text, cached))
    return found


def bar_reached(rows: Sequence[Row]) -> bool:
    """Whether long documents reach the bar; without any there is none."""
    return all(
        ratio >= BAR
        for (tokens, count), (ratio, _) in ratios(rows).items()
        if count == 1 and tokens >= LONG
    )


def _first_token(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    sides = list(dict.fromkeys(row["side"] for row in rows))
    sides.sort(key=("text", "same text", "cached", "from host", "first").index)
    lines = []
    for (tokens, count), (ratio, (low, high)) in ratios(rows).items():
        times = (median(_times(rows, tokens, count, side)) for side in sides)
        cells = (f"{1e3 * seconds:.0f}" for seconds in times)
        lines.append((tokens, count, *cells, f"{ratio:.1f} [{low:.1f}, {high:.1f}]"))
    is_long = any(int(row["document_tokens"]) >= LONG for row in rows)
    verdict = ("reached" if bar_reached(rows) else "MISSED") if is_long else "not measured"
    return [
        "Milliseconds to the first token (median of the prompts in flight, median over the turns) "
        "of prompts that take an instruction of their own and one long document, and ask a "
        "question. *text*: the same prompts over vLLM's prefix caching on the same engine; *same "
        "text*: all after one instruction, so that the document is a hit; *cached*: from a schema "
        "whose modules are encoded; *from host*: its modules lie in host memory; *first*: nothing "
        "is encoded. Ratio: text / cached, with its 95% bootstrap interval. Bar: "
        f"{BAR:.0f} for one prompt over {LONG} tokens and more: {verdict}.",
        table(["tokens", "in flight", *sides, "ratio"], lines),
        machine_line(rows),
    ]


def _times(rows: Sequence[Row], tokens: int, count: int, side: str) -> list[float]:
    return [
        float(row["median_s"])
        for row in rows
        if (int(row["document_tokens"]), int(row["in_flight"]), row["side"])
        == (tokens, count, side)
    ]


def _answers(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [
        (row["task"], row["way"], _percent(row, "score"), _percent(row, "difference"), row["p"])
        for row in rows
    ]
    worse = [f"{row['way']} on {row['task']}" for row in rows if float(row["difference_high"]) < 0]
    return [
        f"Answers to {rows[0]['n']} generated problems of each task, in percent with 95% intervals "
        "(Wilson's; the bootstrap's for coverage and differences): documents as modules, all of "
        "them taken; differences are from the text, p is McNemar's.",
        table(["task", "way", "right", "difference", "p"], lines),
        f"Where it loses: {'; '.join(worse)}." if worse else "No way is seen to lose.",
        machine_line(rows),
    ]


def _percent(row: Row, name: str) -> str:
    value, low, high = (100 * float(row[key]) for key in (name, f"{name}_low", f"{name}_high"))
    return f"{value:.0f} [{low:.0f}, {high:.0f}]"
