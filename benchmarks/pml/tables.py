# SPDX-License-Identifier: Apache-2.0
"""The tables of prompts from schemas: to the first token, and answers."""

from __future__ import annotations

from benchmarks.harness.tables import Table, middle, of, paired_ratio, stored, text

SIDES = ("text", "same text", "cached", "from host", "first")
WAYS = ("text", "cached", "cached behind the instruction", "cached, scaffold", "exact")
TABLES = {
    "pml_first_token": Table(
        "pml_first_token",
        {"tokens": "document_tokens", "in flight": "in_flight"},
        {
            **{f"{side}, ms": middle(of("median_s", 1e3, side=side), ".0f") for side in SIDES},
            "text / cached": paired_ratio(
                of("median_s", side="text"), of("median_s", side="cached"), ".1f"
            ),
        },
    ),
    "pml_answers": Table(
        "pml_answers",
        {"task, right in %": "task"},
        {
            **{way: stored("score", ".0f", 100, way=way) for way in WAYS},
            "minus text, cached": stored("difference", ".0f", 100, way="cached"),
            "behind the instruction": stored("difference", ".0f", 100, way=WAYS[2]),
            "of": text("n"),
        },
    ),
}
