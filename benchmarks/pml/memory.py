# SPDX-License-Identifier: Apache-2.0
"""Bytes that a cached token takes, by model, from configurations alone: Table 2 of *Prompt Cache*.

    python -m benchmarks.pml.memory [MODEL ...]

A key and a value of each layer and key head, 16 bits each. The paper counts a key head for every
query head; models with grouped queries store fewer, in the last column. MODEL is a folder or
a name that transformers knows, in place of the paper's models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.pml.tables import MEMORY, TABLES

_BYTES = 2  # of a number of 16 bits
_MIB = 2**20


class Shape(NamedTuple):
    """Sizes of a model's attention; `paper_mb` is what the paper says of a token, 0: nothing."""

    model: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    paper_mb: float = 0.0

    @property
    def paper_bytes(self) -> int:
        """Bytes of a token with a key head for every query head, as the paper counts."""
        return 2 * _BYTES * self.num_layers * self.num_heads * self.head_size

    @property
    def token_bytes(self) -> int:
        """Bytes of a token as it is stored."""
        return 2 * _BYTES * self.num_layers * self.num_kv_heads * self.head_size


# As their configurations say.
PAPER = (
    Shape("BERT", 12, 12, 12, 64, 0.03),
    Shape("Falcon 1B", 24, 32, 32, 64, 0.18),
    Shape("Llama 7B", 32, 32, 32, 128, 0.50),
    Shape("Llama 13B", 40, 40, 40, 128, 0.78),
    Shape("MPT 30B", 48, 64, 64, 112, 1.31),
    Shape("Falcon 40B", 60, 128, 8, 64, 1.87),
    Shape("Llama 70B", 80, 64, 8, 128, 2.5),
    Shape("Falcon 180B", 80, 232, 8, 64, 4.53),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    args = parser.parse_args()
    shapes = [_shape(model) for model in args.models] or PAPER
    write_csv(MEMORY, rows_of(shapes), **record())
    print(as_text([TABLES[MEMORY]]))
    return 0


def rows_of(shapes: Iterable[Shape]) -> list[dict[str, Any]]:
    """A row a model."""
    return [
        {
            "model": shape.model,
            "paper_mb": shape.paper_mb or "",
            "all_heads_mb": round(shape.paper_bytes / _MIB, 4),
            "stored_mb": round(shape.token_bytes / _MIB, 4),
        }
        for shape in shapes
    ]


def shape_of(model: str, config: Any) -> Shape:
    """Sizes from a configuration of transformers."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Shape(model, config.num_hidden_layers, heads, kv_heads, size)


def _shape(model: str) -> Shape:
    from transformers import AutoConfig

    return shape_of(model.rstrip("/").rpartition("/")[2], AutoConfig.from_pretrained(model))


if __name__ == "__main__":
    sys.exit(main())
