# SPDX-License-Identifier: Apache-2.0
"""One of the two who send requests: what it has on the server, and what it draws next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from benchmarks.soak.routes.values import Hints, Values, damaged, encoded, odd, spoilt

# Of the operator: it changes what all others get. And of vLLM, for models that decide: it says so.
_LEFT_OUT = ("/scale_elastic_ep", "/v1/systemone")
# vLLM's own routes that run a model; of their many options those that make an answer short.
_STOCK = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/inference/v1/generate", "/invocations"),
)
GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Request:
    """
    Attributes:
        operation: method and path as OpenAPI has them.
        content: the body, if it has one.
        stops_after: bytes of the answer after which the client hangs up; None: it reads all.
    """

    operation: str
    method: str
    path: str
    content: bytes | None
    headers: Mapping[str, str]
    stops_after: int | None

    @property
    def sent(self) -> str:
        """All that the server is told, as text."""
        return self.path + (self.content or b"").decode(errors="replace")


@dataclass
class Tenant:
    """
    Attributes:
        key: its API key.
        marker: a word that only its messages, names and schemas have.
        session: the session of its `known` messages.
        spare: sessions that requests have opened.
    """

    key: str
    marker: str
    session: str = ""
    spare: list[str] = field(default_factory=list)

    def begin(self, client: httpx.Client) -> None:
        """Open a session with known messages, a schema, and what was saved."""
        headers = {"Authorization": f"Bearer {self.key}"}

        def post(path: str, body: Any) -> httpx.Response:
            return client.post(path, json=body, headers=headers)

        answer = post("/v1/choreo/sessions", {"ttl_seconds": 600})
        answer.raise_for_status()
        self.session = answer.json()["id"]
        path = f"/v1/choreo/sessions/{self.session}"
        known = {"type": "prefill", "content": list(range(5, 45)), "save_as": "known"}
        again = {"type": "prefill", "content": [9, 10], "save_as": "known2"}
        own = {"content": [6, 7], "parents": ["known"], "save_as": self.marker, "role": self.marker}
        calls = [known, again, {**own, "sampling_params": GREEDY}]
        post(f"{path}/messages", {"calls": calls}).raise_for_status()
        post("/v1/choreo/schemas", {"markup": _schema(self.marker, self.marker)})
        post(f"{path}/save", {"name": self.marker, "encodings": True})

    def end(self, client: httpx.Client) -> None:
        """Close its sessions and delete what it has saved and registered, its default session's."""
        headers = {"Authorization": f"Bearer {self.key}"}
        for session in (self.session, *self.spare):
            client.delete(f"/v1/choreo/sessions/{session}", headers=headers)
        self.spare.clear()
        for kind in ("schemas", "kept"):
            listed = client.get(f"/v1/choreo/{kind}", headers=headers).json().get("data", [])
            for entry in listed:
                name = quote(entry.get("id") or entry["name"], safe="")
                client.delete(f"/v1/choreo/{kind}/{name}", headers=headers)
        for prompt, xargs in (
            ([5], {"choreo_mode": "choreo"}),
            ([[5, 6], [7]], {"choreo_auto": "exact"}),
        ):
            body = {"model": "smollm", "prompt": prompt, "max_tokens": 1, "vllm_xargs": xargs}
            answer = client.post("/v1/completions", json=body, headers=headers)
            session = answer.json().get("choreo", {}).get("session")
            client.delete(f"/v1/choreo/sessions/{session}", headers=headers)


