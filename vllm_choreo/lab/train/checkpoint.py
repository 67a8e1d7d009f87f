# SPDX-License-Identifier: Apache-2.0
"""One file from which a training that was killed goes on, with the very same result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_choreo.errors import ChoreoError
from vllm_choreo.files import write_whole
from vllm_choreo.trained_adapter import current_placement

FORMAT = 1
FILE_NAME = "checkpoint.pt"


def random_states() -> dict[str, Any]:
    """States of the random generators that dropout draws from."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the random generators to the states of `random_states`."""
    torch.set_rng_state(states["cpu"])
    torch.cuda.set_rng_state_all(states["cuda"])


def save_checkpoint(folder: Path, identity: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Replace the checkpoint of a folder at once.

    Args:
        identity: all that the result depends on, as plain data.
        state: tensors and plain data.
    """
    content = {"format": FORMAT, "identity": dict(identity), "state": dict(state)}
    write_whole(folder / FILE_NAME, lambda part: torch.save(content, part))


def load_checkpoint(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state in a folder's checkpoint; None if there is no checkpoint.

    Raises:
        ChoreoError: the checkpoint is of another training, or damaged.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
        found, state = content["identity"], content["state"]
        settings = found["settings"]
        settings["placement"] = current_placement(settings["placement"])
    except Exception as error:  # what torch raises for a damaged file has no common base
        raise ChoreoError(
            f"the checkpoint cannot be read ({error}): remove it to train from the beginning",
            parameter="out",
            value=str(path),
        ) from error
    check_identity(folder, found, identity)
    loaded: dict[str, Any] = state
    return loaded


def check_identity(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that a folder's training is of the model, data, settings and versions that are wanted.

    Raises:
        ChoreoError: some of them differ.
    """
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    if differing:
        raise ChoreoError(
            f"the folder holds a training with other {', '.join(differing)}: choose another "
            "folder, or remove it",
            parameter="out",
            value=str(folder),
        )
