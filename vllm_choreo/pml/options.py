# SPDX-License-Identifier: Apache-2.0
"""Options of prompts and of pins, as keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from vllm_choreo.semantics.call_options import Named, Parent
from vllm_choreo.semantics.session_options import AdapterGiven

if TYPE_CHECKING:
    from vllm import SamplingParams


class PromptOptions(TypedDict, total=False):
    """Options of a prompt; None: not given.

    Attributes:
        layout: "schema" or "compact" (see `placing`); omitted: "compact" in exact and in baseline
            mode, else "schema".
        messages: messages that the prompt names by `<message name=…/>`, by these names; on a server
            ids or whole messages.
        mode, repair, adapter, deny: options of all calls that the prompt makes, as of
            `Choreography.decode`; `repair` is a rule.
        sampling_params, save_as: options of the answer, likewise.
    """

    layout: str | None
    messages: Mapping[str, Parent] | None
    mode: str | None
    repair: str | Mapping[str, Any] | None
    adapter: AdapterGiven
    deny: Sequence[Named] | None
    sampling_params: SamplingParams | Mapping[str, Any] | None
    save_as: str | None


class PinOptions(TypedDict, total=False):
    """Options of a pin.

    Attributes:
        ttl: seconds for which it holds.
    """

    ttl: float
