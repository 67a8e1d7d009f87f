# SPDX-License-Identifier: Apache-2.0
"""Arms of an evaluation: text, choreography, rules of repair, adapters, one direct call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_choreo.errors import AdapterError
from vllm_choreo.lab.cli.options import repair_of
from vllm_choreo.lab.study.arms import Arm
from vllm_choreo.lab.study.scores import CHOREOGRAPHED, TEXT
from vllm_choreo.trained_adapter import FILE_NAME, TrainedAdapter, uses_adapter

DIRECT = "direct"


def arms_of(
    adapters: Sequence[Path],
    distilled: Sequence[Path],
    placement: str | None,
    repairs: Sequence[str] = (),
    *,
    restates: bool = False,
) -> list[Arm]:
    """The arms of an evaluation, in the order in which they are shown.

    Args:
        adapters: folders of adapters that the workflow uses.
        distilled: folders of adapters that the one call in its place uses.
        placement: placement of adapters whose folders have no `choreo_train.json`.
        repairs: rules, as text.
        restates: add text and choreography that ask the question once more.

    Raises:
        RepairError: a text is no rule of a session.
        AdapterError: a folder is no adapter, or does not say which calls use it; or the one call
            would not use a distilled one.
    """
    arms = [Arm(TEXT, "baseline"), Arm(CHOREOGRAPHED, "choreo")]
    if restates:
        arms += [replace(arm, name=f"{arm.name}, restated", restates=True) for arm in arms]
    arms += [_repaired(text) for text in dict.fromkeys(repairs)]
    arms += [_adapted(path, placement, is_direct=False) for path in adapters]
    arms += [Arm(DIRECT, "baseline", is_direct=True)]
    arms += [_adapted(path, placement, is_direct=True) for path in distilled]
    names = [arm.name for arm in arms]
    for arm in arms:
        if names.count(arm.name) > 1:
            raise AdapterError(
                "two adapters have folders of this name: rename one",
                parameter="adapter",
                value=arm.adapter,
            )
    return arms


def _repaired(text: str) -> Arm:
    return Arm(f"repair {text}", "choreo", repair=repair_of(text))


def _adapted(path: Path, placement: str | None, *, is_direct: bool) -> Arm:
    trained = TrainedAdapter.load(path) if (path / FILE_NAME).exists() else None
    if trained is not None:
        placement = trained.placement
    if placement is None:
        raise AdapterError(
            f"there is no {FILE_NAME} in the folder, which would say which calls use the adapter: "
            "say --placement prefill, decode or both",
            parameter="adapter",
            value=str(path),
        )
    if is_direct and not uses_adapter(placement, generates=True):
        raise AdapterError(
            "the one call of direct generates, which calls with this adapter do not: train it with "
            "--placement decode or both",
            parameter="direct",
            value=str(path),
        )
    name = f"{DIRECT} + {path.name}" if is_direct else f"+ {path.name}"
    return Arm(name, "choreo", path, placement, trained, is_direct)
