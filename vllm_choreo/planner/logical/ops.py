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
from typing import Any

from vllm_choreo.planner.logical.nodes import Value
from vllm_choreo.planner.logical.op import (
    ROLES,
    Msg,
    Op,
    Text,
    line_of_caller,
    operator,
    pieces_of,
    refused,
    text_of,
    type_of,
    typed,
)

_MAX_ROUNDS = 1000  # of a loop, which is unrolled


# -- inputs ----------------------------------------------------------------------------------------


def placeholder(name: str, *, type: str = "text") -> Op:
    """Declare an input, which `compile` binds by its name to one value for each query.

    Raises:
        OperatorTypeError: no name, or no such type.
    """
    made = Op("placeholder", type, (), {}, name, line_of_caller())
    if not isinstance(name, str) or not name.isidentifier():
        raise refused(made, "a placeholder is named like a variable", "name", name)
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
        pieces: list[Text] = ["".join(text for text, *_ in fields)]
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


def concat(*parts: Text, sep: str = "", order: str = "fixed", name: str = "") -> Op:
    """Concatenate texts, with `sep` in between, or lists.

    Args:
        parts: texts, or lists of texts.
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
    pieces = [piece for part in parts for piece in (sep, part)][1:]
    loose = {"loose": len(parts), "sep": sep} if order == "any" else {}
    return text_of(made, pieces, loose)


# -- models and functions --------------------------------------------------------------------------


def llm(
    messages: Sequence[Msg],
    *,
    sampling: Mapping[str, Any] | None = None,
    opening: str = "",
    name: str = "",
) -> Op:
    """Ask the model for an answer to chat messages.

    Args:
        messages: the prompt.
        sampling: fields of `vllm.SamplingParams`. Greedy decoding unless `temperature` is given;
            at most 256 tokens unless `max_tokens` is.
        opening: text with which the answer begins; not part of the value.
    """
    made = Op("llm", "text", (), {}, name, line_of_caller())
    if isinstance(messages, (str, Op, Msg)) or not isinstance(messages, Sequence) or not messages:
        raise refused(made, "llm takes a list of Msg", "messages", messages)
    inputs: list[Op] = []
    turns = []
    for message in messages:
        if not isinstance(message, Msg) or message.role not in ROLES:
            raise refused(made, f"each is a Msg by one of {ROLES}", "messages", message)
        turns.append([message.role, pieces_of(made, [message.content], inputs)])
    if opening:
        turns.append(["opening", [opening]])
    params = {"temperature": 0.0, "max_tokens": 256, **(sampling or {})}
    return Op("llm", "text", tuple(inputs), {"turns": turns, "sampling": params}, name, made.line)


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


def slice(source: Op, start: int | None = None, stop: int | None = None, *, name: str = "") -> Op:
    """Take `value[start:stop]` of a list, or of a text in characters."""
    source = operator("slice", source, "source", name)
    made = Op(
        "slice", source.type, (source,), {"start": start, "stop": stop}, name, line_of_caller()
    )
    if source.type == "value":
        raise refused(made, "a list or a text is needed", "source", source)
    for key in (start, stop):
        if key is not None and type(key) is not int:
            raise refused(made, "bounds are ints or None", "start", key)
    return made


def item(source: Op, index: int, *, name: str = "") -> Op:
    """Take one text of a list, `value[index]`."""
    source = operator("item", source, "source", name)
    made = Op("item", "text", (source,), {"index": index}, name, line_of_caller())
    if source.type != "list" or type(index) is not int:
        raise refused(made, "a list and an int are needed", "source", source)
    return made


def switch(
    key: Op, cases: Mapping[Any, Text], default: Text | None = None, *, name: str = ""
) -> Op:
    """Choose the case whose key equals the value of `key`; only that one is run.

    Raises:
        OperatorTypeError: cases of different types, or none.
    """
    made = Op("switch", "text", (), {}, name, line_of_caller())
    if not isinstance(cases, Mapping):
        raise refused(made, "cases are a dict, from values of the key", "cases", repr(cases))
    given = [*cases.values(), *([] if default is None else [default])]
    read = [case if isinstance(case, Op) else data(case) for case in given]
    if not read or len({case.type for case in read}) > 1 or not isinstance(key, Op):
        raise refused(made, "a key and cases of one type are needed", "cases", list(cases))
    attrs = {"keys": list(cases), "default": default is not None}
    return Op("switch", read[0].type, (key, *read), attrs, name, made.line)


def loop(
    state: Op,
    body: Callable[[Op], Op],
    *,
    rounds: int,
    until: Callable[..., bool] | None = None,
    name: str = "",
) -> Op:
    """Repeat `state = body(state)`, at most `rounds` times, until `until(state)` is true.

    The body is called once for each round, to write its operators; rounds that `until` ends are not
    run.

    Args:
        state: operator that the first round reads.
        body: function of a round's state that returns the next one's, of the same type.
        rounds: 1 to 1000.
        until: a pure function of the state's value.
    """
    state = operator("loop", state, "state", name)
    made = Op("loop", state.type, (state,), {}, name, line_of_caller())
    if type(rounds) is not int or not 1 <= rounds <= _MAX_ROUNDS:
        raise refused(made, f"a loop has 1 to {_MAX_ROUNDS} rounds", "rounds", rounds)
    if not callable(body):
        raise refused(made, "the body is a function of the state", "body", repr(body))
    states = [state]
    for _ in range(rounds):
        made_by_body = body(states[-1])
        if not isinstance(made_by_body, Op) or made_by_body.type != state.type:
            raise refused(made, f"the body must return a {state.type}", "body", made_by_body)
        states.append(made_by_body)
    if until is None:
        return states[-1]
    result = states[-1]
    for before in reversed(states[1:-1]):
        done = fn(until, before, returns="value")
        result = switch(done, {True: before}, result)
    return result


def output(source: Op, name: str) -> Op:
    """Declare a result of the graph, under a name of its own.

    Raises:
        OperatorTypeError: the source is no operator, such as a list of messages.
    """
    source = operator("output", source, "source", name)
    return Op("output", source.type, (source,), {}, name, line_of_caller())
