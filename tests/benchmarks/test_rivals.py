# SPDX-License-Identifier: Apache-2.0
"""Rivals' settings: layouts as they are described, files as they are given out, and sides that are
asked the same in turn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.harness import record
from benchmarks.rivals import __main__ as program
from benchmarks.rivals import layouts
from benchmarks.rivals.questions import Question, f1, read_questions
from benchmarks.rivals.sides import STOCK, WAYS, run, sides_of
from benchmarks.rivals.tables import LAYOUTS, TABLES


def text(num_tokens: int, seed: int) -> str:
    return f"<{seed}>" + " w" * num_tokens


def asked(layout: layouts.Layout, answer: str = "said") -> list[layouts.Ask]:
    """All requests of a layout whose answers are all the same."""
    found = [next(layout)]
    while True:
        try:
            found.append(layout.send(answer))
        except StopIteration:
            return found


def test_permuted_sends_all_documents_in_one_turn_in_several_orders() -> None:
    sizes = {"system_tokens": 10, "documents": 5, "document_tokens": 4, "orders": 10}
    asks = asked(layouts.permuted(text, **sizes, max_tokens=3))
    assert [ask.kind for ask in asks] == ["warm", *["timed"] * 10]
    orders = [ask.chat[1]["content"].split("\n\n") for ask in asks]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) > 5
    assert {ask.chat[0]["content"] for ask in asks} == {text(10, 0)}


def test_multidoc_draws_documents() -> None:
    sizes = {"system_tokens": 1, "documents": 9, "document_tokens": 4, "per_request": 3}
    asks = asked(layouts.multidoc(text, **sizes, requests=7, max_tokens=3))
    drawn = [ask.chat[1]["content"].split("\n\n")[:-1] for ask in asks]
    assert len(drawn) == 7 and all(len(set(one)) == 3 for one in drawn)


def test_ragqa_sends_each_passage_once_behind_the_system_text_and_then_composes() -> None:
    questions = [Question("Who?", ("a", "b"), ("x",)), Question("Where?", ("b", "c"), ("y",))]
    asks = asked(layouts.ragqa(questions, max_tokens=9))
    warm = [ask.chat[0]["content"] for ask in asks if ask.kind == "warm"]
    assert warm == [f"{layouts.QA_SYSTEM}{one}\n\n" for one in "abc"]
    timed = [ask for ask in asks if ask.kind == "timed"]
    assert [ask.gold for ask in timed] == [("x",), ("y",)]
    assert timed[1].chat[0]["content"].startswith(f"{layouts.QA_SYSTEM}b\n\nc\n\nQuestion: Where?")


def test_agents_read_what_all_others_said_last() -> None:
    sizes = {"agents": 3, "rounds": 2, "input_tokens": 4, "prefix_tokens": 5}
    asks = asked(layouts.agents(text, **sizes, max_tokens=3), "yes")
    heard = [[m["content"][:7] for m in ask.chat if "said:" in m["content"]] for ask in asks]
    assert heard[:3] == [[], ["Agent 0"], ["Agent 0", "Agent 1"]]
    assert heard[3:] == [["Agent 1", "Agent 2"], ["Agent 0", "Agent 2"], ["Agent 0", "Agent 1"]]


FORMS: dict[str, dict[str, Any]] = {
    "musique": {
        "question": "Who?",
        "answer": "Anna",
        "answer_aliases": ["Ann"],
        "paragraphs": [{"title": "T", "paragraph_text": "One."}],
    },
    "hotpotqa": {"question": "Who?", "answer": "Anna", "context": [["T", ["On", "e."]]]},
    "hotpotqa_columns": {
        "question": "Who?",
        "answer": "Anna",
        "context": {"title": ["T"], "sentences": [["One."]]},
    },
    "cacheblend": {
        "question": "Who?",
        "answers": ["Anna"],
        "ctxs": [{"title": "T", "text": "One."}],
    },
    "longbench": {"input": "Who?", "answers": ["Anna"], "context": "Passage 1:\nT\nOne.\n"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_lines", [True, False])
def test_files_of_questions_are_read(form: str, in_lines: bool, tmp_path: Path) -> None:
    file, item = tmp_path / "questions", FORMS[form]
    lines = "\n".join(json.dumps(item) for _ in range(3))
    file.write_text(lines if in_lines else json.dumps([item] * 3))
    questions = read_questions(file, 2)
    assert len(questions) == 2 and len(read_questions(file, 0)) == 3
    assert (questions[0].text, questions[0].passages) == ("Who?", ("T\nOne.",))
    assert questions[0].answers[0] == "Anna"


def test_what_is_no_file_of_questions_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other"
    file.write_text(json.dumps([{"question": "Who?"}]))
    with pytest.raises(SystemExit, match="an item needs question"):
        read_questions(file, 0)


def test_f1_is_that_of_squad() -> None:
    assert f1("The Shed, green!", ["green shed"]) == 1.0
    assert f1("a red shed", ["green shed", "blue"]) == 0.5
    assert f1("", ["green"]) == 0.0 and f1("yes", []) == 0.0


def test_one_server_is_enough_and_every_layout_has_a_table() -> None:
    assert sides_of(None, None, WAYS) == []
    assert {f"rivals_{name}" for name in LAYOUTS} == set(TABLES) and set(program.OPTIONS) == set(
        LAYOUTS
    )


class FakeServer:
    """A server that says how many messages it was sent; counts what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        self.bodies.append(body)
        events = [
            {"choices": [{"delta": {"content": f"said {len(body['messages'])}"}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


def test_all_sides_are_asked_the_same_in_turn() -> None:
    servers = FakeServer(), FakeServer()
    clients = [httpx.Client(transport=httpx.MockTransport(s), base_url="http://x") for s in servers]
    sides = sides_of(*clients, WAYS)
    sizes = {"agents": 2, "rounds": 2, "input_tokens": 4, "prefix_tokens": 5, "max_tokens": 3}
    rows = run("agents", sides, lambda: layouts.agents(text, **sizes), ignore_eos=True)
    assert Counter(row["side"] for row in rows) == {STOCK: 4, "exact": 4, "choreo": 4}
    assert all(row["same"] == 1 and row["f1_to_stock"] == 1.0 for row in rows)
    stock, ours = (server.bodies for server in servers)
    assert not any("vllm_xargs" in body for body in stock)
    assert {body["vllm_xargs"]["choreo_auto"] for body in ours} == set(WAYS)
    for number, body in enumerate(stock):
        for other in ours[2 * number : 2 * number + 2]:
            assert other["messages"] == body["messages"] and other["ignore_eos"]
    table = TABLES["rivals_agents"].markdown([{k: str(v) for k, v in row.items()} for row in rows])
    assert "| stock | 4 | 7 |" in table and "F1 to gold" not in table


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "RESULTS", folder)
        yield folder


@pytest.mark.exhaustive  # two servers of their own
def test_the_program_asks_two_servers(results: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers"
    words = "permuted --system-tokens 100 --documents 3 --document-tokens 120 --orders 2"
    status = program.main([*words.split(), "--max-tokens", "4", "--answers", str(answers)])
    assert status == 0 and len(answers.read_text().splitlines()) == 9
    rows = record.read_csv("rivals_permuted")
    by_side = {s: [r for r in rows if r["side"] == s] for s in (STOCK, *WAYS)}
    assert all(row["same"] == "1" for row in by_side["exact"])
    last = {side: int(found[-1]["cached_tokens"]) for side, found in by_side.items()}
    assert last["choreo"] > last[STOCK] and last["choreo"] > 0.5 * int(rows[-1]["prompt_tokens"])
