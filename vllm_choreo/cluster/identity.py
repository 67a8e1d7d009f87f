# SPDX-License-Identifier: Apache-2.0
"""Identity of an engine: what all engines of a fleet must have in common, and their sizes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine import fleet_client
from vllm_choreo.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Numbers of a KV cache that an engine finds out when it starts, by their names in `CacheConfig`.
CACHE_NUMBERS = (
    *("num_gpu_blocks", "block_size", "mamba_block_size", "kv_cache_size_tokens"),
    *("kv_cache_max_concurrency", "effective_attention_block_size"),
)


def identity_of(config: VllmConfig) -> dict[str, str]:
    """All that makes two engines give the same answers, by name, as text.

    "" is what is not known here: the weights, where there are no files of them.
    """
    model = config.model_config
    replaceable = fleet_client.identity_of(model.model)
    architecture = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    settings = repr(ChoreoConfig.from_vllm(config))  # a secret of the operator's is among them
    return {
        **replaceable,
        "model": str(model.model),
        "weights": replaceable["model"],
        "revision": str(model.revision),
        "architecture": _digest(architecture),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "max_model_len": str(model.max_model_len),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "choreo": _digest(settings),
    }


@dataclass(frozen=True)
class EngineInfo:
    """An engine, as it describes itself.

    Attributes:
        replica: id of its replica.
        identity: see `identity_of`.
        cache: numbers of its KV cache, by their names in vLLM's `CacheConfig`.
        machine: name of its machine since that was started: what has the same one has its clock.
        clock: `time.monotonic` there, in seconds, when it described itself.
    """

    replica: str
    identity: Mapping[str, str]
    cache: Mapping[str, object]
    machine: str = ""
    clock: float = 0.0


def this_machine() -> str:
    """Name of this machine since it was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def digest_of(identity: Mapping[str, str]) -> str:
    """A short name of an identity."""
    return _digest(json.dumps(identity, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_identity(ours: Mapping[str, str], theirs: EngineInfo) -> None:
    """Check that an engine is one of this fleet, as far as both are known.

    Raises:
        UnsupportedOptionError: it has another model, other settings or another version.
    """
    for name, value in ours.items():
        found = theirs.identity.get(name)
        if found != value and found != "" and value:
            raise UnsupportedOptionError(
                f"all engines of a fleet have the same {name}, here {value!r}: deploy them "
                "together with their ingress, as one application, or take this one out",
                parameter=f"engine.{name}",
                value=f"{found!r} of replica {theirs.replica}",
            )
