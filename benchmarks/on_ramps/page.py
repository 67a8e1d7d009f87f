# SPDX-License-Identifier: Apache-2.0
"""The page of chats that name no messages, from their CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.stats import median, paired_ratio_interval
from benchmarks.harness.tables import table

FIRST_TOKEN_BAR = 30.0  # text / choreo, for prompts of at least LONG tokens
LONG = 5000
BLOCKS_BAR = 4.0  # text / choreo
Row = Mapping[str, str]


def section() -> str:
    """This benchmark's part of RESULTS.md."""
    parts = [*_retrieval(read_csv("on_ramps_retrieval")), *_agents(read_csv("on_ramps_agents"))]
    return "\n\n".join(["## Chats that name no messages", *parts]) if parts else ""


def first_token_ratio(rows: Sequence[Row]) -> tuple[float, tuple[float, float]]:
    """Text / choreo over the turns after the first one, with its interval."""
    text, choreo = (_times(rows, side) for side in ("text", "choreo"))
    return median(text) / median(choreo), paired_ratio_interval(text, choreo)


def blocks_ratio(rows: Sequence[Row]) -> float:
    """Text / choreo."""
    blocks = {row["side"]: int(row["kv_blocks"]) for row in rows}
    return blocks["text"] / blocks["choreo"]


def bars_reached(retrieval: Sequence[Row], agents: Sequence[Row]) -> bool:
    """Whether both ratios are what they should be; short prompts have no bar."""
    is_fast = not retrieval or not _is_long(retrieval)
    is_fast = is_fast or first_token_ratio(retrieval)[0] >= FIRST_TOKEN_BAR
    return is_fast and (not agents or blocks_ratio(agents) >= BLOCKS_BAR)


def _is_long(rows: Sequence[Row]) -> bool:
    return int(rows[0]["prompt_tokens"]) >= LONG


def _retrieval(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    ratio, (low, high) = first_token_ratio(rows)
    lines = [
        (
            side,
            f"{1e3 * float(_of(rows, side)[0]['first_token_s']):.0f}",
            f"{1e3 * median(_times(rows, side)):.0f}",
            f"{median(float(row['reused_tokens']) for row in _of(rows, side)[1:]):.0f}",
        )
        for side in ("text", "choreo")
    ]
    verdict = "not measured" if not _is_long(rows) else "reached"
    if _is_long(rows) and ratio < FIRST_TOKEN_BAR:
        verdict = "MISSED"
    return [
        "A retrieval bot: each turn is a chat over the same documents in another order, with a new "
        f"question, {rows[0]['prompt_tokens']} tokens. Milliseconds to the first token, from the "
        "messages of the chat on: of the first turn, and of those after it (median). *text*: over "
        'vLLM\'s prefix caching on the same engine; *choreo*: `choreo_auto: "choreo"`. '
        f"Ratio: **{ratio:.1f}×** [{low:.1f}, {high:.1f}]. Bar for {LONG} tokens and more: "
        f"{FIRST_TOKEN_BAR:.0f}: {verdict}.",
        table(["", "first turn", "others", "tokens reused"], lines),
        machine_line(rows),
    ]


def _agents(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    ratio = blocks_ratio(rows)
    verdict = "reached" if ratio >= BLOCKS_BAR else "MISSED"
    return [
        f"{rows[0]['agents']} agents with system texts of their own over one history of "
        f"{rows[0]['history_tokens']} tokens, one after the other: KV blocks that hold it at the "
        "end (text: those that its prefix cache would find again), and seconds for all of them. "
        f"Ratio of blocks: **{ratio:.1f}×**. Bar: {BLOCKS_BAR:.0f}: {verdict}.",
        table(
            ["", "KV blocks", "seconds"],
            [(row["side"], row["kv_blocks"], f"{float(row['seconds']):.1f}") for row in rows],
        ),
        machine_line(rows),
    ]


def _of(rows: Sequence[Row], side: str) -> list[Row]:
    return [row for row in rows if row["side"] == side]


def _times(rows: Sequence[Row], side: str) -> list[float]:
    return [float(row["first_token_s"]) for row in _of(rows, side)[1:]]
