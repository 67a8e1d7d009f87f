# SPDX-License-Identifier: Apache-2.0
"""Check of data read from JSON against the form of a transcript; errors name the place.

A form is a type, `None`, a dict of forms by key, `[form]` for a list of any length, or a tuple of
forms of which one must fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_END = (int, None)  # of a span
_STEP = {
    "stage": str,
    "author": str,
    "id": str,
    "parents": [[(str, *_END)]],
    "position": int,
    "num_tokens": int,
    "token_ids": [int],
    "text": str,
    "generated_token_ids": [int],
    "generated_text": str,
    "finish_reason": (str, None),
    "usage": {
        "exact": bool,
        "reused_tokens": int,
        "repositioned_tokens": int,
        "encoded_tokens": int,
    },
    "metrics": {
        "submitted": float,
        "waiting": (float, None),
        "ttft": float,
        "latency": float,
    },
}
# Files of before there were any lack them.
_PLACES = {"offsets": ([(int, None)], None), "new_offset": (int, None), "role": (str, None)}
_TRANSCRIPT = {
    "workflow": str,
    "mode": str,
    "seconds": float,
    "answers": [str],
    "inputs": {},
    "steps": [_STEP],
}


def check_transcript(data: Any) -> None:
    """Check that data have the form of a transcript.

    Raises:
        ValueError: some part is missing, or of another type than `to_json` writes.
    """
    check_form(data, _TRANSCRIPT, "the file")
    for i, step in enumerate(data["steps"]):
        for name, form in _PLACES.items():
            check_form(step.get(name), form, f"steps[{i}].{name}")
        repaired = step["usage"].get("repaired_tokens", 0)
        check_form(repaired, int, f"steps[{i}].usage.repaired_tokens")
        for name in ("token_ids", "generated_token_ids"):
            if any(token < 0 for token in step[name]):
                raise ValueError(f"steps[{i}].{name} must hold token ids, which are 0 or more")
        for j, parent in enumerate(step["parents"]):
            if len(parent) != 3 or not isinstance(parent[0], str) or str in map(type, parent[1:]):
                raise ValueError(
                    f"steps[{i}].parents[{j}] must be [id, start, stop], not {_shown(parent)}"
                )


def check_form(value: Any, form: Any, place: str) -> None:
    """Check that a value, found at `place`, is of a form.

    Raises:
        ValueError: it is not.
    """
    if isinstance(form, dict):
        if not isinstance(value, Mapping):
            raise _wrong(value, form, place)
        for key, inner in form.items():
            if key not in value:
                raise ValueError(f"{place} lacks {key!r}")
            check_form(value[key], inner, key if place == "the file" else f"{place}.{key}")
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise _wrong(value, form, place)
        for i, item in enumerate(value):
            check_form(item, form[0], f"{place}[{i}]")
    elif not _fits(value, form):
        raise _wrong(value, form, place)


def _fits(value: Any, form: Any) -> bool:
    """Return whether one value is of a form: 1 may be meant as 1.0, but no bool is a number."""
    if isinstance(form, tuple):
        return any(_fits(value, one) for one in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(item, form[0]) for item in value)
    if form is None:
        return value is None
    if isinstance(value, bool):
        return form is bool
    return isinstance(value, (int, float) if form is float else form)


_WORDS = {str: "a text", int: "an integer", float: "a number", bool: "true or false", None: "null"}


def _in_words(form: Any) -> str:
    if isinstance(form, tuple):
        return " or ".join(map(_in_words, form))
    if isinstance(form, list):
        return f"a list of which each is {_in_words(form[0])}"
    return "an object" if isinstance(form, dict) else _WORDS[form]


def _wrong(value: Any, form: Any, place: str) -> ValueError:
    return ValueError(f"{place} must be {_in_words(form)}, not {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
