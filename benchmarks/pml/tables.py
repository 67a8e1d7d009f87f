# SPDX-License-Identifier: Apache-2.0
"""The tables of prompts from schemas: to the first token, answers, and memory."""

from __future__ import annotations

from benchmarks.harness.tables import Table, middle, of, paired_ratio, stored, text

SIDES = ("text", "same text", "cached", "from host", "first")
WAYS = ("text", "cached", "cached behind the instruction", "cached, scaffold", "exact")
FIRST_TOKEN, ANSWERS, MEMORY = "pml_first_token", "pml_answers", "pml_memory"
# Ends the names of what is measured on documents of files.
FILES = "_files"
_FIRST_TOKEN = Table(
    FIRST_TOKEN,
    {"tokens": "document_tokens", "in flight": "in_flight"},
    {
        **{f"{side}, ms": middle(of("median_s", 1e3, side=side), ".0f") for side in SIDES},
        "text / cached": paired_ratio(
            of("median_s", side="text"), of("median_s", side="cached"), ".1f"
        ),
    },
)
_ANSWERS = Table(
    ANSWERS,
    {"task, right in %": "task"},
    {
        **{way: stored("score", ".0f", 100, way=way) for way in WAYS},
        "minus text, cached": stored("difference", ".0f", 100, way="cached"),
        "behind the instruction": stored("difference", ".0f", 100, way=WAYS[2]),
        "of": text("n"),
    },
)
TABLES = {
    FIRST_TOKEN: _FIRST_TOKEN,
    ANSWERS: _ANSWERS,
    FIRST_TOKEN + FILES: _FIRST_TOKEN._replace(
        file=FIRST_TOKEN + FILES, lines={"documents of": "data", **_FIRST_TOKEN.lines}
    ),
    ANSWERS + FILES: _ANSWERS._replace(file=ANSWERS + FILES),
    MEMORY: Table(
        MEMORY,
        {"MB of a token, 16 bits": "model"},
        {
            "the paper": text("paper_mb"),
            "a key head a query head": text("all_heads_mb"),
            "as stored": text("stored_mb"),
        },
    ),
}
