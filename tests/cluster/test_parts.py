# SPDX-License-Identifier: Apache-2.0
"""Parts of a fleet without a cluster: what is refused, and where requests are routed."""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from pydantic import ValidationError

from vllm_choreo.cluster import ray_processes
from vllm_choreo.cluster.app import FleetArgs, check_options
from vllm_choreo.cluster.command import command, fleet_args, options_of
from vllm_choreo.cluster.identity import EngineInfo, check_identity
from vllm_choreo.cluster.journal import Places
from vllm_choreo.cluster.members import Members
from vllm_choreo.cluster.ray_processes import start_ray
from vllm_choreo.cluster.router import PlacedRouter, TenantRouter, key_digest
from vllm_choreo.errors import ChoreoError, UnsupportedOptionError


def _replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))


@pytest.mark.parametrize("name", ["model", "vllm", "choreo"])
def test_an_engine_of_another_fleet_is_refused(name: str) -> None:
    ours = {"model": "a", "vllm": "1", "choreo": "x"}
    check_identity(ours, EngineInfo("r", dict(ours), {}))
    with pytest.raises(UnsupportedOptionError, match="deploy them together") as refused:
        check_identity(ours, EngineInfo("r", {**ours, name: "other"}, {}))
    assert refused.value.parameter == f"engine.{name}"
    for theirs in ({**ours, name: ""}, {**ours, "more": "x"}):  # not known, or not asked for
        check_identity(ours, EngineInfo("r", theirs, {}))
    check_identity({**ours, name: ""}, EngineInfo("r", dict(ours), {}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"engines": 0},
        {"engines": 3, "max_engines": 2},
        {"options": {"data_parallel_size": 2}},
        {"options": {"port": 1}},
        {"replicas": 2},
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        FleetArgs(model="m", **wrong)


@pytest.mark.parametrize("wrong", [{"max_model_length": 9}, {"dtype": "float31"}])
def test_options_that_vllm_does_not_take_are_refused(wrong: dict[str, Any]) -> None:
    check_options("m", {"max_model_len": 512, "api_key": ["a"]})
    with pytest.raises(UnsupportedOptionError, match="does not take these options") as refused:
        check_options("m", wrong)
    assert next(iter(wrong)).replace("_", "-") in str(refused.value)


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    main = command(parser)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ChoreoError, match=r"pip install 'vllm-choreo\[fleet\]'"):
        main(parser.parse_args(["model"]))


def test_options_of_vllm_serve_are_given_by_name() -> None:
    parser = argparse.ArgumentParser()
    command(parser)
    words = "m --vllm dtype=float32 enforce_eager --engines 3 --vllm api_key=a api_key=b"
    args = parser.parse_args(words.split())
    assert args.engines == 3
    options = {"dtype": "float32", "enforce_eager": True, "api_key": ["a", "b"]}
    assert options_of(args.vllm) == options
    with pytest.raises(UnsupportedOptionError, match="by their names"):
        options_of(["--dtype"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("m --engines 0", "greater than or equal to 1"),
        ("m --engines 3 --max-engines 2", "leave max_engines out"),
        ("m --vllm port=1", "Serve's http_options"),
    ],
)
def test_the_command_refuses_wrong_arguments(words: str, said: str) -> None:
    parser = argparse.ArgumentParser()
    command(parser)
    with pytest.raises(ChoreoError, match=said):
        fleet_args(parser.parse_args(words.split()))


def test_ray_is_started_with_workers_that_get_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[dict[str, Any], str]] = []
    name = "RAY_worker_niceness"
    monkeypatch.setattr("ray.init", lambda **given: started.append((given, os.environ[name])))
    for own, expected in ((None, "0"), ("7", "7")):  # somebody's own is left
        monkeypatch.setenv(name, own or "")
        if own is None:
            monkeypatch.delenv(name)
        start_ray(3, log_to_driver=False)
        given, found = started.pop()
        assert found == expected
        expected_options = {"address": "local", "num_cpus": 3, "include_dashboard": False}
        assert given == {**expected_options, "log_to_driver": False}


@pytest.mark.parametrize(("niceness", "is_told"), [(0, False), (15, True), (19, True)])
def test_a_process_that_gets_no_share_says_so(
    niceness: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(ray_processes.logger, "warning", lambda text, *_: told.append(text))
    monkeypatch.setattr("os.getpriority", lambda *_: niceness)
    ray_processes.warn_of_niceness()
    assert bool(told) == is_told


def test_members_are_told_of_in_the_order_of_their_coming() -> None:
    members, told = Members(), []
    members.update(["b", "a"])
    members.listen(lambda ids: told.append(list(ids)))
    members.update(["a", "c", "b"])
    members.update(["c"])
    assert told == [["b", "a"], ["b", "a", "c"], ["c"]]


def test_a_request_goes_to_the_replica_that_it_names() -> None:
    router = PlacedRouter.__new__(PlacedRouter)
    replicas = [_replica("a"), _replica("b")]
    for args, expected in ((("b",), replicas[1:]), (("gone",), replicas)):
        request = SimpleNamespace(args=args, routing_context=SimpleNamespace())
        assert asyncio.run(router.choose_replicas(replicas, request)) == [expected]


def _http(key: str | None) -> Any:
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = SimpleNamespace(asgi_scope={"headers": headers})
    return SimpleNamespace(args=[pickle.dumps(scope)], routing_context=SimpleNamespace())


def _tenant_router(keys: list[str], places: Places) -> TenantRouter:
    async def place(key: str, ids: list[str]) -> str:
        return places.place(key, ids)

    router = TenantRouter.__new__(TenantRouter)
    router.initialize_state(keys=[key_digest(key) for key in keys])
    router._journal = SimpleNamespace(place=SimpleNamespace(remote=place))  # type: ignore[assignment]
    return router


def test_a_key_stays_at_its_ingress_while_that_lives() -> None:
    places = Places()
    routers = [_tenant_router(["one", "two", "three", "four"], places) for _ in range(2)]

    def chosen(router: TenantRouter, key: str | None, names: str) -> str:
        ((replica,),) = asyncio.run(router.choose_replicas(list(map(_replica, names)), _http(key)))
        name: str = replica.replica_id.unique_id
        return name

    before = {key: chosen(routers[0], key, "ab") for key in ("one", "two", "three", "four")}
    assert sorted(before.values()) == ["a", "a", "b", "b"]
    assert all(chosen(routers[1], key, "bca") == name for key, name in before.items())
    moved = {key: chosen(routers[1], key, "bc") for key in before}
    assert all(moved[key] == name for key, name in before.items() if name == "b")
    assert all(chosen(routers[0], key, "cb") == name for key, name in moved.items())
    # Whoever has no key, or a wrong one, is nobody: all of them go one way.
    assert len({chosen(routers[0], key, "bc") for key in (None, "x", "y", "z")}) == 1
