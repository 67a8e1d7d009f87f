# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters as JSON, without importing vllm."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from vllm_choreo.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from vllm import SamplingParams

# The fields of `vllm.SamplingParams` that a server takes.
SENT = frozenset(
    "max_tokens min_tokens temperature top_p top_k min_p seed presence_penalty frequency_penalty "
    "repetition_penalty stop stop_token_ids include_stop_str_in_output ignore_eos bad_words "
    "allowed_token_ids logit_bias logprobs logprob_token_ids skip_special_tokens "
    "spaces_between_special_tokens structured_outputs repetition_detection thinking_token_budget "
    "extra_args n prompt_logprobs".split()
)
# Those that follow from others, or that every engine sets for itself.
_IGNORED = frozenset(("output_kind", "output_text_buffer_length", "skip_clone"))
# For "until the context is full", which a server does not have: no context is as long.
_NO_LIMIT = 2**31 - 1


def sampling_fields(given: object) -> dict[str, Any] | None:
    """Sampling parameters as JSON carries them: the fields that are not vLLM's defaults.

    Args:
        given: `vllm.SamplingParams`, a dict of their fields, or None.

    Raises:
        UnsupportedOptionError: neither, or a field that servers do not take or JSON cannot carry.
    """
    if given is None:
        return None
    if isinstance(given, Mapping):
        fields = dict(given)
    elif _is_sampling_params(given):
        fields = _changed_fields(given)
    else:
        raise UnsupportedOptionError(
            "sampling_params must be vllm.SamplingParams or a dict of their fields; beam search "
            "does not make one message per call",
            parameter="sampling_params",
            value=given,
        )
    for name, value in fields.items():
        _check_json(str(name), value)
    if "max_tokens" in fields and fields["max_tokens"] is None:
        fields["max_tokens"] = _NO_LIMIT
    return fields


def _is_sampling_params(given: object) -> TypeGuard[SamplingParams]:
    # Whoever has such an object has imported the module that defines it.
    module = sys.modules.get("vllm.sampling_params")
    return module is not None and isinstance(given, module.SamplingParams)


def _changed_fields(params: SamplingParams) -> dict[str, Any]:
    defaults = type(params)()
    changed = {}
    for name in params.__struct_fields__:
        value, default = getattr(params, name), getattr(defaults, name)
        is_default = type(value) is type(default) and value == default
        # vLLM reads no cache of what it is to tell the log-probabilities.
        follows = name == "skip_reading_prefix_cache" and params.prompt_logprobs is not None
        if is_default or name.startswith("_") or name in _IGNORED or follows:
            continue
        if name not in SENT:
            raise UnsupportedOptionError(
                "servers do not take this sampling option: leave it out",
                parameter=name,
                value=value,
            )
        changed[name] = _plain(value)
    return changed


def _plain(value: object) -> object:
    """Value of a field; of an object, a dict of the fields that were set."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    fields = asdict(value).items()
    return {name: entry for name, entry in fields if entry is not None and not name.startswith("_")}


def _check_json(name: str, value: object) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnsupportedOptionError(
            f"this sampling option cannot be sent to a server ({error}): leave it out",
            parameter=name,
            value=value,
        ) from error
