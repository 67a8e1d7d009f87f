# SPDX-License-Identifier: Apache-2.0
"""Patches by layers are written before a step: no request of vLLM's runs a part of the layers."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.block_pool import BlockPool

from vllm_choreo.engine.scheduler.call_book import CallBook
from vllm_choreo.engine.step import StageRun, request_spans
from vllm_choreo.store.encoding import Encoding


class Stager:
    """Collects the runs of layers of the step being planned.

    They come after copies and moves of blocks, and before the step itself. So all that they read
    must have been written in earlier steps, or by runs before them; and a call that reads what they
    write may be in the very step.
    """

    def __init__(self, book: CallBook, pool: BlockPool) -> None:
        self._book = book
        self._pool = pool
        self._runs: list[StageRun] = []
        self._written: set[Encoding] = set()
        self._held: list[Any] = []

    def is_ready(self, encoding: Encoding) -> bool:
        """Whether a patch could be written before this step."""
        return all(
            e.is_resident and (e in self._written or self._book.store.is_settled(e))
            for e in encoding.recipe
        )

    def add(self, encoding: Encoding) -> None:
        """Have a patch written that has its place. It counts as written from now on."""
        plan, patch, store = encoding.plan, encoding.patch, self._book.store
        assert plan is not None and patch is not None and patch.layers is not None
        ((start, stop),) = patch.runs
        blocks = self._book.patch_blocks(encoding, stop)
        # Until the step has been planned nobody else gets these blocks, nor are keys moved there.
        self._pool.touch(blocks)
        self._held += blocks
        positions = [parent.stored_position for parent in encoding.parents]
        assert encoding.token_ids is not None
        self._runs.append(
            StageRun(
                layers=patch.layers.ranges,
                spans=request_spans(
                    plan, positions, store.block_size, patch.start, encoding.stored_position
                ),
                blocks=tuple(block.block_id for block in blocks),
                first=plan.base + start,
                token_ids=tuple(encoding.token_ids[start:stop]),
                key=self._key(patch.source) if patch.layers.entries else None,
                start=start,
                share=patch.layers.share,
                lora=encoding.adapter.request if encoding.adapter else None,
            )
        )
        store.written(encoding, (start, stop))
        self._written.add(encoding)

    def take(self) -> tuple[StageRun, ...]:
        """The runs of the step that was planned, in their order."""
        runs, self._runs = tuple(self._runs), []
        self._pool.free_blocks(self._held)
        self._held = []
        self._written.clear()
        return runs

    def _key(self, source: Encoding) -> int:
        hidden = self._book.store.hidden
        assert hidden is not None, "or the call would have been refused"
        return hidden.key(source)
