# SPDX-License-Identifier: Apache-2.0
"""A schema and a prompt over HTTP; tests/pml/server has all of it, on a server of its own."""

from __future__ import annotations

import httpx

from vllm_choreo.pml import parse_schema

SCHEMA = """<schema name="hut">
  <module name="shed">The shed behind the house is green.</module>
  <module name="owner">It is <param name="name" len="8"/>'s.</module>
</schema>"""
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
