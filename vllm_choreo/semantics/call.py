# SPDX-License-Identifier: Apache-2.0
r"""`CallSpec`: one call as its caller asks for it, from the facade to the wire. No torch, no vllm.

    c.decode("Say:", parents=[doc])        arguments   \
    c.decode([{"header": "Say:", ...}])    dicts        >  CallSpec  >  the session, or JSON
    POST .../messages {"content": ...}     JSON        /

Whoever makes a `CallSpec` checks its form, here and once: which keys there are, and what names a
message. Numbers are checked by `ChoreoParams`, and by the session what only it can know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeGuard, TypeVar, cast

from vllm_choreo.errors import ChoreoError, RepairError, UnsupportedOptionError
from vllm_choreo.semantics.call_options import DecodeOptions, ReadOptions
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.naming import ParentSpan, listed, message_ids, parent_span
from vllm_choreo.semantics.params import ChoreoParams, check_span

CALL_MODES = ("choreo", "exact")
MODES = (*CALL_MODES, "baseline")

Result = Message | ChoreoError  # what a call comes to
Answers = Message | list[Message]  # of a method that takes one call, or a list of them
Answer = TypeVar("Answer", bound=Answers)


# With a list of calls, these may be given once for all of them.
_FOR_ALL = (
    *("sampling_params", "mode", "deny", "adapter", "repair", "layers", "keep_hidden", "role"),
)
MAX_ROLE_CHARS = 64
# The rule of a call that leaves the choice to the profile of its session's pair.
BY_PAIR = "auto"
_LAYERS_IN_WORDS = {"reuse": "none", "encode": "all", "auto": BY_PAIR}
# What a call is of: the keys of a dict, and the kind of call that each makes.
_CONTENTS = {"header": "decode", "tokens": "prefill", "copy_of": "prefill"}


@dataclass(frozen=True)
class Tokenized:
    """Text that the caller has tokenised, as the session would: without special tokens added.

    Attributes:
        text, token_ids: the text and its tokens.
        prompt: vLLM's input with pictures among these tokens; None: there are none.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt: object = None


@dataclass(frozen=True)
class CallSpec:
    """A call as asked for. Messages are named as the caller named them: `name` or id.

    Attributes:
        kind: "prefill" or "decode".
        content: the new tokens: text, token ids, text with its tokens, or the message (or part of
            one) whose tokens are encoded anew.
        sampling_params: `vllm.SamplingParams`, fields of them (HTTP), or None.
        parents, offsets, new_offset, save_as, mode, deny, adapter, repair, keep_hidden, role: see
            `ReadOptions`.
        tenant: tenant whose identical messages it shares, if not the session's; callers have no
            option for it, only the server for what its operator provides.
        multi_modal_data: pictures that are not in `content` yet, see `api/pictures.py`.
    """

    kind: str
    content: str | tuple[int, ...] | Tokenized | ParentSpan
    parents: tuple[ParentSpan, ...] = ()
    offsets: Sequence[int | None] | None = None
    new_offset: int | None = None
    save_as: str | None = None
    mode: str | None = None
    deny: tuple[str, ...] = ()
    adapter: object = None
    repair: object = None
    keep_hidden: Sequence[int] | None = None
    role: str | None = None
    sampling_params: object = None
    tenant: str | None = None
    multi_modal_data: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.multi_modal_data is not None and isinstance(self.content, ParentSpan):
            raise UnsupportedOptionError(
                "what is encoded anew has its own pictures: leave multi_modal_data out",
                parameter="multi_modal_data",
                value="given",
            )
        if self.kind == "prefill" and self.sampling_params is not None:
            raise UnsupportedOptionError(
                "prefill samples nothing: leave sampling_params out, or call decode",
                parameter="sampling_params",
                value=self.sampling_params,
            )
        if self.role is not None and not (
            isinstance(self.role, str) and 0 < len(self.role) <= MAX_ROLE_CHARS
        ):
            raise ChoreoError(
                f"a role is a name of 1 to {MAX_ROLE_CHARS} characters",
                parameter="role",
                value=self.role,
            )
        if isinstance(self.content, ParentSpan):
            check_span(self.content.start, self.content.stop, None, self.content)

    def params(self, **engine_side: object) -> ChoreoParams:
        """Checked parameters for the engine; `engine_side` are those that the session decides.

        Raises:
            ChoreoError: as `ChoreoParams`.
        """
        given: dict[str, Any] = {
            "parents": self.parents,
            "offsets": self.offsets,
            "new_offset": self.new_offset,
            "kind": self.kind,
            "deny": self.deny,
            "repair": None if self.repair == BY_PAIR else self.repair,
            "keep_hidden": self.keep_hidden or (),
        }
        given.update(engine_side)
        return ChoreoParams(**given)


