# SPDX-License-Identifier: Apache-2.0
"""The table of engines behind Ray Serve."""

from __future__ import annotations

from benchmarks.harness.tables import Row, Table, middle, of, over, text

MODELS = ("tiny", "embedded")
POLICIES = ("two choices", "prefix affinity", "choreo")


def _size(row: Row) -> str:
    return f"{row['engines']} engines, {row['sessions']} sessions, {row['at_once']} at once"


TABLES = {
    "serve": Table(
        "serve",
        {"placement": "policy", "model": "model", "size": _size},
        {
            "encoded / prompt": middle(over(of("encoded_tokens"), of("prompt_tokens")), ".3f"),
            "first token p50, ms": text("ttft_p50_ms"),
            "first token p95, ms": text("ttft_p95_ms"),
            "all sessions, s": text("seconds"),
            "wrong answers": text("wrong_answers"),
            "load average": text("load"),
        },
    ),
}
