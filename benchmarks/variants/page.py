# SPDX-License-Identifier: Apache-2.0
"""The section on variants, alone and under load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median, percentile
from benchmarks.harness.tables import table
from benchmarks.variants.load import OWN

Rows = Sequence[Mapping[str, str]]


def rates_met(rows: Rows, side: str) -> list[float]:
    """The rates at which nine of ten first tokens came within the target."""
    found = []
    for rate in sorted({float(row["rate"]) for row in rows}):
        times = _ttfts(rows, side, rate) if rate else []
        if times and percentile(times, 0.9) <= float(rows[0]["target_s"]):
            found.append(rate)
    return found


def section() -> str:
    """Empty if there are no results."""
    rows = read_csv("variants")
    if not rows:
        return ""
    rates = sorted({float(row["rate"]) for row in rows})
    sides = list(dict.fromkeys(row["side"] for row in rows))
    lines = [[side, *(_cell(rows, side, rate) for rate in rates)] for side in sides]
    own = max(rates_met(rows, OWN), default=0.0)
    said = []
    for side in sides:
        most = max(rates_met(rows, side), default=0.0)
        times = f", {most / own:.1f} times that of its own encoding" if own and side != OWN else ""
        rate = f"{most:g} requests per second{times}" if most else "none of these"
        said.append(f"{side}: {rate}")
    row = rows[0]
    return "\n\n".join(
        [
            "## One variant's messages for another, alone and under load",
            f"Requests of variant B arrive one at a time, or at random (Poisson), each about a "
            f"document of {row['document_tokens']} tokens that variant A has encoded. Milliseconds "
            "to the first token: median, and within which nine of ten came; target of the latter: "
            f"{1e3 * float(row['target_s']):.0f} ms. *Own encoding*: B prefills the document, as "
            "stock vLLM does; *as stored*: it reads what A has encoded; *profile*: it encodes anew "
            "the layers that `vllm-choreo profile-pair` has chosen; *by load*: those that the "
            "target and the load allow; *layers*: these.",
            table(["requests per second", *map(_rate, rates)], lines),
            *(
                [f"One at a time, own encoding / this: {'; '.join(_ratios(rows, sides))}."]
                if rates[0] == 0
                else []
            ),
            "Highest rate at which the target is met: " + "; ".join(said) + ".",
            machine_line(rows),
        ]
    )


def _rate(rate: float) -> str:
    return f"{rate:g}" if rate else "one at a time"


def _ratios(rows: Rows, sides: Sequence[str]) -> list[str]:
    """How many times as fast first tokens come, pass by pass."""
    said = []
    for side in sides:
        if side == OWN:
            continue
        found = []
        for number in sorted({row["pass"] for row in rows}):
            of_pass = [row for row in rows if row["pass"] == number]
            own, this = (median(_ttfts(of_pass, one, 0.0)) for one in (OWN, side))
            found.append(f"{own / this:.2f}")
        said.append(f"{side} {', '.join(found)}")
    return said


def _ttfts(rows: Rows, side: str, rate: float) -> list[float]:
    return [
        float(row["ttft_s"]) for row in rows if row["side"] == side and float(row["rate"]) == rate
    ]


def _cell(rows: Rows, side: str, rate: float) -> str:
    times = _ttfts(rows, side, rate)
    if not times:
        return ""
    return f"{1e3 * median(times):,.0f}, {1e3 * percentile(times, 0.9):,.0f}"
