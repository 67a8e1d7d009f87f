# SPDX-License-Identifier: Apache-2.0
"""`CallSpec` -> the JSON of a call, which `server/call_reader.py` reads into a `CallSpec` again."""

from __future__ import annotations

from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call import BY_PAIR, CallSpec, Tokenized
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.wire.pictures import pictures_json
from vllm_choreo.wire.sampling import sampling_fields


def call_json(spec: CallSpec) -> dict[str, Any]:
    """The call as JSON; what was not given is left out.

    Raises:
        ChoreoError: an option of the wrong type or number, or one that JSON cannot carry.
    """
    params = spec.params()  # refuses offsets and sub-spans, as the engine would
    call = {
        "type": spec.kind,
        **_content_json(spec),
        "multi_modal_data": spec.multi_modal_data and pictures_json(spec.multi_modal_data),
        "parents": [_span_json(span) for span in params.parents] or None,
        "offsets": None if params.offsets is None else list(params.offsets),
        "new_offset": params.new_offset,
        "save_as": spec.save_as,
        "mode": spec.mode,
        "deny": list(params.deny) or None,
        "adapter": adapter_name(spec.adapter),
        "repair": BY_PAIR if spec.repair == BY_PAIR else params.repair and params.repair.to_json(),
        "keep_hidden": None if spec.keep_hidden is None else list(params.keep_hidden),
        "role": spec.role,
        "sampling_params": sampling_fields(spec.sampling_params),
    }
    return {key: value for key, value in call.items() if value is not None}


def adapter_name(given: object) -> str | None:
    """The name by which a server knows an adapter; of a `LoRARequest` its own.

    Raises:
        ChoreoError: neither.
    """
    name = given if given is None or isinstance(given, str) else getattr(given, "lora_name", None)
    if given is not None and not (isinstance(name, str) and name):
        raise ChoreoError(
            "an adapter is named as the server knows it", parameter="adapter", value=given
        )
    return name


def _content_json(spec: CallSpec) -> dict[str, Any]:
    """The new tokens: text, token ids, or the message whose tokens are taken."""
    content = spec.content
    if isinstance(content, ParentSpan):
        return {"copy_of": _span_json(content)}
    if isinstance(content, Tokenized):
        return {"content": list(content.token_ids)}
    return {"content": content if isinstance(content, str) else list(content)}


def _span_json(span: ParentSpan) -> str | dict[str, Any]:
    """An id alone, or with the ends that were given."""
    given = {key: end for key, end in span._asdict().items() if end is not None}
    return given if len(given) > 1 else span.id
