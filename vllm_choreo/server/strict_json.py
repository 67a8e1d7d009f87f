# SPDX-License-Identifier: Apache-2.0
"""Strict JSON: no NaN, no lone surrogates, no deep nesting, and no key twice in an object.

Python's own parser takes all of these. Of a key that stands twice, one parser takes the first value
and another the last, so that a proxy that checks requests and the server that runs them would read
different calls.
"""

from __future__ import annotations

import re
from typing import Any

import jiter  # pydantic's parser; it comes with vLLM, through the package openai

from vllm_choreo.errors import ChoreoError, LimitError

_TWICE = re.compile(r"Detected duplicate key (?P<key>.*) at (?P<place>line .*)", re.DOTALL)
# In a body; the parser holds the interpreter, so that nobody is served meanwhile.
MAX_STRINGS = 2**19
# Of a name in an error: those that a client sends may be of any length.
MAX_PART_CHARS = 64


def read_json(content: bytes) -> Any:
    """Parse a request's body: in 50 ms for 16 MiB of calls, and in 0.3 s for the most keys.

    Raises:
        LimitError: it has too many strings and names, which are looked for twice.
        ChoreoError: it is not JSON, or a key stands twice in an object.
    """
    if content.count(b'"') > 2 * MAX_STRINGS:
        raise LimitError(
            f"a request has up to {MAX_STRINGS} strings and names: send it in parts",
            parameter="body",
        )
    try:
        return jiter.from_json(
            content, allow_inf_nan=False, cache_mode="keys", catch_duplicate_keys=True
        )
    except ValueError as error:
        reason = f"the body is not JSON: {error}"
        if twice := _TWICE.fullmatch(str(error)):
            key = twice["key"][:MAX_PART_CHARS]
            reason = f"the key {key} stands twice in one object, at {twice['place']}: send it once"
        raise ChoreoError(reason, parameter="body") from None
