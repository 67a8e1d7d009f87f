# SPDX-License-Identifier: Apache-2.0
"""What is read under load has to be encoded by whoever reads it first."""

from __future__ import annotations

from benchmarks.harness.engine import BLOCK_SIZE
from benchmarks.variants.load import document_tokens


def test_no_document_begins_as_another_one_does() -> None:
    """Else stock prefix caching would find its beginning, and be faster than it is."""
    passes = [document_tokens(100, 1000, seed) for seed in (0, 1, 10_000)]
    documents = [document for some in passes for document in some]
    assert {len(document) for document in documents} == {1000}
    assert len({tuple(document[:BLOCK_SIZE]) for document in documents}) == len(documents) == 300
    assert passes[0] == document_tokens(100, 1000, 0)
