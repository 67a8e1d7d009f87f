# SPDX-License-Identifier: Apache-2.0
"""Two messages side by side, and how a reader sees them: as text, in a row, or in one place.

    baseline    | first | second |  reader      the second one was encoded after the first
    serial      | first | second |  reader      each was encoded by itself
    parallel    | first  |
                | second   |        reader      both at position 0, the reader after the longer one

These are variants of one choreography, not modes: in mode "baseline" all of them are text, in which
the one message follows the other.

A *layout* is the order of a workflow's parents: "standard", this project's, in which what was asked
stands before what was said, and what is to be done comes last; or "paper", that of *Prompt
Choreography* (Bai & Eisner, figure 6 and appendix A), in which the prompt of each call comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call_options import ReadOptions
from vllm_choreo.semantics.message import Message

VARIANTS = ("baseline", "serial", "parallel")
LAYOUTS = ("standard", "paper")


def check_variant(variant: str) -> None:
    """Check that there is such a variant.

    Raises:
        ChoreoError: there is none.
    """
    if variant not in VARIANTS:
        raise ChoreoError(f"variant must be one of {VARIANTS}", parameter="variant", value=variant)


def check_layout(layout: str) -> None:
    """Check that there is such an order of parents.

    Raises:
        ChoreoError: there is none.
    """
    if layout not in LAYOUTS:
        raise ChoreoError(f"layout must be one of {LAYOUTS}", parameter="layout", value=layout)


def side_by_side(
    variant: str, first: Message, second: Message, before: Sequence[Message] = ()
) -> ReadOptions:
    """The arguments of a call that reads both messages: `parents`, and where it sees them.

    Args:
        before: messages that the call reads before them.
    """
    arguments: ReadOptions = {"parents": [*before, first, second]}
    if variant == "parallel":
        at = sum(message.num_tokens for message in before)
        arguments["offsets"] = [*(None for _ in before), at, at]
        arguments["new_offset"] = at + max(first.num_tokens, second.num_tokens)
    return arguments


def with_layout(inputs: dict[str, Any], layout: str) -> dict[str, Any]:
    """The inputs of a run with its layout, unless that is the one of runs that name none."""
    return inputs if layout == LAYOUTS[0] else {**inputs, "layout": layout}
