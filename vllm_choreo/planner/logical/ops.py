# SPDX-License-Identifier: Apache-2.0
"""Lazy operators of the language: calling one records it; nothing runs before `invoke`.

    question = ops.placeholder("question")
    answer = ops.llm([ops.Msg("user", question)])
    better = ops.llm([ops.Msg("user", ops.fmt("Improve: {} {}", question, answer))])
    graph = build([better]).compile(question=["How many inches is 1 meter?"])

A value is a text, a list of texts, or any other value that JSON can express ("value"). A text that
is composed of others (`fmt`, `concat`) remembers its parts: a planner may share or read them.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from vllm_choreo.planner.errors import GraphError
from vllm_choreo.planner.logical.nodes import Value
from vllm_choreo.planner.logical.op import (
    DECLARED,
    Messages,
    Msg,
    Op,
    Text,
    chat_of,
    is_sequence,
    line_of_caller,
    operator,
    pieces_of,
    refused,
    text_of,
    turns_of,
    type_of,
    typed,
)

_MAX_ROUNDS = 1000  # of a loop, which is unrolled
State = Messages | tuple[Messages, ...]  # of a loop


# -- inputs ----------------------------------------------------------------------------------------


def placeholder(name: str, *, type: str = "text") -> Op:
    """Declare an input, which `compile` binds by its name to one value for each query.

    Raises:
        OperatorTypeError: no name, or no such type.
    """
    made = Op("placeholder", type, (), {}, name, line_of_caller())
    if not isinstance(name, str) or not name.isidentifier():
        raise refused(made, "a placeholder is named like a variable", "name", name)
    DECLARED.add(name)
    return typed(made)


def data(values: Value, *, whole: bool = False, name: str = "") -> Op:
    """Put data into the graph: a list has one value for each query; all else is for all queries.

    Args:
        values: texts, lists of texts, or other values that JSON can express.
        whole: take a list as one value, for all queries.
    """
    each = isinstance(values, list) and not whole
    kind = type_of(values[0] if each and values else values)
    attrs = {"values": list(values)} if each else {"value": values}
    return Op("data", kind, (), attrs, name, line_of_caller())


# -- text ------------------------------------------------------------------------------------------


def fmt(template: str, *args: Text, name: str = "", **kwargs: Text) -> Op:
    """Fill the holes of a text: `{}`, `{0}` or `{name}`, as in `str.format`; `{{` is a brace.

    Where the template has no hole, the arguments follow it, a blank line before each.

    Raises:
        OperatorTypeError: a hole without argument, an argument without hole, or one that is no
            text; conversions and format specifications, for a value has no form of its own here.
    """
    made = Op("fmt", "text", (), {}, name, line_of_caller())
    try:
        fields = list(string.Formatter().parse(template))
    except (ValueError, TypeError) as error:
        raise refused(made, f"no template: {error}", "template", template) from error
    if all(hole is None for _, hole, _, _ in fields):
        pieces: list[object] = ["".join(text for text, *_ in fields)]
        for arg in (*args, *kwargs.values()):
            pieces += ["\n\n", arg]
        return text_of(made, pieces)
    pieces, used, count = [], set(), 0
    for text, hole, spec, conversion in fields:
        pieces.append(text)
        if hole is None:
            continue
        if spec or conversion:
            raise refused(made, "a hole has neither conversion nor format", "template", template)
        key: int | str = hole if hole and not hole.isdigit() else int(hole) if hole else count
        count += not hole
        if key not in kwargs and not (isinstance(key, int) and key < len(args)):
            raise refused(made, f"the hole {{{hole}}} has no argument", "template", template)
        used.add(key)
        pieces.append(args[key] if isinstance(key, int) else kwargs[key])
    for key in (*range(len(args)), *kwargs):
        if key not in used:
            raise refused(made, f"no hole takes argument {key}", "template", template)
    return text_of(made, pieces)


def concat(*parts: Text | Messages, sep: str = "", order: str = "fixed", name: str = "") -> Op:
    """Concatenate texts, with `sep` in between, lists, or histories.

    Args:
        parts: texts, lists of texts, or histories.
        sep: text between texts.
        order: "fixed", or "any": the order of the texts does not matter. The graph then fixes the
            one in which prompts share most, for the naive run, too.
    """
    made = Op("concat", "text", (), {}, name, line_of_caller())
    if order not in ("fixed", "any"):
        raise refused(made, 'order is "fixed" or "any"', "order", order)
    if parts and all(isinstance(part, Op) and part.type == "list" for part in parts):
        inputs = tuple(part for part in parts if isinstance(part, Op))
        return Op("concat", "list", inputs, {}, name, made.line)
    histories = [one for one in map(_history, parts) if one is not None]
    if parts and len(histories) == len(parts):
        return chat_of(made, histories)
    pieces = [piece for part in parts for piece in (sep, part)][1:]
    loose = {"loose": len(parts), "sep": sep} if order == "any" else {}
    return text_of(made, pieces, loose)


# -- models and functions --------------------------------------------------------------------------


def chat(messages: Messages, *, name: str = "") -> Op:
    """Make a value of messages: a history, which prompts, outputs and loops may have.

    Args:
        messages: messages, and operators of histories, one after the other.
    """
    return chat_of(Op("chat", "messages", (), {}, name, line_of_caller()), messages)


def llm(
    messages: Messages,
    *,
    sampling: Mapping[str, Any] | None = None,
    opening: str = "",
    name: str = "",
) -> Op:
    """Ask the model for an answer to chat messages.

    Args:
        messages: the prompt: messages, and operators of histories between them.
        sampling: fields of `vllm.SamplingParams`. Greedy decoding unless `temperature` is given;
            at most 256 tokens unless `max_tokens` is.
        opening: text with which the answer begins; not part of the value.
    """
    made = Op("llm", "text", (), {}, name, line_of_caller())
    inputs: list[Op] = []
    turns = turns_of(made, messages, inputs)
    if opening:
        turns.append(["opening", [opening]])
    return _asked(made, turns, inputs, sampling)


def complete(prompt: Text, *, sampling: Mapping[str, Any] | None = None, name: str = "") -> Op:
    """Ask the model to go on with a text, as it stands, without a chat.

    Args:
        prompt: the whole prompt.
        sampling: see `llm`.
    """
    made = Op("llm", "text", (), {}, name, line_of_caller())
    inputs: list[Op] = []
    return _asked(made, [["text", pieces_of(made, [prompt], inputs)]], inputs, sampling)


def _asked(
    made: Op, turns: list[list[Any]], inputs: Sequence[Op], sampling: Mapping[str, Any] | None
) -> Op:
    params = {"temperature": 0.0, "max_tokens": 256, **(sampling or {})}
    return replace(made, inputs=tuple(inputs), attrs={"turns": turns, "sampling": params})


def fn(
    function: Callable[..., Any],
    *inputs: Text,
    returns: str = "text",
    pure: bool = True,
    name: str = "",
) -> Op:
    """Call a Python function with the inputs' values.

    Args:
        function: called with one value for each of `inputs`.
        inputs: operators; a text stands for itself.
        returns: type of its value.
        pure: True if the same inputs always give the same value. Pure functions are merged and
            cached; the first call of each is made twice, to see whether that is true.
    """
    made = Op("fn", returns, (), {}, name, line_of_caller())
    if not callable(function):
        raise refused(made, "fn takes a function", "function", function)
    read = tuple(given if isinstance(given, Op) else data(given) for given in inputs)
    return typed(Op("fn", returns, read, {"function": function, "pure": pure}, name, made.line))


# -- shape -----------------------------------------------------------------------------------------


def slice(
    source: Messages, start: int | None = None, stop: int | None = None, *, name: str = ""
) -> Op:
    """Take `value[start:stop]` of a list, of a history, or of a text in characters."""
    source = operator("slice", source, "source", name)
    made = Op(
        "slice", source.type, (source,), {"start": start, "stop": stop}, name, line_of_caller()
    )
    if source.type == "value":
        raise refused(made, "a list, a history or a text is needed", "source", source)
    for key in (start, stop):
        if key is not None and type(key) is not int:
            raise refused(made, "bounds are ints or None", "start", key)
    return made


def item(source: Messages, index: int, *, name: str = "") -> Op:
    """Take one text of a list, `value[index]`, or the content of one message of a history."""
    source = operator("item", source, "source", name)
    made = Op("item", "text", (source,), {"index": index}, name, line_of_caller())
    if source.type not in ("list", "messages") or type(index) is not int:
        raise refused(made, "a list or a history, and an int are needed", "source", source)
    return made


def switch(
    key: Op,
    cases: Mapping[Any, Text | Messages],
    default: Text | Messages | None = None,
    *,
    name: str = "",
) -> Op:
    """Choose the case whose key equals the value of `key`; only that one is run.

    Raises:
        OperatorTypeError: cases of different types, or none.
    """
    made = Op("switch", "text", (), {}, name, line_of_caller())
    if not isinstance(cases, Mapping):
        raise refused(made, "cases are a dict, from values of the key", "cases", repr(cases))
    given = [*cases.values(), *([] if default is None else [default])]
    read = [_case(case) for case in given]
    if not read or len({case.type for case in read}) > 1 or not isinstance(key, Op):
        raise refused(made, "a key and cases of one type are needed", "cases", list(cases))
    attrs = {"keys": list(cases), "default": default is not None}
    return Op("switch", read[0].type, (key, *read), attrs, name, made.line)


# -- repetition ------------------------------------------------------------------------------------


@overload
def loop(  # type: ignore[overload-overlap]  # a tuple is several states, never a history
    state: tuple[Messages, ...],
    body: Callable[..., State],
    *,
    rounds: int,
    until: Callable[..., bool] | None = None,
    name: str = "",
) -> tuple[Op, ...]: ...


@overload
def loop(
    state: Messages,
    body: Callable[..., State],
    *,
    rounds: int,
    until: Callable[..., bool] | None = None,
    name: str = "",
) -> Op: ...


def loop(
    state: State,
    body: Callable[..., State],
    *,
    rounds: int,
    until: Callable[..., bool] | None = None,
    name: str = "",
) -> Op | tuple[Op, ...]:
    """Repeat `state = body(state)`, at most `rounds` times, until `until(state)` is true.

    The body is called once for each round, to write its operators; rounds that `until` ends are not
    run.

    Args:
        state: input of the first round: an operator, a history, or a tuple of them for several
            states, which body and `until` take as arguments one after the other.
        body: function of a round's state that returns the next one's, of the same types.
        rounds: 1 to 1000.
        until: a pure function of the state's value.

    Returns:
        The operator of the last state; a tuple of them for several states.
    """
    made = Op("loop", "value", (), {}, name, line_of_caller())
    states = _unrolled(made, state, body, rounds)
    result = states[-1]
    if until is not None:
        for before in reversed(states[1:-1]):
            done = fn(_checked_condition(made, until, "until"), *before, returns="value")
            result = [
                switch(done, {True: one}, other) for one, other in zip(before, result, strict=True)
            ]
    return tuple(result) if isinstance(state, tuple) else result[0]


@overload
def while_(  # type: ignore[overload-overlap]
    condition: Callable[..., bool],
    state: tuple[Messages, ...],
    body: Callable[..., State],
    *,
    rounds: int,
    name: str = "",
) -> tuple[Op, ...]: ...


@overload
def while_(
    condition: Callable[..., bool],
    state: Messages,
    body: Callable[..., State],
    *,
    rounds: int,
    name: str = "",
) -> Op: ...


def while_(
    condition: Callable[..., bool],
    state: State,
    body: Callable[..., State],
    *,
    rounds: int,
    name: str = "",
) -> Op | tuple[Op, ...]:
    """Repeat `state = body(state)` while `condition(state)` is true, which may be never.

    The result of a query whose condition still holds after `rounds` is an error.

    Args:
        condition: a pure function of the state's value.
        state, body: see `loop`.
        rounds: the most, 1 to 1000.

    Returns:
        See `loop`.
    """
    made = Op("while", "value", (), {}, name, line_of_caller())
    states = _unrolled(made, state, body, rounds)
    holds = _checked_condition(made, condition, "condition")
    key = fn(holds, *states[-1], returns="value")
    result = [switch(key, {False: one}) for one in states[-1]]
    for before in reversed(states[:-1]):
        key = fn(holds, *before, returns="value")
        result = [
            switch(key, {False: one}, other) for one, other in zip(before, result, strict=True)
        ]
    return tuple(result) if isinstance(state, tuple) else result[0]


def _checked_condition(
    made: Op, condition: Callable[..., bool], parameter: str
) -> Callable[..., bool]:
    if callable(condition):
        return condition
    raise refused(made, "a function of the state's value is needed", parameter, repr(condition))


def _unrolled(made: Op, state: State, body: Callable[..., State], rounds: int) -> list[list[Op]]:
    """States before the first round and behind each one, every one as a list of operators."""
    if type(rounds) is not int or not 1 <= rounds <= _MAX_ROUNDS:
        raise refused(made, f"a loop has 1 to {_MAX_ROUNDS} rounds", "rounds", rounds)
    if not callable(body):
        raise refused(made, "the body is a function of the state", "body", repr(body))
    states = [_state_of(made, state, "state")]
    types = [op.type for op in states[0]]
    for _ in range(rounds):
        given = states[-1]
        try:
            returned = body(*given)
        except GraphError:
            raise
        except Exception as error:
            why = f"the body raised {type(error).__name__}: {error}"
            raise refused(made, why, "body", repr(body)) from error
        made_by_body = _state_of(made, returned, "body")
        if [op.type for op in made_by_body] != types:
            advice = f"the body must return {', '.join(types)}, of as many states as it is given"
            raise refused(made, advice, "body", repr(returned))
        states.append(made_by_body)
    return states


def _state_of(made: Op, given: object, parameter: str) -> list[Op]:
    """Operators of one state, or of several in a tuple."""
    parts = list(given) if isinstance(given, tuple) else [given]
    found = [part if isinstance(part, Op) else _history(part) for part in parts]
    states = [op for op in found if op is not None]
    if parts and len(states) == len(parts):
        return states
    advice = "a state is an operator (of a text: data) or a list of Msg, several states are a tuple"
    raise refused(made, advice, parameter, repr(given))


# -- the batch -------------------------------------------------------------------------------------


def batch_slice(
    source: Messages, start: int | None = None, stop: int | None = None, *, name: str = ""
) -> Op:
    """Take some queries: the first one of the result reads query `start` of the source.

    Args:
        source: an operator, or a history.
        start, stop: as in `list[start:stop]`, counted in queries.
    """
    source = operator("batch_slice", source, "source", name)
    attrs = {"start": start, "stop": stop}
    made = Op("batch_slice", source.type, (source,), attrs, name, line_of_caller())
    for key, bound in attrs.items():
        if bound is not None and type(bound) is not int:
            raise refused(made, "bounds are ints or None", key, bound)
    return made


def batch_concat(*sources: Messages, name: str = "") -> Op:
    """Concatenate queries: those of the first source, then those of the next one.

    Raises:
        OperatorTypeError: no source, or sources of different types.
    """
    read = tuple(operator("batch_concat", source, "sources", name) for source in sources)
    made = Op("batch_concat", read[0].type if read else "value", read, {}, name, line_of_caller())
    if len({source.type for source in read}) != 1:
        raise refused(made, "sources of one type are needed", "sources", [*map(repr, read)])
    return made


# -- results ---------------------------------------------------------------------------------------


def output(source: Messages, name: str) -> Op:
    """Declare a result of the graph, under a name of its own.

    Raises:
        OperatorTypeError: the source is neither an operator nor a history.
    """
    source = operator("output", source, "source", name)
    return Op("output", source.type, (source,), {}, name, line_of_caller())


def _case(given: Text | Messages) -> Op:
    """Return a case of a switch as an operator."""
    history = _history(given)
    if history is not None:
        return history
    return given if isinstance(given, Op) else data(given)


def _history(given: object) -> Op | None:
    """Return messages, or an operator of them, as an operator; None: it is something else."""
    if isinstance(given, Op):
        return given if given.type == "messages" else None
    has_messages = is_sequence(given) and any(isinstance(part, Msg) for part in given)
    return operator("chat", given, "messages") if has_messages else None
