# SPDX-License-Identifier: Apache-2.0
"""From a program that fails to a short one that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from tests.engine.feature_machine.program import Call, Operation, Ordinary, Steps

Operations = tuple[Operation, ...]


def shrunk(
    operations: Sequence[Operation], fails: Callable[[Operations], bool], seconds: float = 120.0
) -> Operations:
    """Delete operations, then options, for as long as it still fails.

    Args:
        fails: runs a program; whether it fails in the way that is looked for.
        seconds: after which what was found by then is returned.
    """
    found, until = tuple(operations), time.monotonic() + seconds
    is_smaller = True
    while is_smaller and time.monotonic() < until:
        is_smaller = False
        for candidate in _smaller(found):
            if time.monotonic() > until:
                break
            if fails(candidate):
                found, is_smaller = candidate, True
                break
    return found


def _smaller(operations: Operations) -> Iterator[Operations]:
    """Programs with less in them, those with much less first."""
    size = len(operations) // 2
    while size:
        for start in reversed(range(0, len(operations), size)):
            yield operations[:start] + operations[start + size :]
        size //= 2
    for number, operation in enumerate(operations):
        for simpler in _simpler(operation):
            yield (*operations[:number], simpler, *operations[number + 1 :])


def _simpler(operation: Any) -> Iterator[Any]:
    for field in fields(operation):
        value = getattr(operation, field.name)
        if field.default is not MISSING and value != field.default:
            yield replace(operation, **{field.name: field.default})
        if field.name in ("reads", "names") and len(value) > 1:
            for index in range(len(value)):
                yield replace(operation, **{field.name: value[:index] + value[index + 1 :]})
    if isinstance(operation, Steps) and operation.count > 1:
        yield Steps(operation.count - 1)
    if isinstance(operation, (Call, Ordinary)) and operation.text[1] > 1:
        yield replace(operation, text=(operation.text[0], operation.text[1] // 2))
    if isinstance(operation, (Call, Ordinary)) and operation.generate > 1:
        yield replace(operation, generate=1)
