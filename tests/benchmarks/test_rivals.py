# SPDX-License-Identifier: Apache-2.0
"""Rivals' settings: layouts as they are described, files as they are given out, and sides that are
asked the same in turn.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.harness import record
from benchmarks.harness.texts import long_text
from benchmarks.rivals import __main__ as program
from benchmarks.rivals import layouts
from benchmarks.rivals.answers import AnswerFile
from benchmarks.rivals.plans import Follower, makers, plans_of
from benchmarks.rivals.questions import Question, f1, read_questions
from benchmarks.rivals.sides import STOCK, WAYS, Side, count_requests, run, sides_of
from benchmarks.rivals.tables import LAYOUTS, TABLES
from tests.chat.chat_templates import tokenizer_of
from tests.chat.test_chats import Chats, turn
from vllm_choreo.chat.cutter import end_tokens


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


QUESTIONS = [Question("Who?", ("a", "b"), ("x",)), Question("Where?", ("b", "c"), ("said 1",))]


def test_ragqa_sends_each_passage_once_behind_the_system_text_and_then_composes() -> None:
    asks = asked(layouts.ragqa(QUESTIONS, passages=0, max_tokens=9))
    assert [ask.kind for ask in asks] == ["warm", "warm", "timed", "warm", "timed"]
    warm = [ask.chat[0]["content"] for ask in asks if ask.kind == "warm"]
    assert warm == [f"{layouts.QA_SYSTEM}{one}\n\n" for one in "abc"]
    timed = [ask for ask in asks if ask.kind == "timed"]
    assert [ask.gold for ask in timed] == [("x",), ("said 1",)]
    assert timed[1].chat[0]["content"].startswith(f"{layouts.QA_SYSTEM}b\n\nc\n\nQuestion: Where?")
    assert count_requests(lambda: layouts.ragqa(QUESTIONS, passages=0, max_tokens=9)) == 2


def test_what_stands_before_the_passages_is_a_piece_of_its_own() -> None:
    """So the same passages are found behind it, in whatever order, and begin pieces themselves."""
    chats = Chats("smollm2", cut="content")
    passages = [f"Title {n}\n" + f"The house of number {n} has a red door. " * 30 for n in range(3)]

    def pieces(order: list[int]) -> list[tuple[int, ...]]:
        text = layouts.QA_SYSTEM + "".join(f"{passages[n]}\n\n" for n in order) + "Question: Who?"
        split = chats.split([turn("user", text)])
        return [split.token_ids[part.start : part.stop] for part in split.parts]

    known = {piece for number in range(3) for piece in pieces([number])}
    found = [piece in known for piece in pieces([2, 0, 1])]
    assert found.count(False) <= 3 and found.count(True) >= 9, found


def test_plans_tell_what_is_left_to_be_encoded() -> None:
    """Of documents in another order nothing but the seams; with prefixes all behind the first."""
    tokenizer = tokenizer_of("smollm2")
    long = lambda num_tokens, seed: long_text(tokenizer, num_tokens, seed)  # noqa: E731
    sizes = {"system_tokens": 150, "documents": 3, "document_tokens": 400, "orders": 3}
    make = lambda: layouts.permuted(long, **sizes, max_tokens=1)  # noqa: E731
    rows = plans_of("permuted", make, Follower(tokenizer, end_tokens(tokenizer, {})))
    assert len(rows) == 3 == count_requests(make)
    for row in rows:
        assert row["seen"] <= row["alone"] < 100 < row["prompt_tokens"]
    # The drawn orders that begin with another document than the first one.
    assert max(row["text"] for row in rows) > 600
    assert {"permuted", "multidoc", "agents"} == set(makers(long, [], 0))


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


SUPPORTED: dict[str, dict[str, Any]] = {
    "musique": {
        "paragraphs": [{"idx": n, "title": "T", "paragraph_text": f"{n}."} for n in range(5)],
        "question_decomposition": [{"paragraph_support_idx": n} for n in (4, 2)],
    },
    "hotpotqa": {
        "context": [[f"{n}", ["On", f"{n}."]] for n in range(5)],
        "supporting_facts": [["4", 0], ["2", 1], ["2", 0]],
    },
    "hotpotqa_columns": {
        "context": {"title": [*"01234"], "sentences": [[f"{n}."] for n in range(5)]},
        "supporting_facts": {"title": ["4", "2", "2"], "sent_id": [0, 1, 0]},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_fewer_passages_are_those_that_support_and_the_first_others(
    form: str, tmp_path: Path
) -> None:
    file = tmp_path / "questions"
    file.write_text(json.dumps([FORMS[form] | SUPPORTED.get(form, {})]))
    (question,) = read_questions(file, 0)
    assert question.with_fewer(0) == question
    if form not in SUPPORTED:
        with pytest.raises(SystemExit, match="--passages 2: the file does not tell"):
            question.with_fewer(2)
        return
    for number, kept in {1: "24", 2: "24", 3: "024", 4: "0124", 5: "01234", 9: "01234"}.items():
        fewer = question.with_fewer(number)
        assert [passage[-2] for passage in fewer.passages] == [*kept]
        assert [fewer.passages[at][-2] for at in sorted(fewer.supporting)] == ["2", "4"]


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
    assert sides_of(None, {}, "first:16", None) == []
    named = {f"rivals_{name}" for name in (*LAYOUTS, "plans")}
    assert named == set(TABLES) and set(layouts.SIZES) == set(LAYOUTS)
    with pytest.raises(SystemExit, match="needs --adapter"):
        sides_of(None, {"adapter": httpx.Client()}, "first:16", None)


class FakeServer:
    """A server that says how many messages it was sent; keeps what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        events = [
            {"choices": [{"delta": {"content": f"said {len(body['messages'])}"}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
        ]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))

    def client(self, key: str = "k") -> httpx.Client:
        headers = {"Authorization": key}
        return httpx.Client(
            transport=httpx.MockTransport(self), base_url="http://x", headers=headers
        )


def sides_on(stock: FakeServer, ours: FakeServer, ways: list[str]) -> list[Side]:
    return sides_of(stock.client(), {way: ours.client(way) for way in ways}, "first:16", "mine")


def test_all_sides_are_asked_the_same_in_turn() -> None:
    stock, ours = FakeServer(), FakeServer()
    sides = sides_on(stock, ours, list(WAYS))
    sizes = {"agents": 2, "rounds": 2, "input_tokens": 4, "prefix_tokens": 5, "max_tokens": 3}
    told: list[Any] = []
    rows = run("agents", sides, lambda: layouts.agents(text, **sizes), True, told.append, 5)
    assert [row for group in told for row in group] == rows
    assert Counter(row["side"] for row in rows) == dict.fromkeys((STOCK, *WAYS), 4)
    assert sorted({row["number"] for row in rows}) == [5, 6, 7, 8]
    assert all(row["same"] == 1 and row["f1_to_stock"] == 1.0 for row in rows)
    assert not any("vllm_xargs" in body for body in stock.bodies)
    # Each way has its key; all but the adapter's ask for the model.
    said = dict(zip(ours.keys, ours.bodies, strict=True))
    assert set(said) == set(WAYS)
    assert {way: body["model"] for way, body in said.items()} == {
        **dict.fromkeys(WAYS, "m"), "adapter": "mine",
    }  # fmt: skip
    xargs = {way: body["vllm_xargs"] for way, body in said.items()}
    assert xargs["repair"] == {**xargs["seen"], "choreo_repair": "first:16"}
    assert xargs["adapter"] == xargs["alone"] and xargs["alone"]["choreo_auto_context"] == "alone"
    for number, body in enumerate(stock.bodies):
        for other in ours.bodies[len(WAYS) * number : len(WAYS) * (number + 1)]:
            assert other["messages"] == body["messages"] and other["ignore_eos"]
    table = TABLES["rivals_agents"].markdown([{k: str(v) for k, v in row.items()} for row in rows])
    assert "| stock | 4 | 7 |" in table and "F1 to gold" not in table and "McNemar" not in table


def test_a_run_that_was_ended_goes_on_from_its_answers(tmp_path: Path) -> None:
    """No question is asked twice but the one at which it was ended."""
    path, about = tmp_path / "answers", {"layout": "ragqa"}
    sides = sides_on(FakeServer(), FakeServer(), ["seen"])

    def go_on(num_requests: int | None = None) -> AnswerFile:
        """Answers of a run that ends after so many requests."""
        file = AnswerFile(path, about, len(sides), goes_on=True)

        def on_answers(rows: list[dict[str, Any]]) -> None:
            file.add(rows)
            if num_requests is not None and len(file.rows) == num_requests * len(sides):
                raise KeyboardInterrupt

        left = QUESTIONS[file.num_done :]
        if left:
            make = lambda: layouts.ragqa(left, passages=0, max_tokens=9)  # noqa: E731
            run("ragqa", sides, make, True, on_answers, file.next_number)
        return file

    with pytest.raises(KeyboardInterrupt):
        go_on(4)  # the second question's first passage has been sent
    with path.open("a") as file:
        file.write('{"layout": "rag')
    half = AnswerFile(path, about, len(sides), goes_on=True)
    assert half.num_done == 1 and half.next_number == 3 and len(half.rows) == 6
    done = go_on()
    assert done.num_done == 2 and len(path.read_text().splitlines()) == 1 + len(done.rows)
    assert done.rows == AnswerFile(path, about, len(sides), goes_on=True).rows == go_on().rows
    with pytest.raises(SystemExit, match="another run"):
        AnswerFile(path, {"layout": "other"}, len(sides), goes_on=True)
    assert AnswerFile(path, about, len(sides), goes_on=False).rows == []


def test_answers_are_compared_with_gold_and_with_the_text_question_by_question() -> None:
    def row(number: int, side: str, f1_of: float, seconds: float) -> dict[str, str]:
        found = {"data": "some", "layout": "ragqa", "number": number, "side": side}
        found |= {"kind": "timed", "f1": f1_of}
        found |= {"right": int(f1_of == 1), "first_token_s": seconds, "seconds": 9, "same": 0}
        found |= {"prompt_tokens": 8, "cached_tokens": 4, "f1_to_stock": 0}
        return {key: str(value) for key, value in found.items()}

    quality = {STOCK: (1, 1, 1, 0.5), "seen": (1, 0, 0, 1)}
    rows = [
        row(number, side, found, 2.0 if side == STOCK else 0.5)
        for side, all_found in quality.items()
        for number, found in enumerate(all_found)
    ]
    # Another file's questions have the same numbers.
    others = [{**row, "data": "others", "f1": "0", "right": "0"} for row in rows]
    head, _, *lines = TABLES["rivals_ragqa"].markdown([*rows, *others]).splitlines()
    names = [name.strip() for name in head.strip("|").split("|")]
    cells = [
        dict(zip(names, (c.strip() for c in line.strip("|").split("|")), strict=True))
        for line in lines
    ]
    text, seen, *rest = cells
    assert [cell["questions of"] for cell in cells] == ["some", "some", "others", "others"]
    assert [cell["right"] for cell in rest] == ["0", "0"]
    assert text["right"] == "3" and seen["right"] == "2"
    assert seen["minus that of stock"].startswith("-0.375 [")
    assert (seen["stock alone"], seen["side alone"]) == ("2", "1")
    assert float(seen["McNemar's p"]) == 1.0  # 2 to 1: by a fair coin as often as not
    assert seen["stock / side"] == "4.0 [4.0, 4.0]" and text["stock / side"] == ""


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
    assert status == 0 and len(answers.read_text().splitlines()) == 1 + 12
    rows = record.read_csv("rivals_permuted")
    by_side = {side: [row for row in rows if row["side"] == side] for side in (STOCK, *WAYS)}
    assert all(row["same"] == "1" for row in by_side["exact"])
    last = {side: int(found[-1]["cached_tokens"]) for side, found in by_side.items() if found}
    for way in ("seen", "alone"):
        assert last[way] > last[STOCK] and last[way] > 0.5 * int(rows[-1]["prompt_tokens"])


@pytest.mark.exhaustive  # two servers of their own
def test_the_program_asks_questions_over_passages(results: Path, tmp_path: Path) -> None:
    """And once more, of more questions: only of those that are new."""
    answers, data = tmp_path / "answers", tmp_path / "questions"
    texts = {f"House {n}": f"House {n} is of colour {n}. " * 20 for n in range(4)}
    passages = [{"title": title, "text": text} for title, text in texts.items()]
    item = {"question": "Which colour is house 2?", "answers": ["colour 2"], "ctxs": passages}
    data.write_text(json.dumps([item, {**item, "ctxs": passages[::-1]}]))
    words = ["ragqa", "--data", str(data), "--max-tokens", "8", "--answers", str(answers)]
    for limit in (1, 2):
        assert program.main([*words, "--limit", str(limit)]) == 0
        rows = [row for row in record.read_csv("rivals_ragqa") if row["kind"] == "timed"]
        assert Counter(row["side"] for row in rows) == dict.fromkeys(
            (STOCK, "seen", "alone", "repair"), limit
        )
        assert "answer" not in rows[0]
    reused = {row["side"]: int(row["cached_tokens"]) for row in rows[:4]}
    assert reused[STOCK] < reused["alone"] <= reused["seen"]


def test_results_of_other_questions_are_kept(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other files, and with --add those of the same file's earlier questions."""

    @contextmanager
    def servers(args: Any) -> Iterator[Any]:
        stock, ours = FakeServer(), FakeServer()
        yield stock.client(), {way: ours.client(way) for way in args.ways}

    monkeypatch.setattr(program, "_servers", servers)

    def asked(name: str, num_items: int, *words: str) -> list[dict[str, str]]:
        data = tmp_path / f"{name}.json"
        data.write_text(json.dumps([FORMS["musique"]] * num_items))
        told = ["ragqa", "--data", str(data), "--model", "m", "--ways", "seen", *words]
        assert program.main(told) == 0
        return record.read_csv("rivals_ragqa")

    (results / "rivals_ragqa.csv").unlink(missing_ok=True)
    first = asked("musique", 2)
    assert len(first) == 2 * 2 and {row["data"] for row in first} == {"musique"}
    both = asked("hotpotqa", 1)
    assert both[:4] == first and len(both) == 4 + 2
    added = asked("musique", 4, "--add", "--limit", "1")
    of_musique = [row for row in added if row["data"] == "musique"]
    assert of_musique[:4] == first and len(of_musique) == 6 and len(added) == 8
    assert len({row["number"] for row in of_musique}) == 3
    with pytest.raises(SystemExit, match="have answers of seen, stock, not of alone, stock"):
        asked("musique", 4, "--add", "--ways", "alone")
    for other in (("--model", "other"), ("--repair", "first:8"), ("--adapter", "a")):
        with pytest.raises(SystemExit, match="another model, --repair, --adapter"):
            asked("musique", 4, "--add", *other)
    assert len(asked("musique", 1)) == 2 + 2, "asked anew"
    with pytest.raises(SystemExit):
        asked("musique", 1, "--add", "--answers", str(tmp_path / "answers"))
