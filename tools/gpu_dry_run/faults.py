# SPDX-License-Identifier: Apache-2.0
"""Faults that dry runs find and that are known: each until it is mended, and no longer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFault:
    """
    Attributes:
        found_in: what the dry run calls it: "configuration GPU MODEL" or "engine CASE".
        says: part of what it says.
        cure: what mends it.
    """

    found_in: tuple[str, ...]
    says: str
    cure: str


KNOWN: Sequence[KnownFault] = ()


@dataclass(frozen=True)
class Verdict:
    """Faults that a dry run found, compared with those that are known.

    Attributes:
        new: faults that are not known.
        known: those that are, with what mends them.
        mended: known faults that were looked for and not found: to be struck off the list.
    """

    new: Sequence[str]
    known: Sequence[str]
    mended: Sequence[str]

    @property
    def is_good(self) -> bool:
        return not self.new and not self.mended


def judge(
    found: Iterable[tuple[str, str]], looked_at: Iterable[str], known: Sequence[KnownFault] = KNOWN
) -> Verdict:
    """Compare what was found with what is known.

    Args:
        found: place and text of each fault.
        looked_at: places that were looked at.
    """
    found = list(found)
    new, old, seen = [], [], set[tuple[KnownFault, str]]()
    for place, text in found:
        fault = next((f for f in known if place in f.found_in and f.says in text), None)
        if fault is None:
            new.append(f"{place}: {text}")
        else:
            seen.add((fault, place))
            old.append(f"{place}: {text}\n    cure: {fault.cure}")
    mended = [
        f"{place}: no longer says {fault.says!r}; strike it off tools/gpu_dry_run/faults.py"
        for place in looked_at
        for fault in known
        if place in fault.found_in and (fault, place) not in seen
    ]
    return Verdict(new, old, mended)
