# SPDX-License-Identifier: Apache-2.0
"""Pages that are drawn when they are written, without scripts, and how they write numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_choreo.transcript.templates import template_environment


def filled(template: str, values: Mapping[str, object]) -> str:
    """Fill a page that loads nothing from elsewhere.

    Args:
        template: name of a file beside this one, which extends `charts.html`.
        values: values by the names that the template has for them; `facts` is among them.
    """
    environment = template_environment(__package__)
    helpers = (percent, hundredths, signed, milliseconds, nats, whole, interval, colour)
    environment.globals |= {helper.__name__: helper for helper in helpers}
    return environment.get_template(template).render(values)


_COLOURS = ("#2f66b3", "#cf7a17", "#1f8a78", "#8a4bb0", "#b3372f", "#788090")


def colour(number: int) -> str:
    """Colour of an arm, by its number."""
    return _COLOURS[number % len(_COLOURS)]


def percent(share: float | None, sign: bool = False) -> str:
    """Write a share in per cent; a dash for None."""
    return hundredths(share, sign) + ("" if share is None else " %")


def hundredths(share: float | None, sign: bool = False) -> str:
    """Write a share times a hundred; a dash for None."""
    return "–" if share is None else f"{100 * share:{'+' if sign else ''}.1f}"


def signed(share: float | None) -> str:
    """Write a difference of shares in points; a dash for None."""
    return hundredths(share, sign=True)


def milliseconds(seconds: float | None) -> str:
    """Write seconds in milliseconds; a dash for None."""
    return "–" if seconds is None else f"{1000 * seconds:,.0f} ms"


def nats(value: float | None) -> str:
    """Write a divergence; a dash for None."""
    return "–" if value is None else f"{value:.4f}"


def whole(number: float) -> str:
    """Write a number without its fraction."""
    return f"{number:,.0f}"


def interval(row: Mapping[str, float | None], name: str, show: Callable[..., str] = nats) -> str:
    """Write a number of a row, with the ends of its interval if it has one."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    shown = show(row[name])
    return shown if low is None else f"{shown} ({show(low)} to {show(high)})"
