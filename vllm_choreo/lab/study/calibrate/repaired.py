# SPDX-License-Identifier: Apache-2.0
"""A facade that chooses call by call what is repaired, and keeps what each call read and took."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_choreo.api.facade_wrapper import FacadeWrapper, Item
from vllm_choreo.api.protocol import Facade
from vllm_choreo.repair.calibration import Key, ReadParent
from vllm_choreo.repair.policy import block_runs
from vllm_choreo.repair.rules import ClippedRuns
from vllm_choreo.semantics.message import Message

# From the role of a call and what it reads to what is repaired; None: what the session does.
Choose = Callable[[str, Sequence[ReadParent]], frozenset[Key] | None]


@dataclass(frozen=True)
class RepairedCall:
    """A call that was made: its role, its parents, what was chosen, and its message."""

    role: str
    parents: tuple[ReadParent, ...]
    chosen: frozenset[Key] | None
    message: Message


class Repaired(FacadeWrapper):
    """A `Facade` that hands calls to `c` with `repair=` as chosen; parents are whole messages.

    Args:
        c: a facade, in any mode.
        choose: see `Choose`; None: the session's own rule.
        block, num_blocks: tokens of a block, and blocks of a message, as in a `Policy`.

    Attributes:
        calls: calls that were made, in order.
    """

    def __init__(self, c: Facade, choose: Choose | None, block: int, num_blocks: int) -> None:
        super().__init__(c)
        self.calls: list[RepairedCall] = []
        self._choose = choose
        self._block, self._num_blocks = block, num_blocks

    def _prefill(self, calls: list[Item]) -> Sequence[Message]:
        return self._repaired(super()._prefill, calls)

    def _decode(self, calls: list[Item]) -> Sequence[Message]:
        return self._repaired(super()._decode, calls)

    def _repaired(
        self, make: Callable[[list[Item]], Sequence[Message]], calls: list[Item]
    ) -> Sequence[Message]:
        read = [_read(call.get("parents") or ()) for call in calls]
        chosen = [
            self._choose(call.get("role") or "", parents) if self._choose and parents else None
            for call, parents in zip(calls, read, strict=True)
        ]
        messages = make(
            [
                call if keys is None else {**call, "repair": self._rule(parents, keys)}
                for call, parents, keys in zip(calls, read, chosen, strict=True)
            ]
        )
        for call, parents, keys, message in zip(calls, read, chosen, messages, strict=True):
            self.calls.append(RepairedCall(call.get("role") or "", parents, keys, message))
        return messages

    def _rule(self, parents: Sequence[ReadParent], keys: frozenset[Key]) -> dict[str, Any]:
        runs = (
            block_runs(
                [key.block for key in keys if key.parent == parent.role],
                self._block,
                self._num_blocks,
            )
            for parent in parents
        )
        return ClippedRuns(tuple(runs)).to_json()


def _read(parents: Sequence[Message]) -> tuple[ReadParent, ...]:
    found: list[ReadParent] = []
    are_right = True
    for number, parent in enumerate(parents):
        before = [message.id for message in parents[:number]]
        are_right = are_right and [span.id for span in parent.parents] == before
        found.append(ReadParent(parent.role or "", parent.num_tokens, are_right))
    return tuple(found)


def policy_choice(masks: Mapping[str, Mapping[str, Sequence[int]]]) -> Choose:
    """The choice of a policy with these masks."""

    def choose(role: str, parents: Sequence[ReadParent]) -> frozenset[Key]:
        return frozenset(
            Key(role, parent.role, block)
            for parent in parents
            for block in masks[role][parent.role]
        )

    return choose
