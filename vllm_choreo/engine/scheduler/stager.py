# SPDX-License-Identifier: Apache-2.0
"""Runs of some layers before a step, which no request of vLLM's does.

They write patches by layers, and let calls look at their parents.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.core.block_pool import BlockPool

from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.engine.step import StageRun, Watch, request_spans
from vllm_choreo.repair.layers import middle_layers
from vllm_choreo.store.block_copies import Block
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.groups import Blocks


class Stager:
    """Collection of the runs of layers of the step being planned.

    They come after copies and moves of blocks, and before the step itself. So all that they read
    must have been written in earlier steps, or by runs before them; and a call that reads what they
    write may be in the very step.
    """

    def __init__(self, call_table: CallTable, pool: BlockPool) -> None:
        self._call_table = call_table
        self._pool = pool
        self._runs: list[StageRun] = []
        self._written: set[Encoding] = set()
        self._held: list[Block] = []

    def is_ready(self, encoding: Encoding) -> bool:
        """Return whether a patch could be written before this step."""
        return self._are_written(encoding.recipe)

    def can_watch(self, call: ScheduledCall) -> bool:
        """Return whether a call needs to look at its parents and can, before this step."""
        wants = call.plan is None and call.watching is not None and not call.watching.is_staged
        if not wants or not self._are_written(call.parents):
            return False
        return all(parent.has(seen) for parent, seen in self._call_table.blocks.wanted(call))

    def add(self, encoding: Encoding) -> None:
        """Add the run that writes a placed patch, which counts as written from now on."""
        plan, patch, store = encoding.plan, encoding.patch, self._call_table.store
        assert plan is not None and patch is not None and patch.layers is not None
        ((start, stop),) = patch.runs
        tables = self._call_table.blocks.of_patch(encoding, stop)
        self._hold(tables)
        positions = [parent.stored_position for parent in encoding.parents]
        assert encoding.token_ids is not None
        self._runs.append(
            StageRun(
                layers=patch.layers.ranges,
                spans=request_spans(
                    *(plan, positions, store.block_size, patch.start, encoding.stored_position),
                    store.groups.windows,
                    start,
                ),
                blocks=_ids(tables),
                first=plan.base + start,
                token_ids=tuple(encoding.token_ids[start:stop]),
                key=self._key(patch.source) if patch.is_entering else None,
                start=start,
                lora=encoding.adapter.request if encoding.adapter else None,
            )
        )
        store.on_written(encoding, (start, stop))
        self._written.add(encoding)

    def num_scratch_blocks(self, call: ScheduledCall) -> int:
        """Number of blocks for a call's own tokens while it looks at its parents."""
        return self._call_table.store.groups.num_blocks(call.request.num_prompt_tokens)

    def watch(self, call: ScheduledCall) -> None:
        """Add the run in which a call looks at its parents; its keys and values are dropped."""
        hidden, watching, request = self._call_table.store.hidden, call.watching, call.request
        assert hidden is not None and watching is not None and request.prompt_token_ids is not None
        parents, store = watching.plan.parents, self._call_table.store
        tables = self._call_table.blocks.tables(zip(call.parents, parents, strict=True))
        self._hold(tables)
        scratch = self._pool.get_new_blocks(self.num_scratch_blocks(call))
        self._held += scratch
        of_each = len(scratch) // len(tables)
        tables = [
            [*blocks, *scratch[group * of_each : (group + 1) * of_each]]
            for group, blocks in enumerate(tables)
        ]
        layers = middle_layers(hidden.num_layers)
        positions = [parent.stored_position for parent in call.parents]
        adapter = call.encoding.adapter
        self._runs.append(
            StageRun(
                layers=((0, layers[-1] + 1),),
                spans=request_spans(
                    watching.plan, positions, store.block_size, windows=store.groups.windows
                ),
                blocks=_ids(tables),
                first=watching.plan.base,
                token_ids=tuple(request.prompt_token_ids),
                key=None,
                start=0,
                lora=adapter.request if adapter else None,
                watch=Watch(call.id, layers, tuple(span.num_tokens for span in parents)),
            )
        )
        watching.is_staged = True

    def take(self) -> tuple[StageRun, ...]:
        """Take the runs of the step that was planned, in their order."""
        runs, self._runs = tuple(self._runs), []
        self._pool.free_blocks(self._held)
        self._held = []
        self._written.clear()
        return runs

    def _are_written(self, encodings: Iterable[Encoding]) -> bool:
        """Return whether all encodings can be read before this step."""
        return all(
            e.is_resident and (e in self._written or self._call_table.store.is_settled(e))
            for e in encodings
        )

    def _hold(self, tables: Blocks) -> None:
        """Hold blocks until `take`: nobody else gets them, and no keys move there."""
        blocks = [block for of_group in tables for block in of_group if not block.is_null]
        self._pool.touch(blocks)
        self._held += blocks

    def _key(self, source: Encoding) -> int:
        hidden = self._call_table.store.hidden
        assert hidden is not None, "or the call would have been refused"
        key = hidden.find(source)
        assert key is not None, "or the source would be encoded again"
        return key


def _ids(tables: Blocks) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(block.block_id for block in of_group) for of_group in tables)