@dataclass(frozen=True)
class Asked(Generic[Answer]):
    """The calls that one call of a method asks for: one, or a parallel list; and its answer."""

    calls: tuple[CallSpec, ...]
    is_list: bool

    def answer(self, results: Sequence[Result]) -> Answer:
        """Return the message, or a list of them.

        Raises:
            ChoreoError: the first error among `results`; its `results` are all of them.
        """
        for result in results:
            if isinstance(result, ChoreoError):
                result.results = list(results)
                raise result
        return cast("Answer", list(results) if self.is_list else results[0])


# -- from what a caller wrote --------------------------------------------------------------------


def asked(
    kind: str, content: object, options: Mapping[str, Any], denied: Sequence[str] = ()
) -> Asked[Answers]:
    """The calls of `prefill(content, **options)` or `decode(content, **options)`.

    Args:
        kind: "prefill" or "decode".
        content: text, token ids, or a list of dicts.
        options: `ReadOptions` or `DecodeOptions`.
        denied: ids of messages that are denied to every call, besides those in `options`.

    Raises:
        TypeError: no such option.
        ChoreoError: the first reason why a call is refused.
    """
    known = DecodeOptions if kind == "decode" else ReadOptions
    options = _checked(options, known, denied)
    if not is_list_of_calls(content):
        return Asked((_spec(kind, _content(kind, content), options),), False)
    for key, value in options.items():
        if key not in _FOR_ALL and value is not None:
            raise ChoreoError(
                f"with a list of calls, give {key} in each dict", parameter=key, value=value
            )
    items = [_item(item, options, ("tokens", "header")) for item in content]
    specs = (_spec(kind, _content(kind, given), item) for _, given, item in items)
    return Asked(tuple(answer for spec in specs for answer in _answers(spec)), True)


def one_spec(
    kind: str, content: object, options: Mapping[str, Any], denied: Sequence[str] = ()
) -> CallSpec:
    """The call of a method that takes no list.

    Raises:
        TypeError, ChoreoError: as `asked`, or it is a list.
    """
    if is_list_of_calls(content):
        raise ChoreoError("a list of calls needs decode or prefill", parameter="header")
    return _spec(kind, _content(kind, content), _checked(options, DecodeOptions, denied))


def submitted_spec(
    header: object, tokens: object, options: Mapping[str, Any], denied: Sequence[str] = ()
) -> CallSpec:
    """The call of `submit(header=...)` or `submit(tokens=...)`.

    Raises:
        TypeError, ChoreoError: both or neither were given, or as `one_spec`.
    """
    if (header is None) == (tokens is None):
        raise ChoreoError("submit needs either header or tokens", parameter="header")
    kind, content = ("prefill", tokens) if header is None else ("decode", header)
    return one_spec(kind, content, options, denied)


def asked_copy(
    message: object, options: Mapping[str, Any], denied: Sequence[str] = ()
) -> Asked[Message]:
    """The call of `reencode(message, **options)`.

    Raises:
        TypeError, ChoreoError: as `asked`.
    """
    options = _checked(options, ReadOptions, denied)
    return Asked((_spec("prefill", parent_span(message, "message"), options),), False)


def linked_specs(items: Sequence[Any], denied: Sequence[str] = ()) -> list[CallSpec]:
    """Calls of both kinds, of which later ones may name earlier ones.

    Args:
        items: dicts like those of a parallel list, each with one of the keys `header` (a decode),
            `tokens` and `copy_of` (a prefill); or `CallSpec`s, which are passed on.
        denied: ids of messages that are denied to every dict's call.

    Raises:
        ChoreoError: the first reason why a call is refused.
    """
    specs = []
    for item in items:
        if isinstance(item, CallSpec):
            specs.append(item)
            continue
        key, given, options = _item(item, {"deny": tuple(denied)}, tuple(_CONTENTS))
        kind = _CONTENTS[key]
        content = parent_span(given, "message") if key == "copy_of" else _content(kind, given)
        specs.append(_spec(kind, content, options))
    return specs


