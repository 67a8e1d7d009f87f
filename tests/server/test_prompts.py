# SPDX-License-Identifier: Apache-2.0
"""A schema and a prompt over HTTP; tests/pml/server has all of it, on a server of its own."""

from __future__ import annotations

import httpx

from vllm_choreo.pml import parse_schema

SCHEMA = """<schema name="hut">
  <module name="shed">The shed behind the house is green.</module>
  <module name="owner">It is <param name="name" len="8"/>'s.</module>
</schema>"""
UNION = """<schema name="union"><union>
  <module name="red">The roof is red.</module>
  <module name="blue">The roof is as blue as the sky on a day in June.</module>
</union></schema>"""
PROMPT = '<prompt schema="hut"><shed/><owner name="Anna"/>What colour is it?</prompt>'
GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


def test_a_schema_is_encoded_once_and_read_by_prompts(
    alpha: httpx.Client, beta: httpx.Client
) -> None:
    made = alpha.post("/v1/choreo/schemas", json={"markup": SCHEMA}).json()
    assert (made["id"], made["owner"], made["num_modules"]) == ("hut", "tenant", 2)
    try:
        shown = alpha.get("/v1/choreo/schemas/hut").json()
        assert parse_schema(shown["markup"]) == parse_schema(SCHEMA)
        assert beta.get("/v1/choreo/schemas/hut").status_code == 404, "it is another tenant's"
        body = {"prompt": PROMPT, "sampling_params": GREEDY}
        first, again = (alpha.post("/v1/choreo/prompts", json=body).json() for _ in range(2))
        assert first["generated_token_ids"] == again["generated_token_ids"]
        usage = again["usage"]
        assert usage["reused_tokens"] == usage["module_tokens"] + usage["argument_tokens"]
        assert usage["argument_tokens"] > 0 and usage["new_tokens"] > 0
    finally:
        assert alpha.delete("/v1/choreo/schemas/hut").json()["deleted"]
    assert alpha.post("/v1/choreo/prompts", json=body).status_code == 400


def test_the_members_of_a_union_are_prefetched(alpha: httpx.Client, beta: httpx.Client) -> None:
    session = alpha.post("/v1/choreo/sessions", json={}).json()["id"]
    at = f"/v1/choreo/sessions/{session}"
    path = "/v1/choreo/schemas/union/prefetch"
    body = {"module": "red", "session": session}

    def resident() -> int:
        return int(alpha.get(at).json()["usage"]["resident_tokens"])

    alpha.post("/v1/choreo/schemas", json={"markup": UNION})
    try:
        assert alpha.post(path, json=body).json() == {
            "id": "union",
            "object": "choreo.schema.prefetched",
            "module": "red",
            "encoded": 2,
        }
        names = [one["id"] for one in alpha.get(f"{at}/messages").json()["data"]]
        num_tokens = resident()
        assert num_tokens > 0
        alpha.post(f"{at}/messages/evict", json={"messages": names})
        assert resident() == 0
        assert alpha.post(path, json=body).json()["encoded"] == 0, "evicted ones come back"
        assert resident() == num_tokens
        alpha.post(f"{at}/messages/free", json={"messages": names})
        assert alpha.post(path, json=body).json()["encoded"] == 2, "the tenant has freed them"
        refused = alpha.post(path, json={**body, "module": "green"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "module")
        assert alpha.post(path.replace("union", "none"), json=body).status_code == 404
        assert beta.post(path, json={"module": "red"}).status_code == 404
        other = beta.post("/v1/choreo/sessions", json={}).json()["id"]
        assert alpha.post(path, json={**body, "session": other}).status_code == 404
        beta.delete(f"/v1/choreo/sessions/{other}")
    finally:
        alpha.delete("/v1/choreo/schemas/union")
        alpha.delete(at)
