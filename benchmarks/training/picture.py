# SPDX-License-Identifier: Apache-2.0
"""The picture of what adapters win back: a line a set, a dot an arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.pictures import BLUE, GREEN, INK, ORANGE, PALE, RED, panels, save_picture
from vllm_choreo.lab.study.scores import CHOREOGRAPHED
from vllm_choreo.trained_adapter import PLACEMENTS

Row = Mapping[str, str]
_COLOURS = dict(zip(PLACEMENTS, (BLUE, ORANGE, GREEN), strict=True))
_MIXTURE, _OTHERS = "the mixture's, prefill", "other tasks', prefill"


def draw(rows: Sequence[Row], name: str) -> None:
    """Draw the sets all of whose answers are right or wrong, from top to bottom."""
    unknown = {row["set"] for row in rows if not row["accuracy"]}
    rows = [row for row in rows if row["set"] not in unknown]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    if not sets:
        return
    titles = ["right answers, less those of the text, points", "of the distance to the text, gone"]
    figure, (answers, distance) = panels(titles, height=1.2 + 0.6 * len(sets))
    for axes in (answers, distance):
        axes.set_yticks(range(len(sets)), sets)
        axes.set_ylim(len(sets) - 0.5, -0.5)
    answers.axvline(0, color=INK, lw=1)
    distance.axvline(75, color=PALE, lw=1, ls="--")
    distance.set_xlim(0, 100)
    distance.set_xlabel("%", color=INK)
    for row in rows:
        place, kind = sets.index(row["set"]), _kind(row)
        if kind is None:
            continue
        label, colour, shift = kind
        points = 100 * float(row["difference"])
        ends = [[points - 100 * float(row["difference_low"])],
                [100 * float(row["difference_high"]) - points]]  # fmt: skip
        dot: dict[str, Any] = {"color": colour, "ms": 5 if colour != PALE else 3.5}
        answers.errorbar(points, place + shift, xerr=ends, fmt="o", lw=1, label=label, **dot)
        if row["kl_gap_closed"]:
            distance.plot(100 * float(row["kl_gap_closed"]), place + shift, "o", **dot)
    known = dict(zip(*answers.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=6, fontsize=8)
    save_picture(figure, name)


def _kind(row: Row) -> tuple[str, str, float] | None:
    """What an arm is called, its colour, and how far from its line it lies; None: not drawn."""
    arm = row["arm"]
    own, _, trained = arm.partition(f"{row['set']}-")
    placement = trained.partition("-")[0]  # without its epochs
    if arm == CHOREOGRAPHED:
        return "no adapter", RED, -0.3
    if not own and placement in _COLOURS:
        return f"own {placement}", _COLOURS[placement], -0.18 + 0.12 * PLACEMENTS.index(placement)
    if arm.endswith("-prefill"):
        mixed = arm.startswith("mixture")
        return (_MIXTURE, INK, 0.18) if mixed else (_OTHERS, PALE, 0.3)
    return None
