# SPDX-License-Identifier: Apache-2.0
"""A static mask that was calibrated on a workflow: which blocks of which messages a call repairs.

Messages and calls go by their roles in the workflow (`role=`). Blocks are the policy's own, counted
from the first token of it that the call sees; the last one that is measured goes on to the end.

    {"format": 1, "workflow": "tree_of_thoughts", "model": {...}, "block": 16, "num_blocks": 16,
     "masks": {"vote": {"candidate": [0, 1], "ballot": [0]}, "answer": {...}}, "budget": 0.1,
     "measured": {...}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_choreo.errors import RepairError
from vllm_choreo.files import write_text
from vllm_choreo.repair.rules import ClippedRuns, Rule
from vllm_choreo.repair.runs import TokenRanges, joined
from vllm_choreo.trained_adapter import ModelIdentity

FORMAT = 1
_END = 2**31 - 1  # behind every message
_MODEL = ("name", "weights", "tokenizer")


@dataclass(frozen=True)
class Policy:
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
    """

    workflow: str
    model: ModelIdentity
    block: int
    num_blocks: int
    masks: Mapping[str, Mapping[str, tuple[int, ...]]]
    budget: float
    measured: Mapping[str, Any] = field(default_factory=dict)

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

    def to_json(self) -> dict[str, Any]:
        """Policy as plain data, as its file holds it."""
        masks = {
            role: {parent: list(blocks) for parent, blocks in of_role.items()}
            for role, of_role in self.masks.items()
        }
        return {"format": FORMAT, **asdict(self), "masks": masks}

    def save(self, path: Path) -> None:
        """Write the file; the old one or the new one if interrupted."""
        write_text(path, json.dumps(self.to_json(), ensure_ascii=False, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Read a policy from a file.

        Raises:
            RepairError: it cannot be read, or is no policy.
        """
        return cls.from_json(read_json(path))

    @classmethod
    def from_json(cls, data: Any) -> Policy:
        """Make a policy of the plain data that `to_json` returns.

        Raises:
            RepairError: it is of another format; names the place.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise _refused(f"a policy of format {FORMAT} is needed", found)
        model, masks = data.get("model"), data.get("masks")
        if not isinstance(model, Mapping) or any(type(model.get(k)) is not str for k in _MODEL):
            raise _refused(f"`model` of a policy has the texts {', '.join(_MODEL)}", model)
        for name in ("block", "num_blocks"):
            if type(data.get(name)) is not int or data[name] < 1:
                raise _refused(f"`{name}` of a policy is a whole number from 1 on", data.get(name))
        budget = data.get("budget")
        check_budget(budget)
        assert isinstance(budget, (int, float))
        return cls(
            workflow=str(data.get("workflow", "")),
            model=ModelIdentity(**{name: model[name] for name in _MODEL}),
            block=data["block"],
            num_blocks=data["num_blocks"],
            masks=_masks(masks, data["num_blocks"]),
            budget=float(budget),
            measured=dict(data.get("measured") or {}),
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
    return joined(
        (number * block, _END if number == num_blocks - 1 else (number + 1) * block)
        for number in blocks
    )


def read_json(path: str | Path) -> Any:
    """Read the JSON of a file that `repair=` names.

    Raises:
        RepairError: it cannot be read.
    """
    try:
        return json.loads(Path(path).expanduser().read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(f"the file cannot be read: {error}", str(path)) from error


def check_budget(share: Any) -> None:
    """Raise RepairError unless it is a share of tokens."""
    is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if not is_number or not 0 <= share <= 1:
        raise RepairError(
            "a budget is a share of the reused tokens, from 0 to 1", parameter="budget", value=share
        )


def _masks(data: Any, num_blocks: int) -> dict[str, dict[str, tuple[int, ...]]]:
    masks: dict[str, dict[str, tuple[int, ...]]] = {}
    for role, of_role in _items(data):
        masks[role] = {}
        for parent, blocks in _items(of_role):
            if not isinstance(blocks, list) or any(
                type(number) is not int or not 0 <= number < num_blocks for number in blocks
            ):
                raise _refused("`masks` of a policy hold numbers of blocks", blocks)
            masks[role][parent] = tuple(blocks)
    return masks


def _items(data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise _refused("`masks` of a policy go by the roles of calls and of parents", data)
    return data.items()


def _refused(reason: str, value: Any) -> RepairError:
    return RepairError(reason, parameter="repair", value=value)
