# SPDX-License-Identifier: Apache-2.0
"""What nobody would send: generated requests, odd values everywhere, and bodies that are broken.

Every answer is the one asked for or says what is wrong with the request, and a legal call gives the
same tokens as before. On a server of a tiny model of its own, which holds nothing at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.serving import QUICK, Session, wait_until_nothing_is_left
from vllm_choreo.config import ServerConfig
from vllm_choreo.server.schemas import OneCallBody, SamplingBody
from vllm_choreo.testing.server import Server, start_server

pytestmark = pytest.mark.exhaustive  # a server of its own

# The requests are the same in every run.
FUZZ = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
SCHEMA = '<schema name="known"><module name="a">t5 t6 <param name="x" len="2"/></module></schema>'
PROMPT = '<prompt schema="known"><a x="t7"/> t8</prompt>'
GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzz")
    options = {**QUICK, "max_model_len": 1024, "choreo_keep": str(folder / "kept")}
    with start_server(tiny_model_path("llama"), folder, block_size=32, **options) as made:
        yield made


class Home(Session):
    """A session with a message `known` of 40 tokens, and what a legal call makes of it."""

    def __init__(self, client: httpx.Client) -> None:
        super().__init__(client)
        self.call(type="prefill", content=list(range(5, 45)), save_as="known")
        self.expected = self._legal_tokens()

    def check(self) -> None:
        """A legal call gives what it gave at first."""
        assert self._legal_tokens() == self.expected

    def forget(self, message: str) -> None:
        """Free what a request made, so that names are free, and nothing piles up."""
        name = quote(message.partition("/")[2], safe="")
        assert self.client.delete(f"{self.path}/messages/{name}").status_code == 200

    def _legal_tokens(self) -> list[int]:
        made = self.call(content=[6, 7], parents=["known"], sampling_params=GREEDY)
        self.forget(made["id"])
        tokens: list[int] = made["token_ids"]
        return tokens


@pytest.fixture(scope="module")
def home(server: Server) -> Iterator[Home]:
    with server.client() as client:
        yield Home(client)


# -- what the description of the API allows, and what it does not ---------------------------------

SESSION = "/v1/choreo/sessions/{session}"
MESSAGE = f"{SESSION}/messages/{{name}}"
OPERATIONS = [
    ("POST", "/v1/choreo/sessions"),
    ("GET", SESSION),
    ("DELETE", SESSION),
    ("GET", f"{SESSION}/page"),
    ("GET", f"{SESSION}/blocks"),
    ("POST", f"{SESSION}/messages"),
    ("GET", f"{SESSION}/messages"),
    *(("POST", f"{SESSION}/messages/{name}") for name in ("free", "evict", "pin", "unpin")),
    ("GET", MESSAGE),
    ("GET", f"{MESSAGE}/provenance"),
    ("DELETE", MESSAGE),
    ("POST", f"{MESSAGE}/evict"),
    ("POST", f"{MESSAGE}/pin"),
    ("DELETE", f"{MESSAGE}/pin"),
    ("POST", "/v1/choreo/schemas"),
    ("GET", "/v1/choreo/schemas"),
    ("GET", "/v1/choreo/schemas/{name}"),
    ("DELETE", "/v1/choreo/schemas/{name}"),
    ("POST", "/v1/choreo/schemas/{name}/prefetch"),
    ("POST", "/v1/choreo/prompts"),
    *(("POST", f"{SESSION}/{name}") for name in ("save", "load")),
    ("GET", "/v1/choreo/fleet"),
    ("GET", "/v1/choreo/kept"),
    ("DELETE", "/v1/choreo/kept/{name}"),
]
# Others have nothing that can be wrong: any text may be a name.
WITH_BODY = [
    ("POST", "/v1/choreo/sessions"),
    ("POST", f"{SESSION}/messages"),
    *(("POST", f"{SESSION}/messages/{name}") for name in ("free", "evict", "pin", "unpin")),
    ("POST", f"{MESSAGE}/pin"),
    ("POST", "/v1/choreo/schemas"),
    ("POST", "/v1/choreo/schemas/{name}/prefetch"),
    ("POST", "/v1/choreo/prompts"),
    *(("POST", f"{SESSION}/{name}") for name in ("save", "load")),
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def description(server: Server) -> Any:
    """/openapi.json as schemathesis reads it."""
    with server.client() as client:
        return schemathesis.openapi.from_dict(client.get("/openapi.json").json())


def test_every_operation_is_called(description: Any) -> None:
    """So that the list above does not fall behind the server."""
    described = [
        (method.upper(), path)
        for path, item in description.raw_schema["paths"].items()
        for method in item
        if path.startswith("/v1/choreo")
    ]
    assert sorted(described) == sorted(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
    + [(*operation, GenerationMode.NEGATIVE) for operation in WITH_BODY],
)
def test_answers_are_as_described(
    server: Server, description: Any, method: str, path: str, mode: GenerationMode
) -> None:
    """Of requests that are as described, and of bodies that are not."""
    operation = description[path][method]

    @settings(FUZZ, max_examples=FUZZ.max_examples // 10)
    @given(case=operation.as_strategy(mode), is_real=st.booleans())
    def answers(case: Any, is_real: bool) -> None:
        with _session(server) as session:
            if is_real:
                case.path_parameters = {"session": session.id, "name": "known"}
                case.body = _with_known(case.body)
                if path.endswith("/prompts") and isinstance(case.body, dict):
                    case.body["session"] = session.id
            headers = dict(session.client.headers)
            answer = case.call(base_url=server.base_url, headers=headers)
            if answer.status_code == 200 and path.endswith("/sessions"):
                session.client.delete(f"{path}/{answer.json()['id']}")
            case.validate_response(answer, checks=CHECKS)

    answers()


@contextmanager
def _session(server: Server) -> Iterator[Session]:
    """A session with a message `known`, which may be freed or closed."""
    with server.client() as client:
        session = Session(client)
        session.call(type="prefill", content=list(range(5, 45)), save_as="known")
        assert client.post("/v1/choreo/schemas", json={"markup": SCHEMA}).status_code == 200
        try:
            yield session
        finally:
            client.delete(session.path)


def _with_known(value: Any) -> Any:
    """The body with parents that exist, where it has any."""
    if isinstance(value, list):
        return [_with_known(item) for item in value]
    if not isinstance(value, dict):
        return value
    known = {"parents": ["known"], "copy_of": "known", "deny": [], "offsets": [0]}
    # What is encoded without a session lives in that of the key, which nobody here closes.
    known |= {"markup": SCHEMA, "prompt": PROMPT, "encode": False}
    return {
        key: known[key] if key in known and item else _with_known(item)
        for key, item in value.items()
    }


# -- odd values -----------------------------------------------------------------------------------


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


INTEGERS = st.one_of(
    st.integers(-2, 60),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63) - 1, 10**40]),
)
TEXTS = st.one_of(
    st.text(st.characters(), max_size=8),  # halves of surrogate pairs, too
    st.sampled_from(
        ["", "known", "nobody", "known[1:4]", "known[4:1]", "../known", "\0", "t" * 10**5]
    ),
)
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, st.floats(), TEXTS)
ODD = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(TEXTS, SCALARS, max_size=2),
    st.sampled_from([_nested(3), _nested(400)]),
)
PARENTS = st.one_of(
    st.just("known"),
    st.fixed_dictionaries({"id": st.just("known")}, optional={"start": INTEGERS, "stop": INTEGERS}),
    st.fixed_dictionaries({"id": TEXTS}, optional={"start": ODD, "stop": ODD, "end": ODD}),
    ODD,
)
# Wrong types are refused at once; so the values of these are odd only in what they say.
LIKELY: dict[str, SearchStrategy[Any]] = {
    "type": st.sampled_from(["prefill", "decode", "baseline", ""]),
    "content": st.one_of(TEXTS, st.lists(INTEGERS, max_size=4)),
    "parents": st.lists(PARENTS, max_size=3),
    "offsets": st.lists(INTEGERS, max_size=3),
    "new_offset": INTEGERS,
    "save_as": TEXTS,
    "mode": st.sampled_from(["choreo", "exact", "baseline", "Exact"]),
    "deny": st.lists(TEXTS, max_size=2),
}
STRINGS = st.lists(TEXTS, max_size=2)
TOKENS = st.lists(INTEGERS, max_size=3)
SAMPLING: dict[str, SearchStrategy[Any]] = {
    name: st.one_of(INTEGERS, st.floats(-2, 2), st.booleans(), STRINGS, TOKENS, ODD)
    for name in SamplingBody.model_fields
} | {
    "max_tokens": st.one_of(st.integers(-1, 4), ODD),
    "stop": STRINGS,
    "bad_words": STRINGS,
    "stop_token_ids": TOKENS,
    "allowed_token_ids": TOKENS,
    "logprob_token_ids": TOKENS,
    "logit_bias": st.dictionaries(INTEGERS.map(str), st.floats(), max_size=3),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["choice", "regex", "json", "grammar"]), st.one_of(STRINGS, ODD), max_size=2
    ),
    "repetition_detection": st.dictionaries(
        st.sampled_from(["max_pattern_size", "min_pattern_size", "min_count"]), ODD, max_size=3
    ),
    "extra_args": st.dictionaries(
        st.one_of(TEXTS, st.sampled_from(["choreo", "kv_transfer_params"])), ODD, max_size=2
    ),
}


def _some(fields: dict[str, SearchStrategy[Any]]) -> SearchStrategy[dict[str, Any]]:
    """One to three of the fields."""
    return st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    )


def _post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    """As JSON, or as what Python makes of it where JSON has no such value."""
    return client.post(path, content=json.dumps(body).encode(), headers=JSON)


def _error(answer: httpx.Response) -> dict[str, Any]:
    assert 400 <= answer.status_code < 500, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["code"] == answer.status_code and error["message"], error
    assert len(answer.content) < 2000
    return error


def _check_answer(answer: httpx.Response, sent: set[str]) -> None:
    """A message, or an error that names something of what was sent."""
    if answer.status_code != 200:
        error = _error(answer)
        assert isinstance(error["param"], str), error
        parts = error["param"].split(".")
        names = {error["param"], *(part for part in parts if not part.isdigit())}
        assert names & sent, error


# The last is that of a call that vLLM's engine has given up.
CALL_NAMES = {*OneCallBody.model_fields, *SamplingBody.model_fields, "body", "finish_reason"}


@settings(FUZZ)
@given(odd=st.one_of(_some(LIKELY), _some(dict.fromkeys(OneCallBody.model_fields, ODD))))
def test_odd_calls(home: Home, odd: dict[str, Any]) -> None:
    body = {"content": [6, 7], "parents": ["known"], "sampling_params": GREEDY, **odd}
    if odd.get("type") == "prefill":
        body.pop("sampling_params")
    _check_call(home, body)


@settings(FUZZ)
@given(odd=_some(SAMPLING))
def test_odd_sampling_params(home: Home, odd: dict[str, Any]) -> None:
    params = {**GREEDY, **odd}
    _check_call(home, {"content": [6, 7], "parents": ["known"], "sampling_params": params})


def _check_call(home: Home, body: dict[str, Any]) -> None:
    answer = _post(home.client, f"{home.path}/messages", body)
    _check_answer(answer, CALL_NAMES)
    if answer.status_code == 200 and answer.headers["Content-Type"] == "application/json":
        home.forget(answer.json()["id"])
    home.check()


XARGS = {
    f"choreo_{name}": values for name, values in LIKELY.items() if name not in ("type", "content")
} | {
    "choreo_parents": st.lists(st.one_of(TEXTS, INTEGERS, st.floats()), max_size=3),
    "choreo_session": TEXTS,
}


@settings(FUZZ)
@given(odd=st.one_of(_some(XARGS), _some(dict.fromkeys(XARGS, ODD))))
def test_odd_arguments_of_stock_routes(home: Home, server: Server, odd: dict[str, Any]) -> None:
    xargs = {"choreo_session": home.id, "choreo_parents": ["known"], **odd}
    body = {"model": server.model, "prompt": [6, 7], **GREEDY, "vllm_xargs": xargs}
    answer = _post(home.client, "/v1/completions", body)
    # The last is vLLM's own name for them, where it checks their sizes.
    _check_answer(answer, {"vllm_xargs", "prompt", "body", "extra_args"})
    if answer.status_code == 200:
        home.forget(answer.json()["choreo"]["id"])
    home.check()


# -- broken bodies --------------------------------------------------------------------------------

MANY = 10**6
LIMIT = ServerConfig().max_request_bytes
CALL = b'{"content": [6, 7], "parents": ["known"], "sampling_params": {"max_tokens": 1}}'
BROKEN: dict[str, tuple[bytes, set[int]]] = {
    "a million parents": (
        json.dumps({"content": [6], "parents": ["known"] * MANY}).encode(),
        {429},
    ),
    "a million calls": (b'{"calls": [' + b"{}," * MANY + b"{}]}", {429}),
    "lists": (b"[" * 100_000, {400}),
    "lists that end": (b"[" * 100_000 + b"]" * 100_000, {400}),
    "objects": (b'{"content":' * 100_000, {400}),
    "a field of lists": (b'{"content": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {400}),
    "too long": (b'{"content": "' + b"x" * LIMIT + b'"}', {413}),
    "far too long": (b" " * (3 * LIMIT), {413}),
    "no UTF-8": (CALL.replace(b"known", b"kn\xffwn"), {400}),
    "UTF-16": (CALL.decode().encode("utf-16"), {400}),
    "a mark of byte order": (b"\xef\xbb\xbf" + CALL, {400}),
    "comment": (b"/* call */" + CALL, {400}),
    "two values": (CALL + CALL, {400}),
    "single quotes": (CALL.replace(b'"', b"'"), {400}),
}


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize(("content", "statuses"), BROKEN.values(), ids=BROKEN)
def test_broken_bodies(home: Home, content: bytes, statuses: set[int], has_length: bool) -> None:
    """Without a length, they come in chunks."""
    chunks = (content[i : i + 65536] for i in range(0, len(content), 65536))
    answer = home.client.post(
        f"{home.path}/messages", content=content if has_length else chunks, headers=JSON
    )
    assert answer.status_code in statuses
    _error(answer)
    assert home.client.get("/health").status_code == 200
    home.check()


def test_bodies_that_are_cut(home: Home) -> None:
    """Everywhere, and everywhere with a byte that is another one."""
    for end in range(len(CALL)):
        answer = home.client.post(f"{home.path}/messages", content=CALL[:end], headers=JSON)
        assert _error(answer)["param"] == "body" if end else _error(answer)
    home.check()


@settings(FUZZ)
@given(place=st.integers(0, len(CALL) - 1), byte=st.integers(0, 255))
def test_bodies_with_a_wrong_byte(home: Home, place: int, byte: int) -> None:
    content = CALL[:place] + bytes([byte]) + CALL[place + 1 :]
    answer = home.client.post(f"{home.path}/messages", content=content, headers=JSON)
    _check_answer(answer, CALL_NAMES | _names(content))
    if answer.status_code == 200:
        home.forget(answer.json()["id"])
    home.check()


def _names(content: bytes) -> set[str]:
    """Everything in quotes."""
    return set(content.decode(errors="replace").split('"')[1::2])


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data", "", "é", None])
def test_other_types_of_content(home: Home, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type.encode()}
    answer = home.client.post(f"{home.path}/messages", content=CALL, headers=headers)
    assert _error(answer)["param"] == "Content-Type"


# -- what is left of all this ---------------------------------------------------------------------


def test_nothing_is_left(server: Server, home: Home) -> None:
    """The last test of this server: of the sessions above, only `home` is open still."""
    home.check()
    assert home.usage()["messages"] == 1
    assert home.client.delete(home.path).status_code == 200
    wait_until_nothing_is_left(server)
    assert server.process.poll() is None
