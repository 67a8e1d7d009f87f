# SPDX-License-Identifier: Apache-2.0
"""Values of JSON schemas, drawn from a seed: such as a schema allows, and such as nobody sends.

Of a schema `{"$ref" | "anyOf" | "oneOf" | "allOf" | "enum" | "const" | "type", ...}` as OpenAPI 3.1
writes it. What a name means no schema tells: `hints` give values for names.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_MAX_DEPTH = 6
_OPTIONAL = 0.15  # the share of the optional fields that a value has
INTEGERS = (
    *(-1, 0, 1, 2, 31, 32, 33, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64),
    *(-(2**31), -(2**63) - 1, 10**40),
)
TEXTS = (
    *("", " ", "\0", "\n", "t5", "t5 t6 t7", "..", "../..", "/", "a/b", "%2e%2e", "known[1:2]"),
    *("known[:]", "known[9:1]", "first:1", "first:0", "first:99999999999", "all", "none", "exact"),
    *('{"share":1e999,"by":"random"}', "[" * 500, "x" * 5000, "é" * 300, "\u202e", "\ud83d\ude00"),
    *("policy.json", "/etc/passwd", "file:///etc/passwd", "memory://x", "operator", "0", "00", "٣"),
    *("-1", "1e5", "m", "known", "<script>", "' OR 1=1"),
)
SCALARS = (None, True, False, 0.0, -0.0, 1.5, 1e308, 5e-324)

Hints = Mapping[str, Callable[[], Any]]


class Values:
    """
    Args:
        rng: decides.
        schemas: those that a `$ref` names, by their names.
    """

    def __init__(self, rng: random.Random, schemas: Mapping[str, Any]) -> None:
        self._rng = rng
        self._schemas = schemas

    def of(self, schema: Mapping[str, Any], hints: Hints, name: str = "", depth: int = 0) -> Any:
        """A value that the schema allows, as far as that tells.

        Args:
            schema: of the value.
            hints: what gives the values of fields, by their names.
            name: of the field whose value it is.
        """
        if name in hints:
            return hints[name]()
        if "$ref" in schema:
            named = self._schemas[schema["$ref"].rpartition("/")[2]]
            return self.of(named, hints, name, depth + 1)
        for kind in ("anyOf", "oneOf"):
            if kind in schema:
                return self.of(self._rng.choice(schema[kind]), hints, name, depth + 1)
        if "allOf" in schema:
            parts = [self.of(part, hints, name, depth + 1) for part in schema["allOf"]]
            is_one = all(isinstance(part, dict) for part in parts)
            return {k: v for part in parts for k, v in part.items()} if is_one else parts[0]
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._rng.choice(schema["enum"])
        return self._of_type(schema, hints, depth)

    def _of_type(self, schema: Mapping[str, Any], hints: Hints, depth: int) -> Any:
        rng, kind = self._rng, schema.get("type")
        if isinstance(kind, list):
            kind = rng.choice(kind)
        if kind == "object" or "properties" in schema:
            return self._object(schema, hints, depth)
        if kind == "array":
            least = schema.get("minItems", 0)
            most = max(least, min(schema.get("maxItems", 3), 0 if depth > _MAX_DEPTH else 3))
            count = rng.randint(least, most)
            return [self.of(schema.get("items", {}), hints, "", depth + 1) for _ in range(count)]
        if kind == "integer":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
            high = min(schema.get("maximum", low + 40), low + 40)
            return rng.randint(int(low), int(max(low, high)))
        if kind == "number":
            return rng.choice([schema.get("minimum", 0), 0.5, 1, schema.get("maximum", 2)])
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "null":
            return None
        return rng.choice(schema.get("examples") or ["t5", "t5 t6", "known", "x"])

    def _object(self, schema: Mapping[str, Any], hints: Hints, depth: int) -> dict[str, Any]:
        needed = schema.get("required", ())
        made = {}
        for name, field in schema.get("properties", {}).items():
            if name in needed or (depth <= _MAX_DEPTH and self._rng.random() < _OPTIONAL):
                made[name] = self.of(field, hints, name, depth + 1)
        return made


def odd(rng: random.Random, depth: int = 0) -> Any:
    """A value that may stand nowhere."""
    match rng.randrange(8):
        case 0 | 1:
            return rng.choice(INTEGERS)
        case 2 | 3:
            return rng.choice(TEXTS)
        case 4:
            return rng.choice(SCALARS)
        case 5 if depth < 3:
            return [odd(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 6 if depth < 3:
            return {rng.choice(TEXTS): odd(rng, depth + 1) for _ in range(rng.randrange(3))}
    nested: Any = []
    for _ in range(rng.choice((3, 50, 300))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def spoilt(rng: random.Random, value: Any) -> Any:
    """`value` with one or two places that are odd, left out, more than asked for, or too many."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 2)):
        place = rng.choice(list(_places(value)))
        if not place:
            continue
        *way, last = place
        holder = value
        for key in way:
            holder = holder[key]
        how = rng.randrange(5)
        if how == 0 and isinstance(holder, dict):
            del holder[last]
        elif how == 1 and isinstance(holder, dict):
            holder[rng.choice((*TEXTS, "choreo", "__class__"))] = odd(rng)
        elif how == 2 and isinstance(holder[last], list):
            holder[last] = holder[last] * rng.choice((2, 100))
        else:
            holder[last] = odd(rng)
    return value


def _places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield way
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*way, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from _places(value[index], (*way, index))


def damaged(rng: random.Random, content: bytes) -> bytes:
    """JSON that is none, or not what it says."""
    place = rng.randrange(len(content) + 1)
    return rng.choice(
        (
            content[:place],
            content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :],
            content[:-1] + b"," + content[1:],  # each key twice
            content.replace(b'"', b"'"),
            b"\xef\xbb\xbf" + content,
            content.replace(b"2", b"NaN"),
            content.decode(errors="replace").encode("utf-16"),
        )
    )


def encoded(body: Any) -> bytes:
    """JSON, with Infinity and NaN where Python has them."""
    return json.dumps(body).encode()
