# SPDX-License-Identifier: Apache-2.0
"""A static mask that was calibrated on a workflow: which blocks of which messages a call repairs.

Messages and calls go by their roles in the workflow (`role=`). Blocks are the policy's own, counted
from the first token of it that the call sees; the last one that is measured goes on to the end.

    {"by": "policy", "format": 1, "workflow": "tree_of_thoughts", "model": {...}, "block": 16,
     "num_blocks": 16, "masks": {"vote": {"candidate": [0, 1], "ballot": [0]}, "answer": {...}},
     "budget": 0.1, "measured": {...}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from vllm_choreo.convert import convert
from vllm_choreo.errors import RepairError
from vllm_choreo.repair.measured_file import MeasuredFile
from vllm_choreo.repair.rules import ClippedRuns, Rule
from vllm_choreo.repair.runs import TokenRanges, merge_ranges
from vllm_choreo.trained_adapter import ModelIdentity

_END = 2**31 - 1  # behind every message
_Count = Annotated[int, Meta(ge=1, description="a whole number from 1 on is needed")]
_Block = Annotated[int, Meta(ge=0, description="`masks` of a policy hold numbers of blocks")]
_Masks = Annotated[
    Mapping[str, Mapping[str, tuple[_Block, ...]]],
    Meta(description="`masks` of a policy go by the roles of calls and of parents"),
]
_Budget = Annotated[
    float, Meta(ge=0, le=1, description="a budget is a share of the reused tokens, from 0 to 1")
]
_Model = Annotated[
    ModelIdentity,
    Meta(description="`model` of a policy has the texts name, weights, tokenizer"),
]


class Policy(MeasuredFile, frozen=True, tag="policy"):
    """Blocks that the calls of a workflow repair.

    Attributes:
        workflow: name of the workflow on which it was calibrated, for people.
        model: the model with which it was calibrated.
        block: tokens of a block.
        num_blocks: how many blocks a message has; the last one is all that is left.
        masks: numbers of the blocks, by role of the call and by role of the parent. All roles of
            the workflow are there.
        budget: the share of reused tokens that it was to encode at most.
        measured: findings of the calibration, by name, for people.
        format: version of this form.
    """

    workflow: str
    model: _Model
    block: _Count
    num_blocks: _Count
    masks: _Masks
    budget: _Budget
    measured: Mapping[str, Any] = {}
    format: Annotated[Literal[1], Meta(description="a policy of format 1 is needed")] = 1

    def __post_init__(self) -> None:
        for of_role in self.masks.values():
            for blocks in of_role.values():
                if any(number >= self.num_blocks for number in blocks):
                    raise RepairError(
                        f"`masks` of a policy hold numbers of its {self.num_blocks} blocks",
                        parameter="repair.masks",
                        value=blocks,
                    )

    def rule(self, role: str | None, parents: Sequence[str | None]) -> Rule:
        """Rule by which a call repairs.

        Args:
            role: role of the call.
            parents: the role of each parent.

        Raises:
            RepairError: a role that the workflow does not have, or none.
        """
        masks = self.masks.get(role or "")
        if masks is None:
            raise self._unknown("call", role, self.masks)
        runs = []
        for parent in parents:
            if parent is None or parent not in masks:
                raise self._unknown(f"parent of a {role}", parent, masks)
            runs.append(block_runs(masks[parent], self.block, self.num_blocks))
        return ClippedRuns(tuple(runs))

    def check_model(self, served: ModelIdentity) -> None:
        """Raise RepairError unless weights and tokenizer are those of the calibration."""
        if not self.model.same_as(served):
            raise RepairError(
                f"the policy was calibrated with {self.model.name}; weights or tokenizer of the "
                f"model that is served, {served.name}, are others: calibrate with that one",
                parameter="repair",
                value=self.workflow,
            )

    def _unknown(self, what: str, role: str | None, known: Mapping[str, Any]) -> RepairError:
        return RepairError(
            f"the policy was calibrated on {self.workflow}, where the role of a {what} is one of "
            f"{', '.join(known)}: run that workflow, say role=, or calibrate this one",
            parameter="repair",
            value=role,
        )


def block_runs(blocks: Sequence[int], block: int, num_blocks: int) -> TokenRanges:
    """Tokens of some blocks of a message, however long it is."""
    return merge_ranges(
        (number * block, _END if number == num_blocks - 1 else (number + 1) * block)
        for number in blocks
    )


def check_budget(share: object) -> None:
    """Raise RepairError unless it is a share of tokens."""
    convert(share, _Budget, "budget", RepairError)
