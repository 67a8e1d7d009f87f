# SPDX-License-Identifier: Apache-2.0
"""The tables of variants, alone and under load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.stats import median, percentile
from benchmarks.harness.tables import Cell, Rows, Table, Values, interval, middle, of, spread
from benchmarks.variants.load import ANSWER_TOKENS, OWN

INPUTS, LOADING = "variants_inputs", "variants_loading"
# Requests one at a time and under load: of two adapters, and of a model and its fine-tune.
LOADS = ("variants", "variants_open")


def rates_met(rows: Rows) -> list[float]:
    """The rates at which nine of ten first tokens of a side came within the target."""
    found = []
    for rate in sorted({float(row["rate"]) for row in rows} - {0.0}):
        if percentile(of("ttft_s", rate=rate)(rows), 0.9) <= float(rows[0]["target_s"]):
            found.append(rate)
    return found


def _columns(rows: Rows) -> Mapping[str, Cell]:
    """Columns for the rates that were measured; 0 is one request at a time."""
    rates = sorted({float(row["rate"]) for row in rows})
    titles = {rate: f"{rate:g} per second, ms" if rate else "one at a time, ms" for rate in rates}
    times = {title: _times(rate) for rate, title in titles.items()}
    columns: dict[str, Cell] = {"highest rate met": lambda one: max(rates_met(one), default="none")}
    if 0.0 in rates:
        columns["own / this, alone"] = _against_own(rows)
    return {**times, **columns}


def _times(rate: float) -> Cell:
    """Milliseconds: median, and within which nine of ten came."""

    def cell(rows: Rows) -> str:
        found = of("ttft_s", 1e3, rate=rate)(rows)
        return f"{median(found):,.0f}, {percentile(found, 0.9):,.0f}" if found else ""

    return cell


def _against_own(rows: Rows) -> Cell:
    """Ratios of first tokens that come one at a time, pass by pass."""

    def cell(one: Rows) -> str:
        if one[0]["side"] == OWN:
            return ""
        found = []
        for number in sorted({row["pass"] for row in one}):
            where = {"rate": 0.0, "pass": number}
            own, this = of("ttft_s", side=OWN, **where)(rows), of("ttft_s", **where)(one)
            found.append(f"{median(own) / median(this):.2f}")
        return ", ".join(found)

    return cell


def _between(rows: Rows) -> list[float]:
    """Milliseconds between two tokens of an answer, request by request."""
    return [
        1e3 * (float(row["latency_s"]) - float(row["ttft_s"])) / (ANSWER_TOKENS - 1) for row in rows
    ]


def _with_tail(values: Values) -> Cell:
    """Median with its interval over requests, and within which nine of ten are."""
    middle = interval(values, ",.0f")
    return lambda rows: f"{middle(rows)}, {percentile(values(rows), 0.9):,.0f}"


def _per_second(rows: Rows) -> str:
    """Requests that were answered a second: the median of the passes."""
    passes: dict[str, list[float]] = {}
    for row in rows:
        passes.setdefault(str(row["pass"]), []).append(float(row["load_s"]))
    return f"{median([len(loads) / loads[0] for loads in passes.values()]):.2f}"


def _loading_share(rows: Rows) -> list[float]:
    """Percent of loading, in loading and encoding layers anew."""
    pairs = zip(of("load_s")(rows), of("layers_s")(rows), strict=True)
    return [100 * load / (load + layers) for load, layers in pairs]


def _text_over_both(rows: Rows) -> list[float]:
    times = zip(*(of(name)(rows) for name in ("text_s", "load_s", "layers_s")), strict=True)
    return [text / (load + layers) for text, load, layers in times]


def _closed(rows: Rows) -> Sequence[float]:
    """Percent of the distance to the reader's own encoding, of inputs that have one."""
    return of("closed", 100)([row for row in rows if row["closed"] != ""])


def _rank(share: float) -> Cell:
    """The input below which a share of them lies."""
    return lambda rows: f"{percentile(_closed(rows), share):.0f}"


def _load(name: str) -> Table:
    """Requests that arrive at random: first tokens, time between tokens, end to end."""
    return Table(
        name,
        {"side": "side", "requests a second": "rate"},
        {
            "requests": lambda rows: str(len(rows)),
            "first token, ms": _with_tail(of("ttft_s", 1e3)),
            "between tokens, ms": _with_tail(_between),
            "end to end, ms": _with_tail(of("latency_s", 1e3)),
            "answered a second": _per_second,
        },
        rows=lambda rows: [row for row in rows if float(row["rate"])],
    )


TABLES = {
    INPUTS: Table(
        INPUTS,
        {"pair": "pair", "inputs of": "set", "layers": "layers"},
        {
            "anew": lambda rows: rows[0]["anew"],
            "inputs": lambda rows: len(_closed(rows)),
            "worst, %": _rank(0),
            "first quartile": _rank(0.25),
            "median": _rank(0.5),
            "third quartile": _rank(0.75),
            "best, %": _rank(1),
        },
    ),
    LOADING: Table(
        LOADING,
        {"tokens": "tokens"},
        {
            "megabytes": middle(of("megabytes"), ".1f"),
            "as text, ms": spread(of("text_s", 1e3), ",.0f"),
            "load, ms": spread(of("load_s", 1e3), ",.0f"),
            "then the call, ms": spread(of("layers_s", 1e3), ",.0f"),
            "text / both": spread(_text_over_both, ".2f"),
            "loading, %": spread(_loading_share, ".0f"),
        },
    ),
    "variants": Table("variants", {"side": "side"}, _columns),
    **{f"{name}_load": _load(name) for name in LOADS},
}
