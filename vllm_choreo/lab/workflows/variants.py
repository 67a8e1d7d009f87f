# SPDX-License-Identifier: Apache-2.0
"""Two messages side by side, and how a reader sees them: as text, in a row, or in one place.

    baseline    | first | second |  reader      the second one was encoded after the first
    serial      | first | second |  reader      each was encoded by itself
    parallel    | first  |
                | second   |        reader      both at position 0, the reader after the longer one

These are layouts of one choreography, not modes: in mode "baseline" all of them are text, in which
the one message follows the other.
"""

from __future__ import annotations

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call_options import ReadOptions
from vllm_choreo.semantics.message import Message

VARIANTS = ("baseline", "serial", "parallel")


def check_variant(variant: str) -> None:
    """Check that there is such a variant.

    Raises:
        ChoreoError: there is none.
    """
    if variant not in VARIANTS:
        raise ChoreoError(f"variant must be one of {VARIANTS}", parameter="variant", value=variant)


def layout(variant: str, first: Message, second: Message) -> ReadOptions:
    """The arguments of a call that reads both messages: `parents`, and where it sees them."""
    arguments: ReadOptions = {"parents": [first, second]}
    if variant == "parallel":
        arguments["offsets"] = [0, 0]
        arguments["new_offset"] = max(first.num_tokens, second.num_tokens)
    return arguments