def is_list_of_calls(content: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Return whether `content` is a parallel list, not text or token ids."""
    return isinstance(content, Sequence) and bool(content) and isinstance(content[0], Mapping)


def _checked(options: Mapping[str, Any], form: type, denied: Sequence[str]) -> dict[str, Any]:
    """The options with all that is denied. Raises TypeError: `form` has no such option."""
    known = form.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"unexpected argument {name!r}; the arguments are {', '.join(known)}")
    return {**options, "deny": (*denied, *message_ids(options.get("deny"), "deny"))}


def _item(
    item: object, options: Mapping[str, Any], contents: Sequence[str]
) -> tuple[str, Any, dict[str, Any]]:
    """One dict of a list: the key of its content, that content, and all its options."""
    if not isinstance(item, Mapping):
        raise ChoreoError("a parallel list holds dicts alone", parameter="tokens", value=item)
    known = {*DecodeOptions.__annotations__, *contents}
    for key in item:
        if key not in known:
            raise ChoreoError(
                f"unknown key; the keys are {', '.join(sorted(known))}",
                parameter=str(key),
                value=item[key],
            )
    given = [key for key in contents if key in item]
    if len(given) != 1:
        raise ChoreoError(
            f"each dict needs either {' or '.join(contents)}",
            parameter=contents[0],
            value=dict(item),
        )
    deny = (*options["deny"], *message_ids(item.get("deny"), "deny"))
    return given[0], item[given[0]], {**options, **item, "deny": deny}


def _spec(
    kind: str, content: str | tuple[int, ...] | Tokenized | ParentSpan, options: Mapping[str, Any]
) -> CallSpec:
    return CallSpec(
        kind,
        content,
        parents=tuple(parent_span(named) for named in listed(options.get("parents"), "parents")),
        offsets=options.get("offsets"),
        new_offset=options.get("new_offset"),
        save_as=options.get("save_as"),
        mode=options.get("mode"),
        deny=tuple(dict.fromkeys(options["deny"])),
        adapter=options.get("adapter"),
        repair=_repair(options),
        keep_hidden=options.get("keep_hidden"),
        role=options.get("role"),
        sampling_params=options.get("sampling_params"),
        multi_modal_data=options.get("multi_modal_data"),
    )


def num_answers(sampling_params: object) -> int:
    """Number of answers that sampling parameters ask for, `vllm.SamplingParams` or a dict."""
    if isinstance(sampling_params, Mapping):
        count = sampling_params.get("n")
    else:
        count = getattr(sampling_params, "n", None)
    return count if type(count) is int and count > 1 else 1


def _answers(spec: CallSpec) -> list[CallSpec]:
    """A call for each of the `n` answers that a call of a list asks for, as vLLM makes them.

    A seed counts on from one to the next, and so does a name: "a" becomes "a.0", "a.1" and so on.
    """
    given = spec.sampling_params
    fields = given if isinstance(given, Mapping) else {}
    count = num_answers(given)
    if count == 1:
        return [spec]
    seed = fields.get("seed") if fields else getattr(given, "seed", None)
    answers = []
    for number in range(count):
        own: dict[str, object] = {"n": 1}
        if type(seed) is int:
            own["seed"] = seed + number
        params = {**fields, **own} if fields else _changed(cast("_Clonable", given), own)
        name = spec.save_as and f"{spec.save_as}.{number}"
        answers.append(replace(spec, sampling_params=params, save_as=name))
    return answers


class _Clonable(Protocol):
    """`vllm.SamplingParams`."""

    def clone(self) -> _Clonable: ...


def _changed(params: _Clonable, fields: Mapping[str, object]) -> _Clonable:
    """Copy sampling parameters with other values of some fields."""
    copied = params.clone()
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


def _repair(options: Mapping[str, Any]) -> object:
    """The rule of a call. Raises ChoreoError: two of them, or no layers."""
    repair, layers = options.get("repair"), options.get("layers")
    if layers is None:
        return repair
    if repair is not None:
        raise RepairError(
            "layers are a rule of repair, of every token: give either repair or layers",
            parameter="layers",
            value=layers,
        )
    if not isinstance(layers, str):
        return {"layers": list(listed(layers, "layers"))}
    if layers not in _LAYERS_IN_WORDS:
        raise RepairError(
            'layers are (first, stop), or several of these, or "reuse", "encode" or "auto"',
            parameter="layers",
            value=layers,
        )
    return _LAYERS_IN_WORDS[layers]


def content_name(kind: str) -> str:
    """Name of the new tokens' argument, for errors."""
    return "header" if kind == "decode" else "tokens"


def _content(kind: str, given: object) -> str | tuple[int, ...] | Tokenized:
    name = content_name(kind)
    if isinstance(given, (str, Tokenized)):
        return given
    if not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray)):
        raise ChoreoError(
            f"{name} must be text, token ids, or a list of dicts", parameter=name, value=given
        )
    for token in given:
        if type(token) is not int:
            call = f'[{{"{name}": text}}, …]'
            raise ChoreoError(
                f"a token id is an int; for calls side by side give a list of dicts, {call}",
                parameter=name,
                value=token,
            )
    return tuple(given)


# -- of a session --------------------------------------------------------------------------------


def check_mode(mode: str) -> None:
    """Check that a session can have this mode. Raises ChoreoError: it cannot."""
    if mode not in MODES:
        raise ChoreoError(f"mode must be one of {MODES}", parameter="mode", value=mode)


def ended() -> ChoreoError:
    """Error of a call that is cancelled."""
    return ChoreoError("the call was ended before it was complete")
