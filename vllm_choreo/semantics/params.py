# SPDX-License-Identifier: Apache-2.0
"""`ChoreoParams` <-> `SamplingParams.extra_args["choreo"]`. Imports neither torch nor vllm.

The wire form, drawn once (JSON and msgpack carry it as it is):

    {"parents":    [[id, start | None, stop | None], ...],
     "offsets":    [int | None, ...] | None,
     "new_offset": int | None,
     "save_as":    str | None,
     "kind":       "prefill" | "decode",
     "session":    str,
     "tenant":     str,             left out if empty
     "reader":     str,             left out if empty
     "open_end":   bool,            left out if false
     "exact":      bool,            left out if false
     "deny":       [id, ...],       left out if empty
     "repair":     rule,            left out if None; see `repair.rules`
     "keep_hidden": [int, ...],     left out if empty
     "copy_of":    id}              left out if None
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeGuard, TypeVar

from vllm_choreo.errors import ChoreoError, OffsetError, RepairError, SpanError
from vllm_choreo.repair.rules import GivenRuns, Rule, rule_of
from vllm_choreo.semantics.naming import ParentSpan, parent_span

EXTRA_ARGS_KEY = "choreo"
FLAT_PREFIX = "choreo_"  # of the keys that OpenAI's clients send, which hold no objects
KINDS = ("prefill", "decode")

_SamplingParamsT = TypeVar("_SamplingParamsT", bound=Any)


@dataclass(frozen=True)
class ChoreoParams:
    """Parameters that a call adds to an ordinary vLLM request.

    Attributes:
        parents: the messages that the new tokens attend to, as `parent_span` reads them, kept as
            `ParentSpan`.
        offsets: the position at which each parent is seen, in tokens; None in place of one: after
            the parent before it, the first at 0; None: all of them so.
        new_offset: the position of the first new token; None: after the last parent.
        save_as: the id of the message that the call makes, as it is; None: the engine chooses.
        kind: "prefill" (encode, sample nothing) or "decode".
        session: the tenant's session that the message belongs to.
        tenant: identical messages of one tenant are encoded once; those of others never meet.
        reader: tenant that owns the message's other encodings, if not `tenant`: the contexts in
            which a message has been read tell of its readers.
        open_end: the message is complete only once the client has told how many of its tokens it
            keeps: stop strings are found by the client (operation "end" of the engine).
        exact: the result is that of a request on the concatenated text: parents that were encoded
            otherwise are encoded again for it.
        deny: ids of messages of which the call may read no trace.
        copy_of: id of the message whose tokens are encoded anew, of which the new one then
            carries a trace.
        repair: tokens of the parents that are encoded anew in the call's own context: a rule as
            `rule_of` takes it, kept as `Rule`; None: none.
        keep_hidden: layers whose input (hidden states) the workers keep for the new message's
            tokens, for calls that repair it by layers from there on.

    Raises:
        ChoreoError: a field of the wrong type, or an unknown kind.
        RepairError: no such rule, runs that are not one list per parent, or an exact call, which
            encodes anew whatever it must.
        OffsetError: offsets that are negative, no ints, or not one per parent.
        SpanError: a sub-span that is empty, negative, or no pair of ints.
    """

    parents: tuple[ParentSpan, ...] = ()
    offsets: tuple[int | None, ...] | None = None
    new_offset: int | None = None
    save_as: str | None = None
    kind: str = "decode"
    session: str = ""
    tenant: str = ""
    reader: str = ""
    open_end: bool = False
    exact: bool = False
    deny: tuple[str, ...] = ()
    copy_of: str | None = None
    repair: Rule | None = None
    keep_hidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parents = tuple(_parent(parent) for parent in _sequence("parents", self.parents))
        object.__setattr__(self, "parents", parents)
        if self.offsets is not None:
            offsets = tuple(_sequence("offsets", self.offsets, OffsetError))
            object.__setattr__(self, "offsets", offsets)
        self._check_offsets()
        if self.kind not in KINDS:
            raise ChoreoError(f"kind must be one of {KINDS}", parameter="kind", value=self.kind)
        if self.save_as is not None and not (isinstance(self.save_as, str) and self.save_as):
            raise ChoreoError(
                "save_as must be a non-empty string, or None for an id of the engine's choice",
                parameter="save_as",
                value=self.save_as,
            )
        for name in ("session", "tenant", "reader"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ChoreoError("a string is needed", parameter=name, value=value)
        for name in ("exact", "open_end"):
            if not isinstance(getattr(self, name), bool):
                raise ChoreoError(
                    "true or false is needed", parameter=name, value=getattr(self, name)
                )
        object.__setattr__(self, "deny", tuple(_sequence("deny", self.deny)))
        for message_id in self.deny:
            _check_id("deny", message_id)
        if self.copy_of is not None:
            _check_id("copy_of", self.copy_of)
        self._check_repair()
        self._check_hidden()

    def _check_hidden(self) -> None:
        layers = tuple(_sequence("keep_hidden", self.keep_hidden))
        if any(type(layer) is not int or layer < 1 for layer in layers):
            raise ChoreoError(
                "hidden states are kept of layers from 1 on (layer 0 is given the tokens alone)",
                parameter="keep_hidden",
                value=list(layers),
            )
        object.__setattr__(self, "keep_hidden", tuple(sorted(set(layers))))

    def _check_repair(self) -> None:
        if self.repair is None:
            return
        rule = self.repair if hasattr(self.repair, "to_json") else rule_of(self.repair)
        object.__setattr__(self, "repair", rule)
        if self.exact:
            raise RepairError(
                "mode 'exact' encodes anew whatever it must: leave repair out, or choose the mode "
                "'choreo'",
                parameter="repair",
                value=rule.to_json(),
            )
        if isinstance(rule, GivenRuns):
            rule.check_count(len(self.parents))

    def _check_offsets(self) -> None:
        if self.offsets is not None:
            if len(self.offsets) != len(self.parents):
                raise OffsetError(
                    f"offsets must hold one position per parent: {len(self.parents)} parents, "
                    f"{len(self.offsets)} offsets; None places a parent after the one before it",
                    parameter="offsets",
                    value=self.offsets,
                )
            for offset in self.offsets:
                if offset is not None:
                    check_offset("offsets", offset)
        if self.new_offset is not None:
            check_offset("new_offset", self.new_offset)

    def to_extra_args(self) -> dict[str, Any]:
        """A value for `SamplingParams(extra_args=...)`: `{"choreo": wire form}`."""
        wire: dict[str, Any] = {
            "parents": [list(parent) for parent in self.parents],
            "offsets": None if self.offsets is None else list(self.offsets),
            "new_offset": self.new_offset,
            "save_as": self.save_as,
            "kind": self.kind,
            "session": self.session,
        }
        names = ("tenant", "reader", "open_end", "exact", "copy_of")
        options = {
            **{name: getattr(self, name) for name in names},
            "deny": list(self.deny),
            "repair": self.repair and self.repair.to_json(),
            "keep_hidden": list(self.keep_hidden),
        }
        return {EXTRA_ARGS_KEY: {**wire, **{key: value for key, value in options.items() if value}}}

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any]) -> ChoreoParams:
        """Read `SamplingParams.extra_args`, or its `"choreo"` entry alone. Absent keys take their
        defaults.

        Raises:
            ChoreoError: an unknown key, or any reason of the class.
        """
        wire = extra_args.get(EXTRA_ARGS_KEY, extra_args) if _is_map(extra_args) else extra_args
        if not _is_map(wire):
            raise ChoreoError(
                f'extra_args["{EXTRA_ARGS_KEY}"] must be an object with the keys {_keys()}',
                parameter=EXTRA_ARGS_KEY,
                value=wire,
            )
        for key in wire:
            if key not in _keys():
                raise ChoreoError(
                    f"unknown key; the keys are {', '.join(_keys())}",
                    parameter=f"{EXTRA_ARGS_KEY}.{key}",
                    value=wire[key],
                )
        return cls(**{str(key): value for key, value in wire.items()})

    def apply(self, sampling_params: _SamplingParamsT) -> _SamplingParamsT:
        """A clone of `sampling_params` that carries this call; other `extra_args` are kept."""
        clone: _SamplingParamsT = sampling_params.clone()
        clone.extra_args = {**(clone.extra_args or {}), **self.to_extra_args()}
        return clone


def check_offset(parameter: str, offset: object) -> None:
    """Refuse what is no position: `True` and `3.0` are ints to Python, but mistakes here.

    Raises:
        OffsetError: `offset` is no int or is negative.
    """
    if type(offset) is not int or offset < 0:
        raise OffsetError("a position is an int >= 0", parameter=parameter, value=offset)


def check_span(
    start: int | None,
    stop: int | None,
    num_tokens: int | None,
    value: object,
    owner: str = "the message",
) -> None:
    """Refuse a sub-span that is empty or does not lie in its message.

    Args:
        start, stop: ends of the sub-span; None: those of the message.
        num_tokens: tokens of the message; None: not known yet.
        value: span as the caller gave it, for the error.
        owner: name of the message, for the error.

    Raises:
        SpanError: the ends are no ints, or none of such a sub-span.
    """
    are_ints = all(type(end) is int for end in (start, stop) if end is not None)
    limit = math.inf if num_tokens is None else num_tokens
    if are_ints and 0 <= (start or 0) < (limit if stop is None else stop) <= limit:
        return
    length, bound = "", ""
    if num_tokens is not None:
        length, bound = f"{owner} has {num_tokens} tokens; ", f" <= {num_tokens}"
    raise SpanError(
        f"{length}choose ints with 0 <= start < stop{bound}, or None for the ends of the message",
        parameter="parents",
        value=value,
    )


def _parent(parent: object) -> ParentSpan:
    span = parent_span(parent)
    if not span.id:
        raise ChoreoError(
            "the id of a parent is a non-empty string", parameter="parents", value=parent
        )
    check_span(span.start, span.stop, None, parent)
    return span


def _check_id(parameter: str, message_id: object) -> None:
    if not isinstance(message_id, str) or not message_id:
        raise ChoreoError(
            "a message is named by its id, a non-empty string",
            parameter=parameter,
            value=message_id,
        )


def _sequence(
    parameter: str, value: object, error: type[ChoreoError] = ChoreoError
) -> Sequence[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise error(f"{parameter} must be a list", parameter=parameter, value=value)
    return value


def _is_map(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def _keys() -> tuple[str, ...]:
    return tuple(field.name for field in fields(ChoreoParams))
