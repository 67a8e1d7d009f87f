# SPDX-License-Identifier: Apache-2.0
"""Checks that the states of a message's parents can be composed."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_choreo.errors import ChainError, LimitError
from vllm_choreo.store.copies import Context, Link
from vllm_choreo.store.encoding import Encoding
from vllm_choreo.store.state_starts import StateOrigin
from vllm_choreo.store.states import States


def check_composable(states: States, links: Sequence[Link]) -> None:
    """Check that an engine which composes states can do so for a call that reads these links.

    Raises:
        ChainError: a part of a message is named.
        LimitError: the engine has too few states.
    """
    check_whole(links)
    origin = StateOrigin.of(tuple(link.encoding for link in links))
    if (num_needed := len({*origin.encodings}) + 1) > states.num_states:
        raise LimitError(
            f"the call needs {num_needed} states at a time, with its own, and the engine has "
            f"{states.num_states}: give it more (a lower additional_config.choreo."
            "tokens_per_state, or more KV cache), or name fewer parents that are no chain",
            parameter="parents",
            value=[link.encoding.message.id for link in links],
        )


def check_whole(links: Sequence[Link]) -> None:
    """Check that a call reads whole messages.

    Raises:
        ChainError: a part of one is named.
    """
    for number, link in enumerate(links, 1):
        if link.num_tokens != link.encoding.num_tokens:
            raise ChainError(
                f"only a part of parent {number} is named, and this model keeps what whole "
                "messages do to a state; name all of it, or call with mode='exact', which encodes "
                "the part anew",
                parameter="parents",
                value=link.encoding.message.id,
            )


def check_loaded(states: States, encoding: Encoding) -> None:
    """Check that an encoding, which comes as a recipe, can be made in an engine with states.

    Raises:
        ChainError: its parents are no chain, which this engine does not read, or parts of messages;
            or tokens of it were encoded anew between others.
        LimitError: the engine has too few states.
    """
    assert encoding.plan is not None, "a recipe has one"
    links = Context.of(encoding).chain
    is_changed = encoding.patch is not None or encoding.plan.weights is not None
    if is_changed or (StateOrigin.of(encoding.parents).composed and not states.is_composed):
        raise ChainError(
            "the message was encoded behind parents that are no chain, or repaired, and this model "
            "keeps a state, which it reads in the order of the encoding alone; start the engine "
            "with additional_config.choreo.composed_states to read messages in any order",
            parameter="messages",
            value=encoding.message.id,
        )
    check_composable(states, links)
