# SPDX-License-Identifier: Apache-2.0
"""Parts of the HTTP server that need no engine: answers, errors, tenants, page, start checks."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter
from starlette.requests import Request
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from tests.api.test_fleet_moves import greedy, model_config, only_on, started
from vllm_choreo.api.async_choreography import AsyncChoreography
from vllm_choreo.api.fleet import Fleet
from vllm_choreo.errors import (
    ChoreoError,
    DeniedMessageError,
    EngineRestartedError,
    FreedMessageError,
    LimitError,
    NameTakenError,
    UnknownKeyError,
    UnknownMessageError,
    UnknownSessionError,
    UnsupportedOptionError,
)
from vllm_choreo.semantics.message import Message, Metrics, Usage
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.server.answers import FleetAnswer, ResultsAnswer, results_json
from vllm_choreo.server.errors import as_choreo_error, error_json, status_of
from vllm_choreo.server.openai import auto_options
from vllm_choreo.server.openai.auto_options import AutoOptions, read_options
from vllm_choreo.server.openai.reading import read_arguments
from vllm_choreo.server.page import MAX_MESSAGES, session_page
from vllm_choreo.server.plugin import check_one_engine, check_one_process
from vllm_choreo.server.routes import show_fleet
from vllm_choreo.server.schemas import SessionBody
from vllm_choreo.server.tenants import TenantMiddleware, cache_salt, tenant_of, use_keys
from vllm_choreo.wire.messages import MessageAnswer, message_json, usage_json

__all__ = ["model_config"]  # a fixture


def message(name: str = "a", *parents: str, **changes: Any) -> Message:
    """A decode of two tokens after a header of three, which read five."""
    made = Message(
        id=f"s/{name}",
        text="Say: yes",
        token_ids=(1, 2, 3, 4, 5),
        num_tokens=5,
        position=5,
        parents=tuple(ParentSpan(f"s/{parent}") for parent in parents),
        generated_text=" yes",
        generated_token_ids=(4, 5),
        logprobs=None,
        finish_reason="stop",
        usage=Usage(exact=True, reused_tokens=4, repositioned_tokens=2, encoded_tokens=6),
        metrics=Metrics(submitted=10.0, waiting=None, ttft=0.5, latency=1.0),
    )
    return replace(made, **changes)


# -- answers -------------------------------------------------------------------------------------


def test_who_asks_for_a_prefill_is_told_where() -> None:
    with pytest.raises(ChoreoError, match=r"POST .*/messages to encode a text alone"):
        read_arguments({"choreo_type": "prefill"})


def test_usage_counts_what_was_read_and_written() -> None:
    assert usage_json(message()) == {
        "prompt_tokens": 8,
        "completion_tokens": 2,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "exact": True,
        "reused_tokens": 4,
        "repositioned_tokens": 2,
        "encoded_tokens": 6,
        "repaired_tokens": 0,
        "untrusted": False,
    }


def test_usage_of_a_list_leaves_failed_calls_out() -> None:
    inexact = message("b", usage=Usage(False, 1, 0, 9))
    answer = results_json([message(), ChoreoError("no", parameter="x"), inexact])
    TypeAdapter(ResultsAnswer).validate_python(answer, strict=True)
    assert [item["object"] for item in answer["data"]] == [
        *("choreo.message", "error", "choreo.message")
    ]
    usage = answer["usage"]
    assert (usage["total_tokens"], usage["reused_tokens"], usage["exact"]) == (20, 5, False)
    assert results_json([ChoreoError("no")])["usage"]["total_tokens"] == 0


def test_logprobs_are_json() -> None:
    """A token that was masked has a logprob of minus infinity, which JSON does not know."""
    masked = SimpleNamespace(logprob=float("-inf"), rank=9, decoded_token="�")
    likely = SimpleNamespace(logprob=-0.25, rank=1, decoded_token=" yes")
    answer = message_json(message(logprobs=[{4: likely, 7: masked}, {5: likely}]))
    TypeAdapter(MessageAnswer).validate_python(answer, strict=True)
    first, _ = json.loads(json.dumps(answer["logprobs"], allow_nan=False))
    assert first["4"] == {"logprob": -0.25, "rank": 1, "decoded_token": " yes"}
    assert first["7"]["logprob"] == -9999.0


def test_messages_tell_where_they_come_from() -> None:
    answer = message_json(message("c", "a", "b"))
    assert answer["session"] == "s"
    assert answer["parents"][1] == {"id": "s/b", "start": None, "stop": None}
    prefill = message(finish_reason=None, generated_text="", generated_token_ids=())
    assert (answer["type"], message_json(prefill)["type"]) == ("decode", "prefill")


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ChoreoError("x"), 400),
        (DeniedMessageError("x"), 400),
        (UnknownMessageError("x", parameter="parents"), 400),
        (UnknownMessageError("x", parameter="name"), 404),
        (FreedMessageError("x", parameter="name"), 404),
        (ChoreoError("unknown field", parameter="name"), 400),
        (UnknownSessionError("x", parameter="session"), 404),
        (NameTakenError("x"), 409),
        (LimitError("x", parameter="max_request_bytes"), 413),
        (LimitError("x", parameter="max_sessions"), 429),
        (EngineRestartedError("x"), 503),
    ],
)
def test_each_error_has_a_status(error: ChoreoError, status: int) -> None:
    assert status_of(error) == status
    content = error_json(error)
    assert (content["code"], content["type"]) == (status, type(error).__name__)


def test_errors_name_the_field_and_what_was_given() -> None:
    error = error_json(ChoreoError("choose less", parameter="offsets", value=[1] * 1000))
    assert (error["message"], error["param"]) == ("choose less", "offsets")
    assert error["value"].startswith("[1, 1, ") and len(error["value"]) < 300
    assert error_json(ChoreoError("x"))["param"] is error_json(ChoreoError("x"))["value"] is None


def test_errors_of_vllm_become_ours() -> None:
    assert isinstance(as_choreo_error(EngineDeadError()), EngineRestartedError)
    refused = as_choreo_error(VLLMValidationError("too hot", parameter="temperature", value=9))
    assert refused is not None
    assert (refused.message, refused.parameter, refused.value) == ("too hot", "temperature", 9)
    plain = as_choreo_error(OverflowError("too large"))
    assert plain is not None and plain.parameter == "sampling_params"
    assert as_choreo_error(RuntimeError("a bug")) is None


# -- tenants -------------------------------------------------------------------------------------


def scope(authorization: str | None) -> dict[str, Any]:
    headers = [] if authorization is None else [(b"authorization", authorization.encode("latin-1"))]
    return {"type": "http", "headers": headers}


def tenant(authorization: str | None) -> str:
    return tenant_of(Request(scope(authorization)))


@pytest.fixture
def keys() -> Iterator[None]:
    use_keys(("alpha", "beta", "é\xff"))
    yield
    use_keys(())


@pytest.mark.usefixtures("keys")
def test_tenants_are_named_by_their_keys() -> None:
    assert tenant("Bearer alpha") == tenant("bearer alpha") != tenant("Bearer beta")
    names = {tenant(f"Bearer {key}") for key in ("alpha", "beta", "é\xff")}
    assert len(names) == 3 and all(len(bytes.fromhex(name)) == 32 for name in names)
    assert not any("alpha" in name for name in names)


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    "authorization",
    [None, "", "alpha", "Bearer", "Bearer ", "Bearer gamma", "Bearer alph", "Bearer alpha "]
    + ["Bearer  alpha", "bearer\talpha", "Bearer alpha,beta", "Basic alpha", "Bearer e"],
)
def test_who_sends_none_of_the_keys_is_no_tenant(authorization: str | None) -> None:
    with pytest.raises(UnknownKeyError) as refused:
        tenant(authorization)
    assert status_of(refused.value) == 401 and refused.value.parameter == "Authorization"
    assert "alpha" not in str(error_json(refused.value))


def test_without_keys_all_clients_are_one_tenant() -> None:
    """A token that nobody checks is no key: each new one would bring limits of its own."""
    assert tenant(None) == tenant("Bearer alpha") == tenant("Bearer beta") == tenant("Basic x")


def salts(*requests: tuple[str | None, str | None]) -> list[str | None]:
    """The salts of requests that run at once: each an Authorization, and a salt of its own."""

    async def one(authorization: str | None, own: str | None) -> str | None:
        found: list[str | None] = []

        async def app(*_: Any) -> None:
            await asyncio.sleep(0)  # the others have begun
            found.append(await asyncio.create_task(later()))

        async def later() -> str | None:
            return cache_salt(own)

        nothing: Any = None
        await TenantMiddleware(app)(scope(authorization), nothing, nothing)
        return found[0]

    async def all_of() -> list[str | None]:
        return await asyncio.gather(*(one(*request) for request in requests))

    return asyncio.run(all_of())


@pytest.mark.usefixtures("keys")
def test_each_tenant_has_a_salt_of_its_own() -> None:
    a, b, same, nobody, guessed = salts(
        *((f"Bearer {key}", None) for key in ("alpha", "beta", "alpha")),
        (None, None),
        ("Bearer x", None),
    )
    assert a == same and nobody == guessed and len({a, b, nobody}) == 3 and None not in (a, nobody)
    own = salts(*((f"Bearer {key}", "mine") for key in ("alpha", "beta", "alpha")), (None, "mine"))
    assert own[0] == own[2] and len({*own, a, b, nobody, "mine"}) == 7
    (forged,) = salts(("Bearer alpha", b))  # who knows the salt of another has none of its cache
    assert forged not in (a, b)
    assert cache_salt() is None, "outside a request"


def test_without_keys_nothing_is_salted() -> None:
    assert salts((None, None), ("Bearer alpha", None), (None, "mine")) == [None, None, "mine"]


# -- the page ------------------------------------------------------------------------------------


def shown(page: str) -> list[dict[str, Any]]:
    """The messages on a page."""
    data = page.partition('id="data">')[2].partition("</script>")[0]
    steps: list[dict[str, Any]] = json.loads(data)["problems"][0]["runs"][0]["steps"]
    return steps


def test_a_message_stands_to_the_right_of_what_it_reads() -> None:
    made = [message("a"), message("b", "a"), message("c"), message("d", "b", "c"), message("e")]
    steps = shown(session_page("s", "choreo", "m", made))
    assert {step["author"]: step["stage"][-1] for step in steps} == {
        **{"a": "0", "c": "0", "e": "0", "b": "1", "d": "2"}
    }
    assert [step["stage"] for step in steps] == sorted(step["stage"] for step in steps)


def test_the_latest_messages_of_a_large_session_are_shown() -> None:
    made = [message(f"m{i}", *([f"m{i - 1}"] if i else [])) for i in range(MAX_MESSAGES + 5)]
    page = session_page("s", "choreo", "m", made)
    steps = shown(page)
    assert len(steps) == MAX_MESSAGES and steps[0]["author"] == "m5"
    assert f"latest {MAX_MESSAGES} of {MAX_MESSAGES + 5} messages" in page


def test_the_page_names_the_engine_of_each_call_where_there_are_several() -> None:
    made = [message("a"), message("b", "a")]
    steps = shown(session_page("s", "choreo", "m", made, {made[0].id: 1, made[1].id: None}))
    assert [step["author"] for step in steps] == ["a, engine 1", "b"]


def test_a_page_without_messages() -> None:
    assert "no messages" in session_page("s", "choreo", "m", [])


def _shown_fleet(fleet: Fleet | None) -> Any:
    state = SimpleNamespace(choreo_fleet=fleet)
    request: Any = SimpleNamespace(app=SimpleNamespace(state=state))
    return json.loads(asyncio.run(show_fleet(request)).body)


def test_engines_are_shown_with_what_they_hold_and_what_was_moved(model_config: Any) -> None:
    async def moved_to_1() -> Fleet:
        llm, fleet = started(model_config)
        c = AsyncChoreography(llm, tenant="t")  # type: ignore[arg-type]
        with only_on(fleet, 0):
            document = await c.prefill([7] * 100)
        with only_on(fleet, 1):
            await c.decode([4], parents=[document], sampling_params=greedy())
        return fleet

    shown = _shown_fleet(asyncio.run(moved_to_1()))
    TypeAdapter(FleetAnswer).validate_python(shown)
    first, second = shown["data"]
    assert (first["state"], first["messages"], first["tokens"]) == ("running", 1, 100)
    assert (first["engine"], second["engine"], second["messages"]) == (0, 1, 2)
    assert (first["moves"]["made"], second["moves"]["made"]) == (0, 1)
    assert second["moves"]["tokens"] == 100 and second["encoded_again"]["messages"] == 0


def test_one_engine_is_no_fleet_to_be_shown() -> None:
    with pytest.raises(UnsupportedOptionError, match="this server has one engine") as refused:
        _shown_fleet(None)
    assert refused.value.parameter == "data_parallel_size"


# -- starting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("api_servers", [None, 1])
def test_one_api_server_is_served(api_servers: int | None) -> None:
    check_one_process(Namespace(api_server_count=api_servers))


def test_several_api_servers_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError) as refused:
        check_one_process(Namespace(api_server_count=2))
    assert refused.value.parameter == "--api-server-count" and refused.value.value == 2


def test_what_one_engine_alone_can_do_is_refused_of_several() -> None:
    asked = Namespace(choreo_keep="folder", choreo_load=None, choreo_pair="other")
    check_one_engine(asked, 1)
    check_one_engine(Namespace(choreo_keep="folder", choreo_load="folder"), 2)
    with pytest.raises(UnsupportedOptionError, match="what another model has encoded") as refused:
        check_one_engine(asked, 2)
    assert refused.value.parameter == "--choreo-pair"


# -- chats that name no messages -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("xargs", "header", "default", "expected"),
    [
        (None, None, "off", None),
        (None, None, "exact", AutoOptions("exact")),
        (None, "choreo", "exact", AutoOptions("choreo", is_asked=True)),
        ({"other": 1}, None, "choreo", AutoOptions("choreo")),
        ({"choreo_auto": "off"}, "exact", "exact", AutoOptions("off", is_asked=True)),
        # Who names messages does so whatever the server's default is.
        ({"choreo_parents": ["p"]}, "exact", "exact", None),
        (
            {"choreo_auto": "exact", "choreo_auto_min_tokens": 8},
            None,
            "off",
            AutoOptions("exact", is_asked=True, min_tokens=8),
        ),
        (
            {"choreo_auto": "choreo", "choreo_auto_context": "alone"},
            None,
            "off",
            AutoOptions("choreo", is_asked=True, context="alone"),
        ),
    ],
)
def test_who_says_what_becomes_of_a_chats_messages(
    xargs: dict[str, Any] | None, header: str | None, default: str, expected: AutoOptions | None
) -> None:
    assert read_options(xargs, header, default) == expected


@pytest.mark.parametrize(
    ("chosen", "auto", "has_keys", "context", "said"),
    [
        ("", "choreo", True, "seen", ""),
        ("", "choreo", False, "alone", 'context "alone"'),
        ("", "exact", False, "alone", ""),  # of requests that ask for "choreo" themselves
        ("alone", "choreo", True, "alone", ""),
        ("seen", "choreo", False, "seen", "can steer the answers of another"),
    ],
)
def test_without_keys_nobody_steers_another_unless_it_is_asked_for(
    chosen: str,
    auto: str,
    has_keys: bool,
    context: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(auto_options.logger, level, lines.append)
    assert auto_options.default_context(chosen, auto, has_keys) == context
    assert [said in line for line in lines] == ([True] if said else [])


@pytest.mark.parametrize(("former", "word"), [("writer", "prefill"), ("reader", "decode")])
def test_a_former_placement_warns_and_is_that_of_today(former: str, word: str) -> None:
    with pytest.warns(DeprecationWarning, match=f'"{former}" is called "{word}" now'):
        assert SessionBody.model_validate({"placement": former}).placement == word
    for placement in ("prefill", "decode", "both", None):
        assert SessionBody.model_validate({"placement": placement}).placement == placement
    for wrong in ("editor", ["prefill"], 1):
        with pytest.raises(ValueError, match="placement"):
            SessionBody.model_validate({"placement": wrong})
