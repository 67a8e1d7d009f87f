# SPDX-License-Identifier: Apache-2.0
"""Options of vLLM that a call may have: sampling that makes one message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_choreo.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import ModelConfig


def checked_sampling_params(
    kind: str, given: object, model_config: ModelConfig
) -> SamplingParams | None:
    """The sampling parameters of a call: the caller's, or the model's defaults.

    Args:
        kind: "prefill", which samples nothing, or "decode".
        given: `vllm.SamplingParams`, or None.
        model_config: vLLM's `ModelConfig`.

    Raises:
        UnsupportedOptionError: an option that does not make one message per call.
    """
    if kind == "prefill":
        return None
    from vllm import SamplingParams

    if given is None:
        return SamplingParams(**model_config.get_diff_sampling_param())
    if not isinstance(given, SamplingParams):
        raise UnsupportedOptionError(
            "sampling_params must be vllm.SamplingParams; beam search does not make one "
            "message per call",
            parameter="sampling_params",
            value=given,
        )
    _check_options(given)
    return given


def _check_options(sampling_params: SamplingParams) -> None:
    """Refuse the options that do not make one message of known tokens."""
    refused = {
        "n": (
            sampling_params.n != 1,
            "one call makes one message: list the call n times; in Python a list of calls, "
            "[{...}], each of which makes n, does that",
        ),
        "prompt_logprob_token_ids": (
            sampling_params.prompt_logprob_token_ids is not None,
            "of prompts the likeliest tokens can be had, by prompt_logprobs",
        ),
        "extra_args": (
            "choreo" in (sampling_params.extra_args or {}),
            "name the parents in the call, not in extra_args['choreo']",
        ),
    }
    for parameter, (is_refused, advice) in refused.items():
        if is_refused:
            raise UnsupportedOptionError(
                advice, parameter=parameter, value=getattr(sampling_params, parameter)
            )
