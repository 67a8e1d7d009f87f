# SPDX-License-Identifier: Apache-2.0
"""Short forms of rules: what people write, and what files held before rules had a tag.

"first:32"                  {"by": "first", "count": 32}
"none", "all"               {"by": "none"}, {"by": "all"}
[[[0, 32]], []]             {"by": "runs", "runs": [[[0, 32]], []]}
{"clipped": [[[0, 32]]]}    {"by": "clipped", "runs": [[[0, 32]]]}
{"layers": [8, 20]}         {"by": "layers", "layers": [[8, 20]]}; of [] {"by": "none"}
{"reweight": [0.9, 1.0]}    {"by": "reweight", "reweight": [0.9, 1.0]}
{"masks": ..., ...}         {"by": "policy", "masks": ..., ...}
{"pair": ..., ...}          {"by": "pair", "pair": ..., ...}
{"cells": ..., ...}         {"by": "pair", "pair": {"cells": ..., ...}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

_FIRST = re.compile(r"first:(?P<count>[0-9]{1,18})")


def tagged(given: object) -> object:
    """Give a rule in a short form its tag; what is none stays as it is."""
    if given in ("none", "all"):
        return {"by": given}
    if isinstance(given, str):
        first = _FIRST.fullmatch(given)
        return {"by": "first", "count": int(first["count"])} if first else given
    if isinstance(given, Mapping):
        return _tagged_object(given)
    return {"by": "runs", "runs": given} if _is_list(given) else given


def _tagged_object(given: Mapping[str, Any]) -> Mapping[str, Any]:
    if given.get("by") == "attention":  # its seed, which it has no use for, was taken, too
        return {key: value for key, value in given.items() if key != "seed"}
    if [*given] == ["clipped"]:
        return {"by": "clipped", "runs": given["clipped"]}
    if [*given] == ["layers"]:
        return _by_layers(given["layers"])
    if [*given] == ["reweight"]:
        return {"by": "reweight", **given}
    if "cells" in given:
        return {"by": "pair", "pair": given}
    if "by" in given:
        return given
    if "pair" in given:
        return {"by": "pair", **given}
    return {"by": "policy", **given} if "masks" in given else given


def _by_layers(layers: object) -> dict[str, Any]:
    if _is_list(layers) and not layers:
        return {"by": "none"}
    is_one = _is_list(layers) and not any(map(_is_list, layers))
    return {"by": "layers", "layers": [layers] if is_one else layers}


def _is_list(given: object) -> TypeGuard[Sequence[object]]:
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes))
