# SPDX-License-Identifier: Apache-2.0
"""What makes the encoding of a message the same as another's. Imports neither torch nor vllm."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from vllm_choreo.semantics.positions import CallPlan


def recipe_digest(
    engine: bytes,
    tenant: str,
    adapter: Any,
    token_ids: Sequence[int],
    plan: CallPlan,
    parents: Sequence[bytes],
) -> bytes:
    """A digest that is equal for messages whose keys and values are the same, and for no others.

    Args:
        engine: what all messages of the engine have in common: model, revision, dtypes, rotation.
        tenant: messages of two tenants are never the same, whatever they hold.
        adapter: vLLM's LoRA request, or None.
        token_ids: of the message.
        plan: where it stands, and where it sees its parents.
        parents: their digests.
    """
    digest = blake2b(digest_size=32)
    lora = (adapter.lora_name, adapter.lora_int_id, adapter.lora_path) if adapter else None
    spans = [(span.start, span.stop, span.offset) for span in plan.parents]
    # Every part is preceded by its length, so that no two lists of parts read the same.
    for part in (
        engine,
        tenant.encode(),
        repr(lora).encode(),
        array("q", token_ids).tobytes(),
        repr((plan.new_offset, spans)).encode(),
        *parents,
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
