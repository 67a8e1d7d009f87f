# SPDX-License-Identifier: Apache-2.0
"""The parts of the soak of all routes: what it draws, and what it finds wrong."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from fastapi import FastAPI

from benchmarks.soak.routes.checks import Checks
from benchmarks.soak.routes.probe import quantile
from benchmarks.soak.routes.tenant import Request, Requests, Tenant
from benchmarks.soak.routes.values import Values, damaged, encoded, odd, spoilt
from vllm_choreo.pml.server import routes as pml_routes
from vllm_choreo.server import message_routes, routes, snapshot_routes

SESSION = "/v1/choreo/sessions/{session}"
ALPHA = Tenant("alpha", "zqAlphaMark", "a" * 32)
BETA = Tenant("beta", "zqBetaMark", "b" * 32)


@pytest.fixture(scope="module")
def document() -> Any:
    """The description of our routes, without a server."""
    app = FastAPI()
    for module in (routes, message_routes, snapshot_routes, pml_routes):
        app.include_router(module.router)
    return app.openapi()


def drawn(document: Any, seed: int, count: int) -> list[Request]:
    requests = Requests(random.Random(seed), document)
    return [requests.draw(ALPHA, BETA) for _ in range(count)]


# -- what is drawn -------------------------------------------------------------------------------


def test_a_seed_draws_the_same_requests(document: Any) -> None:
    assert drawn(document, 3, 200) == drawn(document, 3, 200) != drawn(document, 4, 200)


def test_every_operation_is_drawn_legal_odd_and_broken(document: Any) -> None:
    found = drawn(document, 0, 4000)
    described = {f"{m.upper()} {path}" for path, item in document["paths"].items() for m in item}
    assert {request.operation for request in found} == described
    bodies = [request.content for request in found if request.content is not None]
    assert any(_is_broken(body) for body in bodies)
    schema = document["components"]["schemas"]["SessionBody"]
    whole = {**schema, "components": document["components"]}
    sent = [r.content for r in found if r.operation == "POST /v1/choreo/sessions" and r.content]
    legal = [
        jsonschema.Draft202012Validator(whole).is_valid(json.loads(body))
        for body in sent
        if not _is_broken(body)
    ]
    assert any(legal) and not all(legal)
    assert any(request.stops_after is not None for request in found)
    assert any(BETA.session in request.path for request in found)


def _is_broken(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, UnicodeDecodeError):
        return True
    return False


def test_values_are_such_as_a_schema_allows() -> None:
    schema = {
        "type": "object",
        "required": ["a", "b", "c", "d", "e"],
        "properties": {
            "a": {"type": "integer", "minimum": 3, "maximum": 9},
            "b": {"type": "array", "items": {"type": "boolean"}, "minItems": 1},
            "c": {"anyOf": [{"const": "x"}, {"type": "null"}]},
            "d": {"enum": [1, 2]},
            "e": {"$ref": "#/components/schemas/E"},
            "f": {"type": ["number", "string"]},
        },
        "additionalProperties": False,
        "components": {"schemas": {"E": {"allOf": [{"type": "string"}]}}},
    }
    values = Values(random.Random(0), schema["components"]["schemas"])  # type: ignore[index]
    validator = jsonschema.Draft202012Validator(schema)
    made = [values.of(schema, {}) for _ in range(100)]
    assert all(validator.is_valid(value) for value in made)
    assert len({json.dumps(value) for value in made}) > 50
    hinted = values.of(schema, {"a": lambda: "named"})
    assert hinted["a"] == "named"


def test_what_is_spoilt_is_another_value_and_the_old_one_stays() -> None:
    rng, body = random.Random(0), {"a": [1, 2], "b": {"c": "x"}}
    before = json.dumps(body)
    made = [spoilt(rng, body) for _ in range(50)]
    assert json.dumps(body) == before
    assert sum(value != body for value in made) > 30
    assert all(isinstance(damaged(rng, encoded(value)), bytes) for value in made)
    assert len({type(odd(rng)) for _ in range(200)}) >= 6


# -- what is found -------------------------------------------------------------------------------

READ = Request(f"GET {SESSION}", "GET", f"/v1/choreo/sessions/{ALPHA.session}", None, {}, None)
ERROR = {"message": "m", "type": "UnknownSessionError", "param": "session", "value": None}


def problems(document: Any, status: int, content: Any, request: Request = READ) -> list[str]:
    answer = httpx.Response(status, json=content)
    return list(Checks(document).problems(request, answer, BETA))


def refusal(**changes: Any) -> dict[str, Any]:
    return {"error": {**ERROR, "code": 404, **changes}}


def test_a_documented_error_is_none_of_the_problems(document: Any) -> None:
    assert not problems(document, 404, refusal())


@pytest.mark.parametrize(
    ("status", "content", "problem"),
    [
        (500, refusal(code=500), "status 500"),
        (503, refusal(code=503, type="EngineRestartedError"), "status 503"),
        (400, refusal(), "an error that says too little"),
        (404, refusal(type="KeyError"), "an error that says too little"),
        (404, refusal(message=""), "an error that says too little"),
        (400, {"detail": "x"}, "an error that is not of the documented form"),
        (404, refusal(message="x" * 5000), "an error of many bytes"),
        (404, refusal(message="Traceback"), "what is inside the server"),
        (404, refusal(value=BETA.marker), "a word of the other tenant"),
        (404, refusal(value=BETA.session), "a word of the other tenant"),
        (200, {"id": "x"}, "an answer that is not as described"),
    ],
)
def test_each_problem_is_found(document: Any, status: int, content: Any, problem: str) -> None:
    assert problem in problems(document, status, content)


def test_a_word_that_was_sent_may_come_back(document: Any) -> None:
    path = f"/v1/choreo/sessions/{BETA.session}"
    foreign = Request(READ.operation, "GET", path, None, {}, None)
    assert not problems(document, 404, refusal(value=BETA.session), foreign)
    assert "a foreign session is answered" in problems(document, 200, {}, foreign)


def test_a_stream_ends(document: Any) -> None:
    path = f"/v1/choreo/sessions/{ALPHA.session}/messages"
    call = Request(f"POST {SESSION}/messages", "POST", path, b"{}", {}, None)
    headers = {"Content-Type": "text/event-stream"}
    piece = 'data: {"object":"choreo.message.chunk"}\n\n'

    def found(text: str) -> list[str]:
        answer = httpx.Response(200, text=text, headers=headers)
        return list(Checks(document).problems(call, answer, BETA))

    assert not found(f"{piece}data: [DONE]\n\n")
    assert found(piece) == ["a stream without an end"]
    error = 'data: {"object":"error","error":{"type":"KeyError"}}\n\n'
    assert found(f"{error}data: [DONE]\n\n") == ["a stream's error that says too little"]


def test_quantiles() -> None:
    assert quantile([0.001 * n for n in range(100)], 0.5) == pytest.approx(50)
    assert quantile([0.001], 0.99) == pytest.approx(1)
