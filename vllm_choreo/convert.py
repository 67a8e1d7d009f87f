# SPDX-License-Identifier: Apache-2.0
"""Plain data to typed values, by msgspec; where they do not fit, an error that names the place.

A form says itself how its values are to be: `Meta(description=...)` of a field, for all that lies
in it, and `advice` of a struct, for its keys. Neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, TypeGuard, TypeVar, Union, get_args, get_origin, overload

import msgspec

from vllm_choreo.errors import ChoreoError

_T = TypeVar("_T")
MISSING = "is missing"  # what the error says of a required field that is not there
_WORDS: dict[Any, str] = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


@overload
def convert(
    given: object, form: type[_T], parameter: str, error: type[ChoreoError] = ...
) -> _T: ...


@overload
def convert(given: object, form: object, parameter: str, error: type[ChoreoError] = ...) -> Any: ...


def convert(
    given: object, form: Any, parameter: str, error: type[ChoreoError] = ChoreoError
) -> Any:
    """Convert plain data to a form: a type as msgspec takes it, such as a tagged union of structs.

    Args:
        given: content of JSON, of a configuration or of a program; values of the form are kept.
        parameter: name of `given`, to which an error adds the place in it.
        error: class of the error.

    Raises:
        ChoreoError: of class `error`, or as a struct's `__post_init__` raises it.
    """
    try:
        return msgspec.convert(given, form)
    except msgspec.ValidationError as refused:
        if isinstance(refused.__cause__, ChoreoError):
            raise refused.__cause__ from None
        reason, place, value = _refusal(given, form, parameter)
        raise error(reason, parameter=place, value=value) from None


def _refusal(
    value: object, form: Any, place: str, advice: str | None = None
) -> tuple[str, str, object]:
    """Find the innermost part of a value that lacks its form: the reason, its place, the part."""
    whole = form
    while get_origin(form) is Annotated or _arm(form, value) is not form:
        if get_origin(form) is Annotated:
            form, *notes = get_args(form)
            advice = next((note.description for note in notes if note.description), advice)
        form = _arm(form, value)
    if isinstance(value, Mapping) and _is_struct(form):
        advice = getattr(form, "advice", None)
    for name, part, part_form in _parts(value, form):
        if part is msgspec.UNSET or not _fits(part, part_form):
            return _refusal(part, part_form, place + name, advice)
    if isinstance(value, Mapping) and _is_struct(form):
        names, config = (
            [f.encode_name for f in msgspec.structs.fields(form)],
            form.__struct_config__,
        )
        unknown = value.keys() - {*names, config.tag_field}
        for key in unknown if config.forbid_unknown_fields else ():
            reason = advice or f"unknown key; the keys are {', '.join(names)}"
            return reason, f"{place}.{key}", value[key]
    if value is msgspec.UNSET:
        return advice or MISSING, place, None
    return advice or f"must be {_in_words(whole)}", place, value


def _fits(value: object, form: object) -> bool:
    try:
        msgspec.convert(value, form)
    except msgspec.ValidationError:
        return False
    return True


def _arm(form: object, value: object) -> Any:
    """Form of a union that a value is meant to have: by its tag, or the only one beside null."""
    if get_origin(form) not in (Union, UnionType):
        return form
    arms = [arm for arm in get_args(form) if arm is not NoneType]
    if isinstance(value, Mapping) and len(arms) > 1 and all(map(_is_struct, arms)):
        arms = [
            arm
            for arm in arms
            if value.get(arm.__struct_config__.tag_field) == arm.__struct_config__.tag
        ]
    return arms[0] if len(arms) == 1 else form


def _parts(value: object, form: object) -> Iterator[tuple[str, Any, Any]]:
    """Parts of a value: the name of each in it, the part, and the form that it is to have."""
    args = get_args(form)
    if isinstance(value, Mapping) and _is_struct(form):
        for field in msgspec.structs.fields(form):
            if field.encode_name in value or field.required:
                part = value.get(field.encode_name, msgspec.UNSET)
                yield f".{field.encode_name}", part, field.type
    elif isinstance(value, Mapping) and get_origin(form) in (dict, Mapping):
        for key, part in value.items():
            yield f".{key}", part, args[1]
    elif isinstance(value, (list, tuple)) and args and get_origin(form) in (list, tuple):
        each = args if len(args) == len(value) and args[-1] is not Ellipsis else None
        for number, part in enumerate(value):
            yield f"[{number}]", part, each[number] if each else args[0]


def _is_struct(form: object) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(form, type) and issubclass(form, msgspec.Struct)


def _in_words(form: object) -> str:
    args = get_args(form)
    if get_origin(form) is Annotated:
        return _in_words(args[0])
    if get_origin(form) in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_in_words, args)))
    if get_origin(form) in (list, tuple):
        return f"a list of which each is {_in_words(args[0])}"
    return _WORDS.get(form, "an object")
