# SPDX-License-Identifier: Apache-2.0
"""Admission of requests: calls enter the call table, and what can never run is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from vllm_choreo.engine.scheduler.adapters import Adapters
from vllm_choreo.engine.scheduler.call_table import CallTable
from vllm_choreo.engine.scheduler.pictures import PictureRules
from vllm_choreo.errors import EmptyTokensError, UnsupportedOptionError
from vllm_choreo.semantics.params import EXTRA_ARGS_KEY, FLAT_PREFIX, ChoreoParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Admission:
    """Admission of arriving calls to the call table.

    Args:
        vllm_config: the engine's configuration.
        num_cache_groups: kinds of KV cache that its layers have.

    Attributes:
        picture_rules: rules for the pictures of calls.
    """

    def __init__(
        self,
        call_table: CallTable,
        adapters: Adapters,
        vllm_config: VllmConfig,
        num_cache_groups: int,
    ) -> None:
        self._call_table = call_table
        self._adapters = adapters
        self._vllm_config = vllm_config
        self._num_cache_groups = num_cache_groups
        self.picture_rules = PictureRules(vllm_config, call_table.store.pictures)

    def admit(self, request: Request) -> None:
        """Admit a request if it is a call.

        Raises:
            ChoreoError: it can never run.
        """
        extra_args = (request.sampling_params and request.sampling_params.extra_args) or {}
        if EXTRA_ARGS_KEY not in extra_args:
            _check_flat_keys(extra_args)
            return
        self._check_engine()
        params = ChoreoParams.from_extra_args(extra_args)
        _check_options(request)
        pictures = self.picture_rules.pictures_of(request, params.tenant)
        self._call_table.open(request, params, self._adapters.identify(request), pictures)

    def _check_engine(self) -> None:
        if not self._vllm_config.cache_config.enable_prefix_caching:
            raise UnsupportedOptionError(
                "blocks can only be shared with prefix caching on; start the engine without "
                "enable_prefix_caching=False",
                parameter="enable_prefix_caching",
                value=False,
            )
        if self._num_cache_groups != 1:
            raise UnsupportedOptionError(
                "choreography needs one kind of attention in all layers; this model has "
                f"{self._num_cache_groups} kinds of KV cache",
                parameter="model",
                value=self._vllm_config.model_config.model,
            )


def _check_options(request: Request) -> None:
    """Refuse options with which a call would not make one message of the caller's tokens."""
    if not request.prompt_token_ids:
        raise EmptyTokensError("a call needs at least one new token", parameter="tokens", value=[])
    params = request.sampling_params
    if params is None:
        raise UnsupportedOptionError(
            "only generation can be choreographed", parameter="pooling_params", value=None
        )
    unsupported = {
        "prompt_embeds": request.prompt_embeds,
        "resumable": request.resumable or None,
        "kv_transfer_params": request.kv_transfer_params,
    }
    reasons = {
        "kv_transfer_params": "KV connectors serve ordinary requests alone",
    }
    for name, value in unsupported.items():
        if value is not None:
            reason = reasons.get(name, "choreographed calls do not support this")
            raise UnsupportedOptionError(
                f"{reason}; leave it out",
                parameter=name,
                value="given",
            )


def _check_flat_keys(extra_args: Iterable[str]) -> None:
    """Refuse flat keys of choreography that no front end has read.

    Raises:
        UnsupportedOptionError: there is such a key.
    """
    for key in extra_args:
        if key.startswith(FLAT_PREFIX):
            raise UnsupportedOptionError(
                "these keys are for /v1/completions and /v1/chat/completions of a server that was "
                f'started with --plugin choreo; elsewhere use extra_args["{EXTRA_ARGS_KEY}"]',
                parameter=key,
                value="given",
            )
