# SPDX-License-Identifier: Apache-2.0
"""Options with which an engine loads adapters, and a check that it can load one.

A worker that fails to load one ends the engine, and all messages with it: so it is checked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from vllm.config.lora import LoRAConfig, MaxLoRARanks
from vllm.lora.peft_helper import PEFTHelper

from vllm_choreo.errors import AdapterError


def check_loadable(folder: Path, lora_config: LoRAConfig) -> None:
    """Check that an engine can load an adapter.

    Args:
        folder: the adapter's folder, as PEFT writes it.
        lora_config: the engine's options of adapters.

    Raises:
        AdapterError: its rank is larger than the engine was started for, or it is of a kind that
            vLLM does not load.
    """
    try:
        _read(folder).validate_legal(lora_config)
    except ValueError as error:
        if isinstance(error, AdapterError):
            raise
        advice = (
            "Start the engine with max_lora_rank as large as the adapter's rank, or train another"
        )
        raise _unloadable_error(f"{error} {advice}", folder) from None


def engine_options(folders: Sequence[Path]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` with which an engine loads all of these adapters at once.

    Raises:
        AdapterError: one of them is no adapter.
    """
    if not folders:
        return {}
    rank = max(max([read.r, *read.rank_pattern.values()]) for read in map(_read, folders))
    ranks = [size for size in get_args(MaxLoRARanks) if size >= rank]
    return {
        "enable_lora": True,
        "max_loras": len(folders),
        "max_lora_rank": min(ranks, default=rank),  # vLLM refuses what is too large for it
    }


def _read(folder: Path) -> PEFTHelper:
    try:
        return PEFTHelper.from_local_dir(str(folder), None)
    except OSError as error:
        reason = f"{error.strerror}: {Path(error.filename).name}. Give a folder as PEFT writes it"
    except (ValueError, TypeError) as error:
        reason = str(error)
    raise _unloadable_error(reason, folder)


def _unloadable_error(reason: str, folder: Path) -> AdapterError:
    return AdapterError(
        f"vLLM does not load this adapter: {reason}", parameter="adapter", value=str(folder)
    )
