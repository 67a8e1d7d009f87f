# SPDX-License-Identifier: Apache-2.0
"""The tables of models with states."""

from __future__ import annotations

from benchmarks.harness.tables import (
    Cell,
    Row,
    Rows,
    Table,
    middle,
    of,
    over,
    paired_ratio,
    spread,
)
from benchmarks.states.bars import (
    FIRST_TOKEN_BAR,
    ORDINARY_BAR,
    against_stock,
    found_by_stock,
)


def _first(side: str) -> Cell:
    return spread(of("first_token_s", 1e3, side=side), ".0f")


def _first_token_bar(rows: Rows) -> str:
    return f"{FIRST_TOKEN_BAR:.0f}" if found_by_stock(rows[0]) == "nothing" else ""


def _rate(side: str) -> Cell:
    return spread(of("tokens_per_s", side=side), ".0f")


def _shared(row: Row) -> str:
    return f"{row['shared_tokens']} tokens"


def _cache(row: Row) -> str:
    return "a batch before" if int(row["is_warm"]) else "nothing"


CHAIN_TABLES = {
    "states": Table(
        "states",
        {"block of vLLM's": lambda row: str(row["block_size"]), "stock finds": found_by_stock},
        {
            "turns": lambda rows: len(of("turn", side="chain")(rows)),
            "tokens of the text": spread(of("text_tokens", side="chain"), ".0f"),
            "of which new": spread(of("new_tokens", side="chain"), ".0f"),
            "text / new": spread(
                over(of("text_tokens", side="chain"), of("new_tokens", side="chain")), ".1f"
            ),
            "found by stock": spread(of("reused_tokens", side="stock"), ".0f"),
            "first token, stock, ms": _first("stock"),
            "chain, ms": _first("chain"),
            "stock / chain": paired_ratio(
                of("first_token_s", side="stock"), of("first_token_s", side="chain"), ".1f"
            ),
            "bar": _first_token_bar,
        },
    ),
    "states_ordinary": Table(
        "states_ordinary",
        {"prompts share": _shared, "the cache has seen": _cache},
        {
            "tokens found of a batch, plugin": middle(of("cached_tokens", side="plugin"), ".0f"),
            "stock ": middle(of("cached_tokens", side="stock"), ".0f"),
            "plugin, tokens/s": _rate("plugin"),
            "stock": _rate("stock"),
            "plugin / stock": middle(against_stock(), ".3f"),
            "bar": lambda rows: str(ORDINARY_BAR),
        },
    ),
}
ORDER_TABLES = {
    "states_orders": Table(
        "states_orders",
        {"readers": lambda row: f"{row['readers']} of {row['documents']} documents"},
        {
            "tokens of a document": spread(of("document_tokens", side="stock"), ".0f"),
            "documents and readers, stock, s": spread(of("all_s", side="stock"), ".2f"),
            "composed, s": spread(of("all_s", side="composed"), ".2f"),
            "stock / composed": paired_ratio(
                of("all_s", side="stock"), of("all_s", side="composed"), ".1f"
            ),
            "last first token, stock, s": spread(of("first_token_s", side="stock"), ".2f"),
            "composed, s ": spread(of("first_token_s", side="composed"), ".2f"),
        },
    ),
    "states_quality": Table(
        "states_quality",
        {"model": lambda row: str(row["model"])},
        {
            "questions": lambda rows: len(rows),
            "KL per token against the text, nats": spread(of("kl_per_token"), ".4f"),
        },
    ),
}
TABLES = {**CHAIN_TABLES, **ORDER_TABLES}
