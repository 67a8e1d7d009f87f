# SPDX-License-Identifier: Apache-2.0
"""Report of a call, which its result carries besides text."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm_choreo.engine.scheduler.scheduled_call import ScheduledCall
from vllm_choreo.store.encoding import Encoding


def report_of(call: ScheduledCall) -> dict[str, Any]:
    """Report of a call: id, length, position, and tokens by how they came to be."""
    plan = call.plan
    assert plan is not None
    num_copied = _take_unreported(call, call.parents)
    # A part of a message that was repaired at the seam was encoded behind the other part.
    behind = {encoding for parent in call.parents if parent.is_copy for encoding in parent.parents}
    num_encoded = num_copied + _take_unreported(call, behind.difference(call.parents))
    num_reused = sum(span.num_tokens for span in plan.parents) - num_copied
    return {
        "id": call.message.id,
        "num_tokens": call.encoding.num_tokens,
        "position": plan.new_offset,
        "exact": plan.exact,
        "reused_tokens": num_reused + call.num_shared,
        "repositioned_tokens": sum(
            span.num_tokens
            for span, parent in zip(plan.parents, call.parents, strict=True)
            if span.offset - span.start != _position(parent)
        ),
        "encoded_tokens": num_encoded + call.encoding.num_tokens - call.num_shared,
        "repaired_tokens": plan.repaired_tokens,
        "untrusted": any(parent.is_untrusted for parent in call.parents),
    }


def _take_unreported(call: ScheduledCall, encodings: Collection[Encoding]) -> int:
    """Take the number of tokens of copies encoded for this call; no later call reports them."""
    num_tokens = sum(encoding.num_unreported for encoding in encodings)
    params = call.request.sampling_params
    # With stop strings nobody reads the report, unless the client asks for it ("end").
    is_read = (call.params and call.params.open_end) or not (params and params.stop)
    if call.is_scheduled and is_read:
        for encoding in encodings:
            encoding.num_unreported = 0
    return num_tokens


def _position(encoding: Encoding) -> int | None:
    """Position at which token 0 was encoded; for a patch, that of its source."""
    plan = encoding.patch.source.plan if encoding.patch else encoding.plan
    return plan.new_offset if plan else None
