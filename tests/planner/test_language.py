# SPDX-License-Identifier: Apache-2.0
"""The language: what operators mean, graphs as data, and what is refused, by name and line."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from tests.planner.facades import DigestFacade
from tests.planner.graphs import RandomGraph, is_even, shout, words
from vllm_choreo.planner import Graph, Msg, Template, build, invoke, naive, ops
from vllm_choreo.planner.errors import (
    BatchLengthError,
    GraphCycleError,
    GraphError,
    OperatorFailedError,
    OperatorTypeError,
    UnknownPlaceholderError,
)


def value(op: Any, **inputs: Any) -> Any:
    """The value of an operator in the naive run."""
    return naive(build([op]).compile(**inputs), DigestFacade("baseline"))


def ask(text: Any, **options: Any) -> Any:
    return ops.llm([Msg("user", text)], **options)


def ask_in(messages: Any) -> Any:
    return ops.llm(messages)


def test_text_operators() -> None:
    a, b = ops.placeholder("a"), ops.placeholder("b")
    inputs = {"a": ["x", "y"], "b": "z"}
    assert value(ops.fmt("{}-{b}-{{{0}}}", a, b=b), **inputs) == ["x-z-{x}", "y-z-{y}"]
    assert value(ops.fmt("Revise", a, b), **inputs) == ["Revise\n\nx\n\nz", "Revise\n\ny\n\nz"]
    assert value(ops.concat(a, "!", b, sep=" "), **inputs) == ["x ! z", "y ! z"]
    assert value(ops.slice(ops.fmt("hello {}", a), 1, -1), a="you") == ["ello yo"]
    assert value(ops.fmt(""), **{}) == [""]


def test_lists() -> None:
    a = ops.placeholder("a")
    parts = ops.fn(words, a, returns="list")
    assert value(parts, a="abcdef") == [["ab", "cd", "ef"]]
    assert value(ops.item(parts, -1), a="abcdef") == ["ef"]
    assert value(ops.concat(parts, ops.slice(parts, 1)), a="abcdef") == [
        ["ab", "cd", "ef", "cd", "ef"]
    ]
    assert value(ops.data(["p", "q"])) == ["p", "q"]
    assert value(ops.data(["p", "q"], whole=True)) == [["p", "q"]]
    assert value(ops.data({"k": 1})) == [{"k": 1}]


def test_of_a_switch_only_the_chosen_case_is_run() -> None:
    a = ops.placeholder("a")
    chosen = ops.switch(ops.fn(len, a, returns="value"), {1: ask("one"), 2: a}, ask("many"))
    facade = DigestFacade("baseline")
    graph = build([chosen]).compile(a=["xx", "xxx"])
    assert naive(graph, facade)[0] == "xx"
    assert [said.header for said in facade.decodes] == [
        "<|im_start|>user\nmany<|im_end|>\n<|im_start|>assistant\n"
    ]


def test_a_loop_ends_after_its_rounds_or_when_it_is_done() -> None:
    text = ops.placeholder("text")

    def more(state: Any) -> Any:
        return ops.fmt("{}+", state)

    assert value(ops.loop(text, more, rounds=4), text="a") == ["a++++"]
    done = ops.loop(text, more, rounds=4, until=is_even)
    assert value(done, text=["a", "aa", "aaa"]) == ["a+", "aa++", "aaa+"]
    facade = DigestFacade("baseline")
    asked = ops.loop(text, lambda state: ask(state), rounds=5, until=lambda answer: True)
    naive(build([asked]).compile(text="a"), facade)
    assert len(facade.decodes) == 1


def test_a_completion_has_no_chat() -> None:
    a, facade = ops.placeholder("a"), DigestFacade("baseline")
    naive(build([ops.complete(ops.fmt("One, {}, ", a))]).compile(a=["two"]), facade)
    assert [said.header for said in facade.decodes] == ["One, two, "]


def test_messages_are_values() -> None:
    a, system = ops.placeholder("a"), {"role": "system", "content": "Be brief."}
    history = ops.chat([Msg("system", "Be brief."), Msg("user", ops.fmt("{}?", a))])
    asked = [{"role": "user", "content": "x?"}]
    assert value(history, a="x") == [[system, *asked]]
    assert value(ops.slice(history, 1), a="x") == [asked]
    assert value(ops.item(history, -1), a="x") == ["x?"]
    assert value(ops.concat(history, history), a="x") == [[system, *asked] * 2]
    chosen = ops.switch(a, {"x": history}, [Msg("user", "none")])
    assert value(chosen, a=["x", "y"]) == [
        [system, *asked],
        [{"role": "user", "content": "none"}],
    ]
    assert value(ops.output([history, Msg("assistant", a)], "said"), a="x") == [
        [system, *asked, {"role": "assistant", "content": "x"}]
    ]
    given = ops.placeholder("given", type="messages")
    facade = DigestFacade("baseline")
    naive(build([ops.llm([given, Msg("user", "And?")])]).compile(given=[[system, *asked]]), facade)
    naive(build([ops.llm([history, Msg("user", "And?")])]).compile(a=["x"]), facade)
    first, second = [said.header for said in facade.decodes]
    assert first == second and first.count("<|im_start|>") == 4


def test_a_loop_may_have_a_history_and_several_states() -> None:
    a, facade = ops.placeholder("a"), DigestFacade("baseline")

    def round_of(said: Any, last: Any) -> Any:
        answer = ask_in([said, Msg("user", last)])
        return [said, Msg("user", last), Msg("assistant", answer)], answer

    said, last = ops.loop(([Msg("system", "Be brief.")], a), round_of, rounds=2)
    (result,) = naive(build({"said": said, "last": last}).compile(a=["x"]), facade)
    assert [message["role"] for message in result["said"]] == [
        *["system", "user", "assistant", "user", "assistant"]
    ]
    assert result["said"][3]["content"] == result["said"][2]["content"]
    assert result["said"][4]["content"] == result["last"]
    ended = ops.loop((a, a), lambda x, y: (y, ops.fmt("{}+", x)), rounds=9, until=is_longer)
    assert [value(one, a=["a", "bb"]) for one in ended] == [["a", "bb"], ["a+", "bb+"]]


def is_longer(one: str, other: str) -> bool:
    return len(other) > len(one)


def is_short(text: str) -> bool:
    return len(text) < 4


def test_a_while_runs_as_long_as_its_condition_holds() -> None:
    a, facade = ops.placeholder("a"), DigestFacade("baseline")
    grown = ops.while_(is_short, a, lambda text: ops.fmt("{}{}", text, a), rounds=5)
    assert value(grown, a=["abcd", "ab", "a"]) == ["abcd", "abab", "aaaa"]
    asked = ops.while_(is_short, a, lambda text: ask(text), rounds=5)
    naive(build([asked]).compile(a=["long enough"]), facade)
    assert not facade.decodes, "what holds from the beginning needs no call"


def test_inputs_that_no_result_reads_are_accepted() -> None:
    a = ops.placeholder("a")
    unread = ops.placeholder("unread_by_all")
    graph = build([ops.loop(unread, lambda state: a, rounds=1)])
    assert naive(graph.compile(a=["x", "y"], unread_by_all=["1", "2"]), DigestFacade()) == [
        "x",
        "y",
    ]


def test_queries_are_chosen_and_put_together() -> None:
    a, b, inputs = ops.placeholder("a"), ops.placeholder("b"), {"a": ["x", "y", "z"]}
    assert value(ops.batch_slice(a, 1), **inputs) == ["y", "z"]
    assert value(ops.batch_slice(a, -1), **inputs) == ["z"]
    assert value(ops.batch_concat(a, ops.batch_slice(a, 0, 1)), **inputs) == ["x", "y", "z", "x"]
    pairs = ops.fmt("{}{}{}", ops.batch_slice(a, 1), ops.batch_slice(a, 0, -1), b)
    assert value(pairs, **inputs, b="!") == ["yx!", "zy!"]
    facade = DigestFacade()
    halves = [ask(ops.batch_slice(a, 0, 2)), ask(ops.batch_slice(a, 2))]
    graph = build([ops.batch_concat(*halves)]).compile(**inputs)
    assert list(invoke(graph, facade)) == naive(graph, DigestFacade("baseline"))
    assert len(facade.decodes) == 3
    back = Graph.from_json(graph.graph.to_json()).compile(**inputs)
    assert naive(back, DigestFacade()) == naive(graph, DigestFacade())


def test_results_are_named() -> None:
    a = ops.placeholder("a")
    by_name = build({"first": a, "second": ops.fmt("{}!", a)}).compile(a=["x"])
    assert naive(by_name, DigestFacade()) == [{"first": "x", "second": "x!"}]
    named = build([ops.output(a, "first"), ops.output(ops.fmt("{}!", a), "second")])
    assert naive(named.compile(a=["x"]), DigestFacade()) == [{"first": "x", "second": "x!"}]
    assert set(build([a, ask(a, name="answer")]).outputs) == {"a", "answer"}


def test_the_same_placeholder_twice_is_one_input() -> None:
    both = ops.fmt("{}{}", ops.placeholder("a"), ops.placeholder("a"))
    assert value(both, a="x") == ["xx"]


@pytest.mark.parametrize("seed", range(20))
def test_json_and_back(seed: int) -> None:
    compiled = RandomGraph(seed, sampled=True).compile()
    text = compiled.graph.to_json()
    back = Graph.from_json(text, {"shout": shout, "words": words, "is_even": is_even})
    assert back == compiled.graph
    assert back.to_json() == text
    shuffled = json.loads(text)
    shuffled["operators"].reverse()
    again = Graph.from_json(
        json.dumps(shuffled), {"shout": shout, "words": words, "is_even": is_even}
    )
    bound = {compiled.graph.nodes[n].name: list(v) for n, v in compiled.inputs.items()}
    names = again.placeholders
    assert naive(again.compile(**{n: bound[n] for n in names}), DigestFacade()) == naive(
        compiled, DigestFacade()
    )


def test_functions_of_a_file_are_named_by_who_loads_it() -> None:
    text = build([ops.fn(shout, "x", name="loud")]).to_json()
    with pytest.raises(GraphError, match=r"operator loud at test_language\.py:\d+.*functions"):
        Graph.from_json(text)


def test_texts_whose_order_does_not_matter_get_the_order_that_shares_most() -> None:
    a, b = ops.placeholder("a"), ops.placeholder("b")
    one = ops.concat(ask(a), b, "Read: ", sep="\n", order="any")
    other = ops.concat("Read: ", b, ask(b), sep="\n", order="any")
    said = naive(build([one, other]).compile(a="x", b="y"), DigestFacade("baseline"))
    values = list(said[0].values())
    assert [text.split("\n")[:2] for text in values] == [["Read: ", "y"]] * 2


def cycle() -> Any:
    nodes = [
        {
            "name": n,
            "kind": "fmt",
            "type": "text",
            "inputs": [o],
            "attrs": {"pieces": [0]},
            "line": line,
        }
        for n, o, line in (("one", "two", "w.py:3"), ("two", "one", "w.py:4"))
    ]
    return Graph.from_json(json.dumps({"format": 1, "operators": nodes, "outputs": {"o": "one"}}))


A = ops.placeholder("a")
REFUSED: dict[str, tuple[type[GraphError], str, Callable[[], Any]]] = {
    "a cycle": (GraphCycleError, r"operator one at w\.py:3.*one, two", cycle),
    "an unknown input": (
        UnknownPlaceholderError,
        "it has a",
        lambda: build([A]).compile(a="x", never_declared="y"),
    ),
    "a missing input": (
        UnknownPlaceholderError,
        r"operator a at test_language",
        build([A]).compile,
    ),
    "unequal lengths": (
        BatchLengthError,
        r"operator b at test_language.*2 values, where a has 1",
        lambda: build([ops.fmt("{}{}", A, ops.placeholder("b"))]).compile(a=["x"], b=["x", "y"]),
    ),
    "an empty batch": (BatchLengthError, "at least one", lambda: build([A]).compile(a=[])),
    "an input of another type": (
        OperatorTypeError,
        "text is needed",
        lambda: build([A]).compile(a=[3]),
    ),
    "a list as text": (
        OperatorTypeError,
        "list is no text",
        lambda: ops.fmt("{}", ops.fn(words, A, returns="list")),
    ),
    "no list of messages": (OperatorTypeError, "operator llm at", lambda: ops.llm(A)),
    "an unknown role": (OperatorTypeError, "a Msg by one of", lambda: ops.llm([Msg("boss", A)])),
    "a hole too many": (OperatorTypeError, r"hole \{1\}", lambda: ops.fmt("{0}{1}", A)),
    "an argument too many": (
        OperatorTypeError,
        "no hole takes argument b",
        lambda: ops.fmt("{}", A, b=A),
    ),
    "a conversion": (OperatorTypeError, "neither conversion", lambda: ops.fmt("{!r}", A)),
    "a bad template": (OperatorTypeError, "no template", lambda: ops.fmt("{", A)),
    "an operator as text": (OperatorTypeError, "put it into fmt or concat", lambda: f"{A}"),
    "an operator as condition": (OperatorTypeError, "use switch", lambda: bool(A)),
    "an operator as list": (OperatorTypeError, "use slice, item or fn", lambda: list(A)),
    "no function": (OperatorTypeError, "fn takes a function", lambda: ops.fn("f", A)),
    "an unknown type": (OperatorTypeError, "the types are", lambda: ops.fn(len, A, returns="int")),
    "a switch of two types": (
        OperatorTypeError,
        "cases of one type",
        lambda: ops.switch(A, {"x": A, "y": ops.fn(words, A, returns="list")}),
    ),
    "too many rounds": (OperatorTypeError, "1 to 1000", lambda: ops.loop(A, lambda s: s, rounds=0)),
    "a list of states": (
        OperatorTypeError,
        r"operator loop at test_language.*several states are a tuple",
        lambda: ops.loop([A, A], lambda one: one, rounds=2),
    ),
    "a body of one state for two": (
        OperatorTypeError,
        r"operator loop at test_language.*the body raised TypeError",
        lambda: ops.loop((A, A), lambda one: one, rounds=2),
    ),
    "a body that appends to its history": (
        OperatorTypeError,
        r"operator loop at test_language.*the body raised AttributeError.*append",
        lambda: ops.loop([Msg("user", A)], lambda said: said.append(A), rounds=2),
    ),
    "a body that unpacks its history": (
        OperatorTypeError,
        r"operator chat at test_language.*\[history, Msg",
        lambda: ops.loop([Msg("user", A)], lambda said: [*said, Msg("user", A)], rounds=2),
    ),
    "a body of fewer states": (
        OperatorTypeError,
        "the body must return text, text",
        lambda: ops.loop((A, A), lambda one, two: (one,), rounds=2),
    ),
    "a condition that is none": (
        OperatorTypeError,
        "a function of the state's value",
        lambda: ops.while_(True, A, lambda one: one, rounds=2),  # type: ignore[arg-type]
    ),
    "a condition that still holds": (
        OperatorFailedError,
        "no case has the key True",
        lambda: value(ops.while_(bool, A, lambda one: one, rounds=3), a="x"),
    ),
    "a history as text": (
        OperatorTypeError,
        "messages is no text",
        lambda: ops.fmt("{}", ops.chat([Msg("user", A)])),
    ),
    "a history of something else": (
        OperatorTypeError,
        "each is a Msg",
        lambda: ops.chat([Msg("user", A), A]),
    ),
    "a message by an unknown role": (
        OperatorTypeError,
        "messages is needed, this is value",
        lambda: build([ops.placeholder("h", type="messages")]).compile(
            h=[[{"role": "boss", "content": "x"}]]
        ),
    ),
    "results that are one history": (
        OperatorTypeError,
        "in the list of results",
        lambda: build([Msg("user", A)]),  # type: ignore[list-item]
    ),
    "a batch of two lengths": (
        BatchLengthError,
        r"operator both at test_language.*what it reads has 1 and 2 rows",
        lambda: build([ops.fmt("{}{}", A, ops.batch_slice(A, 1), name="both")]).compile(
            a=["x", "y"]
        ),
    ),
    "results of two lengths": (
        BatchLengthError,
        "results have 1 and 2 rows",
        lambda: build([A, ops.batch_slice(A, 1)]).compile(a=["x", "y"]),
    ),
    "a batch of nothing": (
        BatchLengthError,
        "leaves no query",
        lambda: build([ops.batch_slice(A, 5)]).compile(a=["x", "y"]),
    ),
    "queries of two types": (
        OperatorTypeError,
        "sources of one type",
        lambda: ops.batch_concat(A, [Msg("user", A)]),
    ),
    "no body": (OperatorTypeError, "function of the state", lambda: ops.loop(A, "s", rounds=2)),  # type: ignore[arg-type]
    "a slice of a text": (OperatorTypeError, "this is a str", lambda: ops.slice("abc", 1)),  # type: ignore[arg-type]
    "an item of a text": (OperatorTypeError, "this is a str", lambda: ops.item("abc", 1)),  # type: ignore[arg-type]
    "cases without keys": (OperatorTypeError, "a dict", lambda: ops.switch(A, ["x"])),  # type: ignore[arg-type]
    "no list": (OperatorTypeError, "a list of Msg", lambda: ops.llm(3)),  # type: ignore[arg-type]
    "no results": (GraphError, "a list of operators", lambda: build(3)),  # type: ignore[arg-type]
    "a template without an end": (GraphError, "a message needs an end", lambda: Template("", "")),
    "a template with another hole": (GraphError, "no hole but", lambda: Template("{who}:")),
    "two of a name": (
        GraphError,
        "another operator has this name",
        lambda: build([ask(A, name="x"), ask(A, name="x")]),
    ),
    "a function that raises": (
        OperatorFailedError,
        r"operator boom at test_language.*ZeroDivisionError",
        lambda: value(ops.fn(lambda: 1 / 0, name="boom")),
    ),
    "a function of another type": (
        OperatorTypeError,
        "declared to return text",
        lambda: value(ops.fn(len, A), a="x"),
    ),
    "no such item": (
        OperatorFailedError,
        "a list of 3 has no item 7",
        lambda: value(ops.item(ops.fn(words, A, returns="list"), 7), a="x"),
    ),
    "no such case": (
        OperatorFailedError,
        "no case has the key 'x'",
        lambda: value(ops.switch(A, {"y": A}), a="x"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_operator_and_its_line(case: str) -> None:
    error, match, make = REFUSED[case]
    with pytest.raises(error, match=match) as raised:
        make()
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value) and type(again) is type(raised.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2, "operators": [], "outputs": {}}', "nonsense"]
)
def test_what_is_no_graph_is_refused(text: str) -> None:
    with pytest.raises(GraphError):
        Graph.from_json(text)


WRITTEN = {
    "name": "a",
    "kind": "fmt",
    "type": "text",
    "inputs": [],
    "attrs": {"pieces": ["x"]},
    "line": "w.py:3",
}


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"kind": "sum"}, r"operator a at w\.py:3: no operator of this language"),
        ({"attrs": {"text": "x"}}, r"operator a at w\.py:3: fmt has the attributes \['pieces'\]"),
        ({"attrs": {"pieces": "x"}}, r"operator a at w\.py:3: fmt has the attributes \['pieces'\]"),
        ({"attrs": {"pieces": [0]}}, r"operator a at w\.py:3: a piece is text, or the number"),
        ({"inputs": ["b"]}, r"operator a at w\.py:3: it reads an operator that is not there"),
        ({"inputs": "b"}, r"an operator that is not there \(text\.operators\[0\]\.inputs=b\)"),
        ({"type": None}, r"no operator of this language \(text\.operators\[0\]\.type=None\)"),
    ],
)
def test_an_operator_that_is_none_is_named(changed: dict[str, object], match: str) -> None:
    written = {"format": 1, "operators": [{**WRITTEN, **changed}], "outputs": {"a": "a"}}
    with pytest.raises(GraphError, match=match):
        Graph.from_json(json.dumps(written))
