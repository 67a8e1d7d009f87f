# SPDX-License-Identifier: Apache-2.0
"""Digests by which encodings of messages are the same or not. Imports neither torch nor vllm."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from vllm_choreo.repair.layers import LayerRanges
from vllm_choreo.repair.runs import TokenRanges
from vllm_choreo.semantics.positions import CallPlan
from vllm_choreo.store.encoding import Adapter
from vllm_choreo.store.pictures import Picture


def encoding_digest(
    engine: bytes,
    tenant: str,
    adapter: Adapter | None,
    token_ids: Sequence[int],
    plan: CallPlan,
    parents: Sequence[bytes],
    patched: tuple[bytes, int, TokenRanges, LayerRanges | None] | None = None,
    nonce: bytes = b"",
    pictures: Sequence[Picture] = (),
) -> bytes:
    """Digest that is equal for encodings whose keys and values are the same, and for no others.

    Args:
        engine: bytes that all encodings of the engine share: model, revision, dtypes, rotation.
        tenant: encodings of two tenants are never the same, whatever they hold.
        adapter: the adapter that encodes it; its weights count, not its name.
        token_ids: tokens of the encoding.
        plan: its own position, and those of its parents.
        parents: digests of the parents, in order.
        patched: the digest of its source, the first token seen, the runs, and the layers, if it is
            a patch.
        nonce: random bytes of an untrusted encoding: no other has its digest, nor the digest of
            an encoding that reads it.
        pictures: pictures among its tokens: what they show counts, not that their tokens are equal.
    """
    digest = blake2b(digest_size=32)
    spans = [(span.start, span.stop, span.offset) for span in plan.parents]
    seen = [(picture.start, picture.num_tokens, picture.content) for picture in pictures]
    recipe = (plan.new_offset, spans, patched, plan.weights, *([seen] if seen else []))
    # Every part is preceded by its length, so that no two lists of parts read the same.
    for part in (
        engine,
        tenant.encode(),
        adapter.weights if adapter else b"",
        array("q", token_ids).tobytes(),
        repr(recipe).encode(),
        nonce,
        *parents,
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
