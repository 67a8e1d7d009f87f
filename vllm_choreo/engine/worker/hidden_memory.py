# SPDX-License-Identifier: Apache-2.0
"""Hidden states that a worker has in host memory, as the scheduler says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from vllm_choreo.engine.step import HiddenCapture
from vllm_choreo.engine.worker.span_batcher import StepBatch


class HiddenMemory:
    """Rows of messages, by key and layer, in blocks that are made as the messages grow.

    Args:
        block_size: rows of a block; a block holds rows of one message.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._requests: dict[str, HiddenCapture] = {}
        # Each block is `[block_size, hidden_size]`, of the model's dtype.
        self._blocks: dict[tuple[int, int], list[torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(b.numel() * b.element_size() for of_key in self._blocks.values() for b in of_key)

    def update(self, captures: Mapping[str, HiddenCapture], finished: Iterable[str]) -> None:
        """Take in a step: captures of its requests, and ids of those that ended."""
        for request_id in finished:
            self._requests.pop(request_id, None)
        self._requests.update(captures)

    def forget(self, forgotten: Iterable[int]) -> None:
        """Drop the hidden states of these keys."""
        gone = set(forgotten)
        for name in [name for name in self._blocks if name[0] in gone]:
            del self._blocks[name]

    def layers_of(self, request_ids: Iterable[str]) -> list[int]:
        """Layers, ascending, of which hidden states of any of the requests are captured."""
        found = (self._requests.get(request_id) for request_id in request_ids)
        return sorted({layer for capture in found if capture for layer in capture.layers})

    def capture(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, step: StepBatch
    ) -> None:
        """Capture the hidden states that a layer was given in a step.

        Args:
            hidden: `[num_rows, hidden_size]`; rows behind the last request's are padding.
            positions: `[..., num_rows]`, as the model saw them.
        """
        ends = step.query_start_loc.tolist()
        for i, request_id in enumerate(step.request_ids):
            capture = self._requests.get(request_id)
            if capture is None or layer not in capture.layers or ends[i] == ends[i + 1]:
                continue
            first = int(positions.reshape(-1, positions.shape[-1])[0, ends[i]]) - capture.origin
            self.put(capture.key, layer, first, hidden[ends[i] : ends[i + 1]].cpu())

    def rows(self, key: int, layer: int, start: int, stop: int) -> torch.Tensor:
        """Hidden states of tokens `start … stop-1`, `[stop - start, hidden_size]`."""
        size, blocks = self._block_size, self._blocks[key, layer]
        part = torch.cat(blocks[start // size : -(-stop // size)])
        first = start % size
        return part[first : first + stop - start]

    def put(self, key: int, layer: int, start: int, rows: torch.Tensor) -> None:
        """Store the hidden states of tokens from `start` on, `[num_tokens, hidden_size]`."""
        blocks, size = self._blocks.setdefault((key, layer), []), self._block_size
        while len(blocks) * size < start + len(rows):
            blocks.append(rows.new_empty(size, rows.shape[1]))
        done = 0
        while done < len(rows):
            block, offset = divmod(start + done, size)
            count = min(size - offset, len(rows) - done)
            blocks[block][offset : offset + count] = rows[done : done + count]
            done += count
