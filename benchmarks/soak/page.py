# SPDX-License-Identifier: Apache-2.0
"""The page of the soak, from its CSV file."""

from __future__ import annotations

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.tables import table

# What clients did and got.
COUNTED = (
    "prefill", "decode", "leave", "workflow", "exact", "free", "mistake", "unknown", "refused",
    "ordinary",
)  # fmt: skip


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV file."""
    rows = read_csv("soak")
    if not rows:
        return ""
    row = rows[0]
    return "\n\n".join(
        [
            "## Soak: a server under load and abuse",
            f"{row['clients']} clients for {row['seconds']} s, half of them choreographed, of two "
            f"tenants, over a pool of {row['pool_blocks']} blocks: room for a fifth of their "
            "messages. They leave in the middle of streams, name messages of others, send what is "
            "illegal, free and close. All answers are compared with the dense oracle.",
            table(
                ("what", "number"),
                [
                    (name.replace("_", " "), row[name])
                    for name in (*COUNTED, "evicted", "encoded_again", "tokens_checked")
                ],
            ),
            f"Wrong tokens: {row['wrong_tokens']}. Unexpected failures: {row['failures']}. Blocks "
            f"leaked: {row['blocks_leaked']}.",
            machine_line(rows),
        ]
    )
