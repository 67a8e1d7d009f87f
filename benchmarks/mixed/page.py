# SPDX-License-Identifier: Apache-2.0
"""The page and the plot of the mixed load, in batches and over HTTP, from their CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.pictures import BLUE, PALE, panels, save_picture
from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median, percentile
from benchmarks.harness.tables import table, with_interval, with_spread
from benchmarks.mixed.work import SIDES
from vllm_choreo.judge.stats import bootstrap_interval

P99_BAR = 1.1  # time to first token of ordinary requests, choreographed / cached prefix
Rows = Sequence[Mapping[str, Any]]


def section() -> str:
    """This benchmark's part of RESULTS.md; draws the plot."""
    rows, steps = read_csv("mixed"), read_csv("mixed_steps")
    if not rows or not steps:
        return ""
    _draw(rows)
    return "\n\n".join(
        [
            "## Mixed: ordinary requests beside choreographed calls",
            "A closed loop of 8 slots, 4 of which hold ordinary requests (32 to 128 prompt tokens, "
            "8 to 24 generated). The other 4 hold choreographed calls that read 4 messages, 2,048 "
            "tokens, in changing order; on the other side, ordinary calls with a cached prefix of "
            "2,048 tokens and the same new tokens. Below: the ordinary requests alone. Bootstrap "
            f"intervals, 95 %. Bar: p99 at most {P99_BAR} times as long: "
            f"{'reached' if bar_reached(rows) else 'MISSED'}.",
            _load_table(rows),
            "![Time to first token of ordinary requests](results/mixed_ttft.png)",
            "What one choreographed call costs the ordinary requests of its batch: all of it runs "
            "through our attention kernel then, and not through vLLM's. The call reads one message "
            "of 512 tokens; on the other side, a cached prefix of 512. Milliseconds of a decode "
            "step, or from a prompt to its first token.",
            _step_table(steps),
            "Cost model: both kernels read the same keys and values once; what differs is how well "
            "they do it (see the kernels' own table), and some microseconds per layer to lay out "
            "spans. Expected ratio: 1, below it where the context is long.",
            machine_line(rows),
        ]
    )


def http_section() -> str:
    """The part of RESULTS.md on the load over HTTP, from its CSV file."""
    rows = read_csv("server")
    if not rows:
        return ""
    reached = "reached" if bar_reached(rows) else "MISSED"
    return "\n\n".join(
        [
            "## Server: ordinary requests beside choreographed ones, over HTTP",
            "The same load as above, sent by 8 clients of `/v1/completions` to a `vllm serve` "
            "process and timed by the clients; they and the server share 2 cores. Bar: p99 at most "
            f"{P99_BAR} times as long: {reached}.",
            _load_table(rows),
            machine_line(rows),
        ]
    )


# -- the load --------------------------------------------------------------------------------------


def _ttfts(rows: Rows, side: str, number: Any = None) -> list[float]:
    """Milliseconds."""
    return [
        1e3 * float(row["ttft_s"])
        for row in rows
        if row["side"] == side and number in (None, row["pass"])
    ]


def _rates(rows: Rows, side: str, number: Any) -> list[float]:
    """Tokens per second of the ordinary requests, one value per turn."""
    turns = {
        row["turn"]: float(row["tokens_per_s"])
        for row in rows
        if (row["side"], row["pass"]) == (side, number)
    }
    return list(turns.values())


def _p99(values: Sequence[float]) -> float:
    return percentile(values, 0.99)


def _passes(rows: Rows) -> list[Any]:
    return list(dict.fromkeys(row["pass"] for row in rows))


def _p99_ratio(rows: Rows, number: Any) -> float:
    ours, theirs = (_p99(_ttfts(rows, side, number)) for side in SIDES)
    return ours / theirs


def bar_reached(rows: Rows) -> bool:
    """Whether ordinary requests wait as little as they should, in every pass."""
    return all(_p99_ratio(rows, number) <= P99_BAR for number in _passes(rows))


def in_words(rows: Rows) -> str:
    """The p99 so far."""
    p99 = {side: _p99(_ttfts(rows, side)) for side in SIDES}
    return ", ".join(f"{side} p99 {ms:.0f} ms" for side, ms in p99.items())


def _load_table(rows: Rows) -> str:
    """Times to first token of both sides, and their p99 against each other."""
    lines = []
    for number in _passes(rows):
        for side in SIDES:
            ttfts = _ttfts(rows, side, number)
            low, high = bootstrap_interval(ttfts, _p99)
            is_ours = side == SIDES[0]
            lines.append(
                (
                    f"{number}, {side}",
                    len(ttfts),
                    with_spread(_rates(rows, side, number)),
                    with_spread(ttfts),
                    f"{_p99(ttfts):.0f} [{low:.0f}, {high:.0f}]",
                    f"{_p99_ratio(rows, number):.2f}" if is_ours else "",
                )
            )
    head = ("pass, the other half", "requests", "tokens/s", "ms to first token", "p99", "ratio")
    return table(head, lines)


def _draw(rows: Rows) -> None:
    figure, (axes,) = panels(("Ordinary requests: share that waited at most …",))
    for side, colour in zip(SIDES, (BLUE, PALE), strict=True):
        found = sorted(_ttfts(rows, side))
        shares = [100 * (i + 1) / len(found) for i in range(len(found))]
        axes.step(found, shares, where="post", lw=1.6, color=colour, label=f"beside: {side}")
    axes.set_xlabel("ms to first token", fontsize=9)
    axes.set_ylabel("% of ordinary requests", fontsize=9)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    save_picture(figure, "mixed_ttft")


# -- one choreographed call in the batch -----------------------------------------------------------


def _times(steps: Rows, batch: str, side: str) -> list[float]:
    """Milliseconds."""
    return [
        1e3 * float(row["step_s"]) for row in steps if (row["batch"], row["side"]) == (batch, side)
    ]


def steps_in_words(steps: Rows, batch: str) -> str:
    """Medians of both sides."""
    return ", ".join(f"{side} {median(_times(steps, batch, side)):.1f} ms" for side in SIDES)


def _step_table(steps: Rows) -> str:
    lines = []
    for batch in dict.fromkeys(row["batch"] for row in steps):
        ours, theirs = (_times(steps, batch, side) for side in SIDES)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        lines.append(
            (
                batch,
                with_spread(ours, ".1f"),
                with_spread(theirs, ".1f"),
                with_interval(ratios, ".3f"),
            )
        )
    head = ("batch", "with a choreographed call", "with a cached prefix", "ratio, interval")
    return table(head, lines)
