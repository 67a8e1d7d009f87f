# SPDX-License-Identifier: Apache-2.0
"""Self-contained HTML page of an evaluation: accuracies, distances, transfer, curves, examples.

It has no scripts: it is drawn when it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_choreo.lab.report.frontier import Point, colour, frontier
from vllm_choreo.lab.report.markup import (
    filled,
    hundredths,
    milliseconds,
    nats,
    note,
    percent,
    section,
    table,
    text,
)

_MAX_EXAMPLES = 12  # of a set
_WIDTH, _HEIGHT = 320, 150  # of a picture of curves, in its own units

Row = Mapping[str, Any]


def evaluation_html(evaluation: Mapping[str, Any]) -> str:
    """Draw the page.

    Args:
        evaluation: content of evaluation.json.

    Returns:
        The text of an HTML file that loads nothing from elsewhere.
    """
    sets = evaluation["sets"]
    body = [*map(_set_section, sets), _transfer(sets), _curves(evaluation["adapters"])]
    body += [_examples(one) for one in sets]
    return filled("Evaluation", evaluation["facts"], "\n".join(body))


# -- one set -------------------------------------------------------------------------------------

_HEAD = (
    *("arm", "adapter worn by", "right", "accuracy, %", "difference from text, points"),
    *("worse / better", "p", "same answers, %", "KL to text, nats per token"),
    *("gap closed, %", "KL gap closed, %", "coverage, %", "same calls", "tokens encoded", "TTFT"),
)
_NOTE = (
    "In brackets intervals of 95 %. Worse, better: problems that the text alone, or the arm alone, "
    "gets right; p: McNemar's exact test. Gap closed: of what choreography loses against the text, "
    "the share that the arm regains. Coverage: of all that was asked for, what the answers hold. "
    "Same calls, by role: both say what the text has said, and at every token find the same one "
    "likeliest. Tokens encoded: by all calls of a problem, before they "
    "generated any; TTFT: from a call's submission to its first token; both are means."
)


def _set_section(one: Mapping[str, Any]) -> str:
    rows = one["rows"]
    cells = [_cells(row) for row in rows]
    longest = max([row["kl_high"] or 0 for row in rows], default=0) or 1
    pictures = [
        _bars("Accuracy", rows, "accuracy", 1, percent),
        _bars("KL to the text, nats per token", rows, "kl", longest, nats),
        _frontier(rows),
    ]
    title = f"{text(one['name'])} <small>{text(one['workflow'].replace('_', ' '))}, "
    title += f"{len(one['problems'])} problems</small>"
    return section(
        title, '<div class="charts">', *pictures, "</div>", table(_HEAD, cells), note(_NOTE)
    )


def _cells(row: Row) -> list[str]:
    judged = row["judged"]
    return [
        *(row["arm"], row["placement"] or "–", f"{row['right']} of {judged}" if judged else "–"),
        _with_interval(row, "accuracy", hundredths),
        _with_interval(row, "difference", lambda value: hundredths(value, sign=True)),
        f"{row['worse']} / {row['better']}" if judged else "–",
        f"{row['p_value']:.3f}" if judged else "–",
        hundredths(row["same"]),
        _with_interval(row, "kl", nats),
        hundredths(row["gap_closed"]),
        _with_interval(row, "kl_gap_closed", hundredths),
        _with_interval(row, "coverage", hundredths),
        _same_calls(row),
        f"{row['encoded']:,.0f}",
        milliseconds(row["ttft"]),
    ]


def _same_calls(row: Row) -> str:
    compared = row["compared_calls"]
    shown = (f"{role} {row['same_calls'][role]} of {num}".strip() for role, num in compared.items())
    return ", ".join(shown) or "–"


def _with_interval(row: Row, name: str, show: Any) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    shown: str = show(row[name])
    return shown if low is None else f"{shown} ({show(low)} to {show(high)})"


def _bars(title: str, rows: Sequence[Row], name: str, longest: float, show: Any) -> str:
    """Bars of the arms, each with a line from end to end of its interval."""
    lines = []
    for i, row in enumerate(rows):
        if row[name] is None:
            continue
        bar = f'<i class="value" style="width:{_share(row[name], longest)};background:{colour(i)}">'
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        if low is not None:
            start, length = _share(low, longest), _share(high - low, longest)
            bar += f'</i><i class="interval" style="left:{start};width:{length}">'
        lines.append(
            f'<div class="arm"><span>{text(row["arm"])}</span><span class="bartrack">{bar}</i>'
            f"</span><b>{show(row[name])}</b></div>"
        )
    return f"<figure><figcaption>{title}</figcaption>{''.join(lines)}</figure>" if lines else ""


def _frontier(rows: Sequence[Row]) -> str:
    """Picture of the distance to the text, else of the accuracy, by tokens encoded."""
    name = "kl" if any(row["kl"] is not None for row in rows) else "accuracy"
    points = [
        Point(row["arm"], row["encoded"], row[name], row[f"{name}_low"], row[f"{name}_high"], i)
        for i, row in enumerate(rows)
        if row[name] is not None
    ]
    axis = "KL to the text, nats per token" if name == "kl" else "accuracy"
    show = nats if name == "kl" else percent
    return frontier(points, axis, "tokens encoded per problem", show)


def _share(value: float, longest: float) -> str:
    return f"{100 * min(1.0, max(0.0, value / longest)):.2f}%"


# -- all sets ------------------------------------------------------------------------------------


def _transfer(sets: Sequence[Mapping[str, Any]]) -> str:
    """Table of the share that each adapter regains on each set, if there are several sets."""
    arms = dict.fromkeys(
        row["arm"] for one in sets for row in one["rows"] if row["kl_gap_closed"] is not None
        or row["gap_closed"] is not None
    )  # fmt: skip
    if len(sets) < 2 or not arms:
        return ""
    found = {(one["name"], row["arm"]): row for one in sets for row in one["rows"]}
    cells = [[arm, *(_regained(found.get((one["name"], arm))) for one in sets)] for arm in arms]
    about = "Of what choreography loses against the text: the share regained, in accuracy / in KL."
    head = ("arm", *(one["name"] for one in sets))
    return section("Transfer", note(about), table(head, cells))


def _regained(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{percent(row['gap_closed'])} / {percent(row['kl_gap_closed'])}"


def _curves(adapters: Sequence[Mapping[str, Any]]) -> str:
    """Pictures of the losses of trainings, where they were kept."""
    figures = [_curve(one) for one in adapters if any(one.get("curves", {}).values())]
    if not figures:
        return ""
    return section("Training", '<div class="charts">', *figures, "</div>")


def _curve(adapter: Mapping[str, Any]) -> str:
    curves = {name: points for name, points in adapter["curves"].items() if points}
    last = max(point[0] for points in curves.values() for point in points) or 1
    most = max(point[1] for points in curves.values() for point in points) or 1
    lines = "".join(
        f'<polyline stroke="{colour(i)}" points="{_points(points, last, most)}"/>'
        for i, points in enumerate(curves.values())
    )
    names = ", ".join(
        f'<b style="color:{colour(i)}">{text(name)}</b>' for i, name in enumerate(curves)
    )
    about = f"{text(adapter['arm'])} ({text(adapter['placement'])}): loss {names}"
    axis = f"{most:.3f} nats per token at the top, {last:g} steps to the right"
    return (
        f"<figure><figcaption>{about}</figcaption>"
        f'<svg class="curves" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{axis}">'
        f"{lines}</svg>{note(axis)}</figure>"
    )


def _points(points: Sequence[Sequence[float]], last: float, most: float) -> str:
    return " ".join(
        f"{_WIDTH * step / last:.1f},{_HEIGHT * (1 - loss / most):.1f}" for step, loss in points
    )


def _examples(one: Mapping[str, Any]) -> str:
    """Problems on which arms answer differently; those that some get right, some wrong, first."""
    differing = [
        problem
        for problem in one["problems"]
        if len({tuple(found["answers"]) for found in problem["arms"].values()}) > 1
    ]
    differing.sort(key=lambda p: len({found["is_right"] for found in p["arms"].values()}) < 2)
    parts = []
    for problem in differing[:_MAX_EXAMPLES]:
        expected = "; ".join(problem["expected"]) or "not known"
        cells = [
            (name, _mark(found["is_right"]), "\n\n".join(found["answers"]))
            for name, found in problem["arms"].items()
        ]
        parts += [
            f"<h3>{text(problem['id'])}</h3>",
            f'<div class="text">{text(problem["question"])}</div>',
            note(f"Expected: {expected}"),
            table(("arm", "", "answer"), cells),
        ]
    if not parts:
        return ""
    count = f"{len(differing)} of {len(one['problems'])} problems"
    title = f"Where arms differ: {text(one['name'])} <small>{count}</small>"
    return section(title, *parts)


def _mark(is_right: bool | None) -> str:
    return {True: "right", False: "wrong", None: ""}[is_right]
