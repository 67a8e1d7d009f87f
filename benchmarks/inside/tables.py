# SPDX-License-Identifier: Apache-2.0
"""The tables of chats that are cut inside."""

from __future__ import annotations

from benchmarks.harness.tables import Cell, Table, middle, of, paired_ratio, text
from benchmarks.inside.bars import EDIT_BAR, SHARE_BAR, later


def _ms(side: str) -> Cell:
    return middle(lambda rows: [1e3 * value for value in later(side)(rows)], ".0f")


TABLES = {
    "inside_edits": Table(
        "inside_edits",
        {"chat": "chat", "tokens": "prompt_tokens"},
        {
            **{f"first token, {side}, ms": _ms(side) for side in ("text", "choreo")},
            "text / choreo": paired_ratio(later("text"), later("choreo"), ".1f"),
            "bar": lambda rows: f"{EDIT_BAR:.0f}",
            "reused tokens": middle(later("choreo", "reused_tokens"), ".0f"),
        },
    ),
    "inside_cost": Table(
        "inside_cost",
        {"tokens": "prompt_tokens"},
        {
            "first token as text, ms": middle(of("first_token_s", 1e3), ".0f"),
            "cut at messages, ms": middle(of("split_s", 1e3), ".2f"),
            "cut inside, ms": middle(of("cut_s", 1e3), ".2f"),
            "looked up, ms": middle(of("plan_s", 1e3), ".2f"),
            "share of cutting inside": middle(of("share"), ".2%"),
            "bar": lambda rows: f"{SHARE_BAR:.0%}",
        },
    ),
    "inside_index": Table(
        "inside_index",
        {"tokens": "tokens", "tokens of a piece": "piece_tokens"},
        {
            "MB, messages": middle(of("messages_mb"), ".1f"),
            "MB, pieces that may be read in parts": middle(of("pieces_mb"), ".1f"),
            "million tokens a core cuts in 1 s": middle(of("cut_tokens_per_s", 1e-6), ".1f"),
        },
    ),
    "inside_attack": Table(
        "inside_attack",
        {"attack": "attack", "way": "way"},
        {
            "KL, nats per token": middle(of("kl"), ".2g"),
            "largest difference of a log-probability": middle(of("largest"), ".2g"),
            "answer without": text("without"),
            "answer": text("answer"),
        },
    ),
}
