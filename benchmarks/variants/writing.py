# SPDX-License-Identifier: Apache-2.0
"""What another model has encoded, in a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness.engine import BLOCK_SIZE, start_choreo_engine
from benchmarks.variants.load import document_tokens


def write_documents(
    model: str, folder: Path, count: int, num_tokens: int, layers: Iterable[int]
) -> None:
    """Encode documents by an engine of this process, which ends, and save them.

    Args:
        model: the writer.
        folder: that is made.
        layers: whose hidden states are kept.
    """
    from vllm_choreo import Choreography
    from vllm_choreo.cli.engine import stop_engine

    memory = {"choreo": {"hidden_memory_gib": 2.0}}
    llm = start_choreo_engine(4, model=model, block_size=BLOCK_SIZE, additional_config=memory)
    try:
        with Choreography(llm) as c:
            calls = [
                {"tokens": text, "keep_hidden": sorted(layers)}
                for text in document_tokens(count, num_tokens, 0)
            ]
            c.save(c.prefill(calls), folder, encodings=True, progress=False)
    finally:
        stop_engine(llm)
