# SPDX-License-Identifier: Apache-2.0
"""The bar of training: what an adapter has won back."""

from __future__ import annotations

from collections.abc import Mapping

Row = Mapping[str, str]


def is_won_back(row: Row, text: Row) -> bool:
    """Check whether an arm has won back what choreography loses.

    Its answers are not significantly fewer than the text's, or cover as much as its interval has,
    and three quarters of the distance to it are gone where it was measured.
    """
    if row["difference"]:
        fewer = float(row["difference"]) < 0 and float(row["p_value"]) < 0.05
    else:
        fewer = bool(row["coverage"]) and float(row["coverage"]) < float(text["coverage_low"])
    is_near = not row["kl_gap_closed"] or float(row["kl_gap_closed"]) >= 0.75
    return is_near and not fewer
