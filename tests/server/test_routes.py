# SPDX-License-Identifier: Apache-2.0
"""The routes under /v1/choreo, on a real server: what they do, answer and refuse."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from tests.server.serving import (
    Session,
    cpu_seconds,
    leave,
    num_generated,
    num_running,
    wait_until_idle,
)
from vllm_choreo.server.answers import (
    ChunkAnswer,
    ClosedAnswer,
    EvictedAnswer,
    FailedCallEvent,
    FreedAnswer,
    ListAnswer,
    MessageEvent,
    PinAnswer,
    ProvenanceAnswer,
    ResultsAnswer,
    SessionAnswer,
)
from vllm_choreo.server.errors import ErrorAnswer
from vllm_choreo.testing.server import Server
from vllm_choreo.wire.messages import MessageAnswer, ShortMessageAnswer

GREEDY = {"temperature": 0, "max_tokens": 6}
SHED = "The shed behind the house is green, and its door is red.\n"
ANNA = "Anna owns a bicycle, a boat and two dogs.\n"


def check(form: Any, answer: Any) -> Any:
    """`answer`, if it has the form that /openapi.json promises."""
    TypeAdapter(form).validate_python(answer, strict=True)
    return answer


def sources(session: Session, message: dict[str, Any]) -> list[str]:
    """What a message carries traces of."""
    name = message["id"].rpartition("/")[2]
    answer = session.message(f"{name}/provenance").json()
    found: list[str] = check(ProvenanceAnswer, answer)["provenance"]
    return found


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = check(ErrorAnswer, answer.json())["error"]
    assert error["code"] == status
    return error


# -- sessions ------------------------------------------------------------------------------------


def test_session_from_opening_to_closing(server: Server, alpha: httpx.Client) -> None:
    opened = alpha.post("/v1/choreo/sessions", json={"mode": "exact", "ttl_seconds": 60})
    session = check(SessionAnswer, opened.json())
    assert session["mode"] == "exact" and session["ttl_seconds"] == 60
    assert session["model"] == server.model and session["max_model_len"] == 2048
    assert abs(session["expires_at"] - time.time() - 60) < 5
    assert abs(session["created"] - time.time()) < 5
    path = f"/v1/choreo/sessions/{session['id']}"
    made = alpha.post(f"{path}/messages", json={"type": "prefill", "content": SHED}).json()
    usage = check(SessionAnswer, alpha.get(path).json())["usage"]
    assert usage["messages"] == 1 and usage["tokens"] == made["num_tokens"]
    assert usage["resident_tokens"] == made["num_tokens"] and usage["pinned_messages"] == 0
    closed = check(ClosedAnswer, alpha.delete(path).json())
    assert closed["id"] == session["id"]
    for answer in (alpha.get(path), alpha.delete(path), alpha.get(f"{path}/messages")):
        assert error_of(answer, 404)["type"] == "UnknownSessionError"


def test_session_needs_no_body(alpha: httpx.Client) -> None:
    session = check(SessionAnswer, alpha.post("/v1/choreo/sessions").json())
    assert session["mode"] == "choreo" and session["ttl_seconds"] == 3600
    alpha.delete(f"/v1/choreo/sessions/{session['id']}")


# -- one call ------------------------------------------------------------------------------------


def test_prefill_then_decode(session: Session) -> None:
    shed = check(MessageAnswer, session.call(type="prefill", content=SHED, save_as="s"))
    assert shed["id"] == f"{session.id}/s" and shed["session"] == session.id
    assert shed["type"] == "prefill" and shed["finish_reason"] is None
    assert shed["text"] == SHED and shed["num_tokens"] == len(shed["token_ids"])
    assert shed["generated_token_ids"] == [] and shed["logprobs"] is None
    answer = check(
        MessageAnswer,
        session.call(
            content="The shed is", parents=["s"], sampling_params={**GREEDY, "logprobs": 2}
        ),
    )
    assert answer["position"] == shed["num_tokens"] and answer["finish_reason"] == "length"
    assert answer["parents"] == [{"id": shed["id"], "start": None, "stop": None}]
    assert answer["text"] == "The shed is" + answer["generated_text"]
    assert sources(session, answer) == [shed["id"]]
    # A token that was sampled greedily is the likeliest at its position.
    assert [at[str(token)]["rank"] for at, token in logprobs(answer)] == [1] * 6
    usage = answer["usage"]
    assert usage["prompt_tokens"] == shed["num_tokens"] + answer["num_tokens"] - 6
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"]["cached_tokens"] == shed["num_tokens"]
    assert usage["reused_tokens"] == shed["num_tokens"] and usage["exact"]
    assert answer["metrics"]["latency"] >= answer["metrics"]["ttft"] > 0
    assert session.message("s").json() == shed


def logprobs(message: dict[str, Any]) -> list[tuple[dict[str, Any], int]]:
    """Of each generated token, with the token."""
    return list(zip(message["logprobs"], message["generated_token_ids"], strict=True))


def test_a_call_is_the_request_on_the_concatenated_text(
    session: Session, alpha: httpx.Client, server: Server
) -> None:
    parts = [SHED, ANNA]
    for name, part in zip("ab", parts, strict=True):
        session.call(
            type="prefill", content=part, save_as=name, parents=[] if name == "a" else ["a"]
        )
    ours = session.call(content="Anna", parents=["a", "b"], sampling_params=GREEDY)
    ids = [token for name in "ab" for token in session.message(name).json()["token_ids"]]
    plain = alpha.post(
        "/v1/completions",
        json={
            "model": server.model,
            "prompt": ids + ours["token_ids"][: -len(ours["generated_token_ids"])],
            **GREEDY,
        },
    ).json()
    assert ours["usage"]["exact"]
    assert ours["generated_text"] == plain["choices"][0]["text"]


def test_chat_turns_are_rendered_with_the_template(
    session: Session, shallow_model_path: Path
) -> None:
    from transformers import AutoTokenizer

    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    tokenizer = AutoTokenizer.from_pretrained(shallow_model_path)
    for kind in ("prefill", "decode"):
        message = session.call(type=kind, messages=turns)
        rendered = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=kind == "decode"
        )
        assert message["text"].removesuffix(message["generated_text"] or "\0") == rendered
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        assert message["token_ids"][: len(ids)] == ids


def test_positions_parts_and_copies(session: Session) -> None:
    shed = session.call(type="prefill", content=SHED, save_as="shed")
    anna = session.call(type="prefill", content=ANNA, save_as="anna", parents=["shed"])
    part = {"id": "shed", "start": 2, "stop": 6}
    answer = session.call(
        content=shed["token_ids"][:2],
        parents=[part, anna["id"]],
        offsets=[10, 30],
        new_offset=100,
        sampling_params=GREEDY,
    )
    assert answer["position"] == 100
    assert answer["parents"][0] == {**part, "id": shed["id"]}
    assert answer["usage"]["repositioned_tokens"] == 4 + anna["num_tokens"]
    assert not answer["usage"]["exact"]
    assert sources(session, answer) == sorted([shed["id"], anna["id"]])
    copy = session.call(type="prefill", copy_of="anna", save_as="clean")
    assert copy["token_ids"] == anna["token_ids"] and copy["parents"] == []
    assert sources(session, copy) == [anna["id"]]


def test_exact_calls_and_denied_messages(session: Session) -> None:
    session.call(type="prefill", content=SHED, save_as="secret")
    session.call(type="prefill", content=ANNA, save_as="plan", parents=["secret"])
    exact = session.call(
        content="So", parents=["plan"], mode="exact", sampling_params={**GREEDY, "max_tokens": 1}
    )
    assert exact["usage"]["exact"]
    refused = session.post({"content": "So", "parents": ["plan"], "deny": ["secret"]})
    error = error_of(refused, 400)
    assert error["type"] == "DeniedMessageError"
    assert f"{session.id}/secret" in error["value"] and f"{session.id}/plan" in error["value"]


def test_structured_outputs_and_stop_strings(session: Session) -> None:
    session.call(type="prefill", content=SHED, save_as="shed")
    chosen = session.call(
        content="The door is",
        parents=["shed"],
        sampling_params={**GREEDY, "structured_outputs": {"choice": [" red", " blue"]}},
    )
    assert chosen["generated_text"] in (" red", " blue")
    call = {"content": "1, 2, 3, 4,", "sampling_params": {"temperature": 0, "max_tokens": 12}}
    whole = session.call(**call)["generated_text"]
    stop = whole[4:6]
    call["sampling_params"] |= {"stop": [stop]}
    stopped = session.call(**call)
    assert stopped["finish_reason"] == "stop"
    assert stopped["generated_text"] == whole.partition(stop)[0]
    events = session.events(**call)
    pieces = "".join(event["text"] for event in events[:-1])
    assert pieces == events[-1]["generated_text"] == stopped["generated_text"]


# -- lists of calls ------------------------------------------------------------------------------

WORKFLOW = [
    {"type": "prefill", "content": SHED, "save_as": "shed"},
    {"type": "prefill", "content": ANNA, "save_as": "anna"},
    {"content": "Draft:", "parents": ["shed", "anna"], "save_as": "draft"},
    {"content": "Strong:", "parents": ["anna", "draft"], "save_as": "pro"},
    {"content": "Weak:", "parents": [{"id": "draft", "start": 1}], "save_as": "con"},
    {"content": "Merged:", "parents": ["con", "pro", "draft"], "save_as": "merged"},
]


def workflow() -> list[dict[str, Any]]:
    decode = {"sampling_params": GREEDY}
    return [call if call.get("type") else {**call, **decode} for call in WORKFLOW]


def test_a_workflow_in_one_request(session: Session, alpha: httpx.Client) -> None:
    answer = check(ResultsAnswer, session.call(calls=workflow()))
    other = Session(alpha)
    alone = [other.call(**call) for call in workflow()]
    assert [item["text"] for item in answer["data"]] == [message["text"] for message in alone]
    for item, message in zip(answer["data"], alone, strict=True):
        for key in ("token_ids", "position", "type", "finish_reason"):
            assert item[key] == message[key]
        assert item["usage"]["total_tokens"] == message["usage"]["total_tokens"]
    for key in ("prompt_tokens", "completion_tokens", "reused_tokens", "encoded_tokens"):
        assert answer["usage"][key] == sum(item["usage"][key] for item in answer["data"])
    listed = check(ListAnswer[ShortMessageAnswer], alpha.get(f"{session.path}/messages").json())
    short = {key: value for key, value in answer["data"][3].items() if key in listed["data"][3]}
    assert listed["data"][3] == short
    alpha.delete(other.path)


def test_one_illegal_call_refuses_the_list(session: Session, alpha: httpx.Client) -> None:
    calls = [*workflow(), {"content": "x", "parents": ["nobody"]}]
    error = error_of(session.post({"calls": calls}), 400)
    assert error["type"] == "UnknownMessageError" and error["param"] == "parents"
    assert error["value"] == f"{session.id}/nobody"
    assert alpha.get(f"{session.path}/messages").json()["data"] == []
    session.call(calls=workflow())  # all names are free


def test_a_call_that_fails_in_the_engine_is_an_item(session: Session) -> None:
    long = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    calls = [
        {"content": "A", "save_as": "a", "sampling_params": long},
        # Too long, which nobody knows before the first call is complete.
        {"content": "B", "parents": ["a"] * 60, "save_as": "b", "sampling_params": GREEDY},
        {"content": "C", "parents": ["b"], "save_as": "c", "sampling_params": GREEDY},
        {"content": "D", "parents": ["a"], "save_as": "d", "sampling_params": GREEDY},
    ]
    a, b, c, d = check(ResultsAnswer, session.call(calls=calls))["data"]
    assert a["id"] == f"{session.id}/a" and d["id"] == f"{session.id}/d"
    assert b["object"] == c["object"] == "error"
    assert b["error"]["type"] == "TooLongError" and b["error"]["code"] == 400
    assert c["error"]["type"] == "ParentFailedError"
    assert error_of(session.message("b"), 400)["type"] == "ParentFailedError"
    session.call(type="prefill", content="B", save_as="b")  # its name is free


# -- streams -------------------------------------------------------------------------------------


def test_a_stream_of_one_call(session: Session) -> None:
    events = session.events(content="1, 2, 3,", save_as="count", sampling_params=GREEDY)
    *pieces, end = events
    for piece in pieces:
        check(ChunkAnswer, piece)
        assert piece["id"] == f"{session.id}/count" and piece["index"] == 0
    check(MessageEvent, end)
    assert len(pieces) >= 3
    assert "".join(piece["text"] for piece in pieces) == end["generated_text"]
    assert sum((piece["token_ids"] for piece in pieces), []) == end["generated_token_ids"]
    del end["index"]
    assert session.message("count").json() == end


def test_a_stream_of_a_list(session: Session, alpha: httpx.Client) -> None:
    bad = {"content": "x", "parents": ["draft"] * 300, "save_as": "bad"}
    events = session.events(calls=[*workflow(), {**bad, "sampling_params": GREEDY}])
    ends = {event["index"]: event for event in events if event["object"] == "choreo.message"}
    assert sorted(ends) == list(range(6))
    (failed,) = (event for event in events if event["object"] == "error")
    check(FailedCallEvent, failed)
    assert failed["index"] == 6 and failed["error"]["type"] == "TooLongError"
    for index, end in ends.items():
        pieces = [
            event["text"]
            for event in events
            if event["object"] == "choreo.message.chunk" and event["index"] == index
        ]
        assert "".join(pieces) == end["generated_text"]
    other = Session(alpha)
    texts = [item["text"] for item in other.call(calls=workflow())["data"]]
    assert [ends[index]["text"] for index in range(6)] == texts
    alpha.delete(other.path)


def test_what_is_illegal_has_a_status_before_the_stream(session: Session) -> None:
    error = error_of(session.post({"content": "x", "parents": ["nobody"], "stream": True}), 400)
    assert error["type"] == "UnknownMessageError"


# -- one message ---------------------------------------------------------------------------------


def test_messages_are_freed(session: Session, alpha: httpx.Client) -> None:
    session.call(type="prefill", content=SHED, save_as="shed")
    session.call(content="So", parents=["shed"], save_as="reader", sampling_params=GREEDY)
    path = f"{session.path}/messages/shed"
    freed = check(FreedAnswer, alpha.delete(path).json())
    assert freed["id"] == f"{session.id}/shed"
    for answer in (
        *(alpha.get(path), alpha.delete(path), alpha.post(f"{path}/evict")),
        alpha.get(f"{path}/provenance"),
        *(alpha.post(f"{path}/pin"), alpha.delete(f"{path}/pin")),
    ):
        error = error_of(answer, 404)
        assert error["type"] == "FreedMessageError"
        assert (error["param"], error["value"]) == ("name", "shed")
    assert error_of(session.message("nobody"), 404)["type"] == "UnknownMessageError"
    assert error_of(session.post({"content": "x", "parents": ["shed"]}), 400)["type"] == (
        "FreedMessageError"
    )
    taken = session.post({"type": "prefill", "content": "x", "save_as": "shed"})
    assert error_of(taken, 409)["type"] == "NameTakenError"
    assert session.message("reader").status_code == 200


def test_messages_are_evicted_and_encoded_again(session: Session, alpha: httpx.Client) -> None:
    shed = session.call(type="prefill", content=SHED, save_as="shed")
    call = {"content": "The door is", "parents": ["shed"], "sampling_params": GREEDY}
    before = session.call(**call)
    evicted = alpha.post(f"{session.path}/messages/shed/evict").json()
    assert check(EvictedAnswer, evicted)["id"] == shed["id"]
    assert session.usage()["resident_tokens"] == before["num_tokens"]
    after = session.call(**call)
    assert after["token_ids"] == before["token_ids"]
    assert session.usage()["resident_tokens"] == session.usage()["tokens"]


def test_several_messages_are_one_request(session: Session, alpha: httpx.Client) -> None:
    made = [session.call(type="prefill", content=SHED, save_as=name) for name in "abc"]
    ids = [message["id"] for message in made]

    def post(operation: str, **body: Any) -> httpx.Response:
        return alpha.post(f"{session.path}/messages/{operation}", json=body)

    pinned = check(ListAnswer[PinAnswer], post("pin", messages=["a", "b"], ttl_seconds=9).json())
    assert [pin["id"] for pin in pinned["data"]] == ids[:2] and pinned["data"][0]["pinned"]
    assert session.usage()["pinned_messages"] == 2
    # By id or by name, and each once.
    unpinned = post("unpin", messages=[ids[0], "a"]).json()
    assert [pin["id"] for pin in check(ListAnswer[PinAnswer], unpinned)["data"]] == ids[:1]
    evicted = post("evict", messages=["a", "b", "c"]).json()
    assert len(check(ListAnswer[EvictedAnswer], evicted)["data"]) == 3
    assert session.usage()["resident_tokens"] == 0
    # All or none of them.
    for operation in ("free", "evict", "pin", "unpin"):
        error = error_of(post(operation, messages=["a", "nobody"]), 400)
        assert (error["type"], error["param"]) == ("UnknownMessageError", "messages")
    assert session.usage()["messages"] == 3 and session.usage()["pinned_messages"] == 1
    limit = error_of(post("pin", messages=["a"], ttl_seconds=3601), 429)
    assert limit["param"] == "max_pin_seconds"
    freed = check(ListAnswer[FreedAnswer], post("free", messages=["a", "c"]).json())
    assert [one["id"] for one in freed["data"]] == [ids[0], ids[2]]
    assert session.usage()["messages"] == 1
    assert post("free", messages=[]).json()["data"] == []


def test_messages_are_pinned(session: Session, alpha: httpx.Client) -> None:
    session.call(type="prefill", content=SHED, save_as="shed")
    path = f"{session.path}/messages/shed/pin"
    pin = check(PinAnswer, alpha.post(path, json={"ttl_seconds": 30}).json())
    assert pin["pinned"] and pin["ttl_seconds"] == 30
    assert session.usage()["pinned_messages"] == 1
    assert not check(PinAnswer, alpha.delete(path).json())["pinned"]
    assert session.usage()["pinned_messages"] == 0
    assert alpha.post(path).json()["ttl_seconds"] == 3600  # by default as long as may be
    error = error_of(alpha.post(path, json={"ttl_seconds": 3601}), 429)
    assert (error["type"], error["param"]) == ("LimitError", "max_pin_seconds")
    alpha.post(path, json={"ttl_seconds": 0.05})
    time.sleep(0.1)
    assert session.usage()["pinned_messages"] == 0


# -- clients that go away ------------------------------------------------------------------------

LONG = {"temperature": 0, "max_tokens": 1500, "ignore_eos": True}


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_leaves_nothing(
    session: Session, server: Server, alpha: httpx.Client, is_stream: bool
) -> None:
    calls = [
        {"type": "prefill", "content": SHED, "save_as": "shed"},
        {"content": "A", "parents": ["shed"], "save_as": "a", "sampling_params": LONG},
        {"content": "B", "parents": ["a"], "save_as": "b", "sampling_params": GREEDY},
    ]
    body, path = {"calls": calls, "stream": is_stream}, f"{session.path}/messages"
    before = num_generated(alpha)
    if is_stream:
        with alpha.stream("POST", path, json=body) as answer:
            for line in answer.iter_lines():
                if "choreo.message.chunk" in line:
                    break
    else:
        leave(server, path, body, lambda: num_running(alpha) > 0)
    wait_until_idle(alpha)
    assert num_generated(alpha) - before < LONG["max_tokens"], "it has run on"
    while (left := session.usage())["messages"] or left["resident_tokens"]:
        time.sleep(0.05)
    for name in ("a", "b"):  # of calls that were ended
        session.call(type="prefill", content="again", save_as=name)


def test_a_session_is_closed_while_its_calls_run(session: Session, alpha: httpx.Client) -> None:
    body = {"content": "A", "sampling_params": LONG, "stream": True}
    with alpha.stream("POST", f"{session.path}/messages", json=body) as answer:
        lines = answer.iter_lines()
        assert "choreo.message.chunk" in next(lines)
        assert alpha.delete(session.path).status_code == 200
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    end = json.loads(rest[-2].removeprefix("data: "))
    assert end["error"]["type"] == "UnknownSessionError" and end["error"]["code"] == 404
    wait_until_idle(alpha)


def test_a_session_is_closed_while_its_calls_are_read(session: Session, server: Server) -> None:
    """Texts are tokenised before any call is submitted, here for about a second."""
    calls = [{"type": "prefill", "content": f"{i} " + "word " * 1500} for i in range(300)]
    before = cpu_seconds(server)
    with ThreadPoolExecutor(1) as pool, server.client() as client:
        posted = pool.submit(client.post, f"{session.path}/messages", json={"calls": calls})
        while cpu_seconds(server) < before + 0.1:  # it reads
            time.sleep(0.01)
        assert session.client.delete(session.path).status_code == 200
        answer = posted.result()
    if answer.status_code == 200:  # the machine was faster: they were submitted, and ended
        errors = [item["error"] for item in answer.json()["data"]]
    else:
        errors = [error_of(answer, 404)]
    assert {error["type"] for error in errors} == {"UnknownSessionError"}
    wait_until_idle(session.client)


# -- what operators see --------------------------------------------------------------------------


def test_every_call_is_a_line_of_the_log_without_text(session: Session, server: Server) -> None:
    made = session.call(content="Sesame", sampling_params=GREEDY, save_as="logged")
    lines = [line for line in server.log.read_text().splitlines() if made["id"] in line]
    entries = [json.loads(line[line.index('{"event"') :]) for line in lines if '{"event"' in line]
    (entry,) = (entry for entry in entries if entry.get("message") == made["id"])
    assert entry["event"] == "choreo.call" and entry["session"] == session.id
    assert entry["type"] == "decode" and entry["usage"] == made["usage"]
    assert entry["metrics"]["latency"] > 0
    assert "Sesame" not in server.log.read_text()
    assert not any(f"Bearer {key}" in server.log.read_text() for key in server.keys)


def test_openapi_describes_every_route(alpha: httpx.Client) -> None:
    document = alpha.get("/openapi.json").json()
    routes = {
        (method, path): operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if path.startswith("/v1/choreo")
    }
    assert len(routes) >= 10
    for operation in routes.values():
        assert operation["summary"] and operation["description"]
        assert operation["security"] == [{"HTTPBearer": []}]
        answers = operation["responses"]
        assert {"200", "400", "401", "503"} <= set(answers) and "422" not in answers
        assert answers["400"]["content"]["application/json"]["schema"]["$ref"].endswith(
            "ErrorAnswer"
        )
    call = document["components"]["schemas"]["CallBody"]
    assert all("description" in field for field in call["properties"].values())