class Requests:
    """Requests to all operations of a server, as one tenant beside another would send them.

    Args:
        rng: decides.
        document: the server's own description, `/openapi.json`.
    """

    def __init__(self, rng: random.Random, document: Mapping[str, Any]) -> None:
        self._rng = rng
        self._values = Values(rng, document["components"]["schemas"])
        self._operations = list(_operations(document))
        # Ours are asked for more often than vLLM's, and calls most of all.
        self._weights = [_weight(method, path) for method, path, _ in self._operations]
        self._count = 0

    @property
    def operations(self) -> list[str]:
        return [f"{method} {path}" for method, path, _ in self._operations]

    def draw(self, tenant: Tenant, other: Tenant) -> Request:
        """The next request of `tenant`."""
        rng = self._rng
        self._count += 1
        ((method, path, schema),) = rng.choices(self._operations, self._weights)
        is_stock, content, headers = path in _STOCK, None, {}
        if schema is not None:
            body = (
                self._stock_body(path, tenant, other)
                if is_stock
                else self._body(schema, path, tenant, other)
            )
            if rng.random() < 0.4:
                body = self._spoilt(body, is_stock)
            content, headers = encoded(body), dict(JSON)
            if rng.random() < 0.06 and path.startswith("/v1/choreo"):
                content = damaged(rng, content)
            if rng.random() < 0.03:
                headers["Content-Type"] = rng.choice(("text/plain", "application/json; q=1", "x"))
        if rng.random() < 0.05:
            headers["X-Choreo-Auto"] = rng.choice(("exact", "choreo", "off", "x"))
        if rng.random() < 0.05:
            headers["X-Request-Id"] = "one-for-both"
        stops = rng.choice((0, 1, 200, 2000)) if rng.random() < 0.08 else None
        if method == "POST" and path.endswith("/sessions"):
            stops = None  # nobody could close what was opened; it expires by itself
        filled = self._filled(method, path, tenant, other)
        return Request(f"{method} {path}", method, filled, content, headers, stops)

    def _spoilt(self, body: Any, is_stock: bool) -> Any:
        """What vLLM makes of odd options of its own is vLLM's; so ours are spoilt there alone."""
        if not is_stock:
            return spoilt(self._rng, body) if isinstance(body, (dict, list)) else odd(self._rng)
        xargs = spoilt(self._rng, body.get("vllm_xargs") or {})
        return {**body, "vllm_xargs": xargs if isinstance(xargs, dict) else {}}

    # -- paths -------------------------------------------------------------------------------

    def _filled(self, method: str, path: str, tenant: Tenant, other: Tenant) -> str:
        rng = self._rng
        is_end = method == "DELETE" and path.endswith("{session}")
        # Its own session is to live; another's must.
        own = (tenant.spare or ["x" * 32]) if is_end else [tenant.session] * 6
        session = rng.choice([*own, other.session, "x" * 32, "%2e%2e", "%00"])
        names = [tenant.marker, other.marker, "nobody", "0", "%2e%2e", "a%2Fb", "%00"]
        names += ["x" * 300, f"f{rng.randrange(self._count + 1)}"]
        if method != "DELETE":
            names += ["known", "known", "known2"]
        elif path.endswith("{name}"):  # what others of its own requests need stays
            names.remove(tenant.marker)
        return path.replace("{session}", session).replace("{name}", rng.choice(names))

    # -- bodies ------------------------------------------------------------------------------

    def _body(self, schema: Any, path: str, tenant: Tenant, other: Tenant) -> Any:
        hints = {**self._common(tenant, other), **self._of_path(path, tenant, other)}
        return self._values.of(schema, hints)

    def _common(self, tenant: Tenant, other: Tenant) -> Hints:
        """What the names of fields mean, on every route."""
        rng = self._rng
        foreign = f"{other.session}/known"

        def named() -> Any:
            choices: list[Any] = [
                "known",
                "known",
                "known2",
                tenant.marker,
                f"{tenant.session}/known",
            ]
            choices += [{"id": "known", "start": 1, "stop": 5}, other.marker, foreign, "nobody"]
            return rng.choice(choices)

        repairs: list[Any] = ["first:2", "all", "none", {"share": 0.5, "by": "random", "seed": 1}]
        repairs += [{"layers": [0, 1]}, {"reweight": [0.9, 1.0]}, [[[0, 1]]], "x.json"]
        return {
            "content": lambda: rng.choice(("t5 t6", [5, 6, 7], f"t9 {tenant.marker}")),
            "messages": lambda: rng.choice((["known"], ["known2", "known"], [other.marker], [])),
            "parents": lambda: [named() for _ in range(rng.randrange(4))],
            "offsets": lambda: [rng.choice((0, 40, 80, None)) for _ in range(rng.randrange(3))],
            "new_offset": lambda: rng.choice((0, 50, 200)),
            "save_as": lambda: f"f{self._count}.{rng.randrange(10**6)}",
            "copy_of": named,
            "deny": lambda: rng.choice((["known2"], [tenant.marker], [foreign])),
            "repair": lambda: rng.choice(repairs),
            "keep_hidden": lambda: rng.choice(([1], [0, 1], [])),
            "role": lambda: rng.choice((tenant.marker, "r")),
            "adapter": lambda: rng.choice((None, "smollm", "nobody", "/etc")),
            "max_tokens": lambda: rng.choice((1, 2, 4, 40)),
            "n": lambda: 1,
            "stream": lambda: rng.random() < 0.3,
            "session": lambda: rng.choice((tenant.session, tenant.session, other.session, None)),
            "ttl_seconds": lambda: rng.choice((1, 5, 60)),
            "structured_outputs": lambda: {"choice": ["t5", "t6"]},
            "repetition_detection": lambda: {"max_pattern_size": 3, "min_count": 2},
            "extra_args": lambda: {"a": 1},
            "logit_bias": lambda: {"5": 1.5},
            "model": lambda: "smollm",
        }

    def _of_path(self, path: str, tenant: Tenant, other: Tenant) -> dict[str, Callable[[], Any]]:
        """What they mean on some."""
        rng = self._rng
        schema = rng.choice((tenant.marker, tenant.marker, other.marker, "nobody"))
        prompts = [f'<prompt schema="{schema}">{part}</prompt>' for part in _PROMPTS]
        prompts += ["<" * 100, "<a>" * 50, '<?xml version="1.0"?><prompt schema="x"/>']
        if path.endswith(("/save", "/load")):
            names = [tenant.marker, "k1", "k2", "..", ".x", "a/b", "x" * 129, "é"]
            # Saved under that name, it would be a word of its own, too.
            names += [other.marker] if path.endswith("/load") else []
            return {"name": lambda: rng.choice(names)}
        if path.endswith("/schemas"):
            made = [_schema(f"s{rng.randrange(3)}", "t5"), _schema(tenant.marker, tenant.marker)]
            made += [
                '<schema name="x"><module name="m"><param name="p" len="9999999"/></module>'
                "</schema>",
                "<schema name='x'>" + '<module name="m">' * 40,
            ]
            return {"markup": lambda: rng.choice(made), "encode": lambda: rng.random() < 0.2}
        if path.endswith("/prefetch"):
            return {"module": lambda: rng.choice(("m", "a/b", "", "x" * 99))}
        if path.endswith("/prompts"):
            named = {"known": rng.choice(("known", other.marker))}
            return {"prompt": lambda: rng.choice(prompts), "messages": lambda: named}
        if path.endswith("/messages"):
            # Of a chat's turns, where it names none.
            return {"messages": lambda: [{"role": "user", "content": "t5"}]}
        return {"prompt": lambda: rng.choice(("t5 t6", [5, 6])), "tokens": lambda: [5, 6, 7]}

    def _stock_body(self, path: str, tenant: Tenant, other: Tenant) -> dict[str, Any]:
        rng = self._rng
        common = self._common(tenant, other)
        xargs: dict[str, Any] = {}
        for name in ("parents", "save_as", "deny", "repair", "offsets", "new_offset", "role"):
            if rng.random() < 0.2:
                xargs[f"choreo_{name}"] = common[name]()
        parents = ("known", "known[1:3]", other.marker, f"{other.session}/known", "nobody")
        if "choreo_parents" in xargs:
            xargs["choreo_parents"] = rng.sample(parents, rng.randint(1, 2))
        for name, values in (
            ("choreo_session", (tenant.session, tenant.session, other.session)),
            ("choreo_mode", ("exact", "choreo", "baseline")),
            ("choreo_prefix", ([5], [5, 6])),
            ("choreo_schema", (tenant.marker, other.marker)),
            ("choreo_layout", ("compact", "schema")),
            ("choreo", ({"session": other.session, "parents": []}, {})),
            ("kv_transfer_params", ({},)),
            ("choreo_tenant", ("operator",)),
        ):
            if rng.random() < 0.15:
                xargs[name] = rng.choice(values)
        if rng.random() < 0.3:
            xargs = {"choreo_auto": rng.choice(("exact", "choreo", "off"))}
        body: dict[str, Any] = {"model": "smollm", "max_tokens": rng.choice((1, 2, 20))}
        if rng.random() < 0.8:
            body["vllm_xargs"] = xargs
        if rng.random() < 0.25:
            body["stream"] = True
        turns = [{"role": "user", "content": f"t5 t6 {tenant.marker}"}]
        turns = rng.choice((turns, [{"role": "system", "content": "t7"}, *turns]))
        prompts = ("t5 t6", [5, 6], ["t5", "t6 t7"], [[5], [6, 7]], f"t5 {tenant.marker}")
        if path in ("/v1/chat/completions", "/v1/messages"):
            return {**body, "messages": turns}
        if path == "/v1/responses":
            return {**body, "input": f"t5 {tenant.marker}", "max_output_tokens": 2}
        if path == "/inference/v1/generate":
            params = {"max_tokens": 2, "extra_args": xargs}
            return {"model": "smollm", "token_ids": [5, 6], "sampling_params": params}
        return {**body, "prompt": rng.choice(prompts)}


_PROMPTS = (
    *('<a p="t5"/>t6', "<b/><c/>t6", "<b/>t6", '<message name="known"/>t6', "<a>t1<b/></a>"),
    *("<user>t6</user>", "<nobody/>", "", "t6" * 50),
)


def _schema(name: str, text: str) -> str:
    return (
        f'<schema name="{name}"><module name="a">t5 {text} <param name="p" len="3"/></module>'
        '<union><module name="b">t7</module><module name="c">t8 t9</module></union></schema>'
    )


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Method, path, and the schema of the body if there is one."""
    for path, item in document["paths"].items():
        if path in _LEFT_OUT:
            continue
        for method, operation in item.items():
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema")
            yield method.upper(), path, {} if schema is None and path in _STOCK else schema


def _weight(method: str, path: str) -> float:
    if path.endswith("{session}/messages") and method == "POST":
        return 8.0
    if path.startswith("/v1/choreo"):
        return 1.0
    return 1.5 if path in _STOCK[:2] else 0.3
