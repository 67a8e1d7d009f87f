# SPDX-License-Identifier: Apache-2.0
"""Engines to which messages go that a session is given, over played engines."""

from __future__ import annotations

from typing import Any

from tests.api.test_fleet import PlayedLLM, _run, model_config
from vllm_choreo.api.async_choreography import AsyncChoreography
from vllm_choreo.api.fleet import fleet_of

__all__ = ["model_config"]  # fixture


def test_what_is_given_together_lies_together_until_its_engine_has_much_to_do(
    model_config: Any,
) -> None:
    async def main() -> None:
        llm = PlayedLLM(3, model_config)
        c = AsyncChoreography(llm)
        given = [{"tokens": [n] * 90} for n in range(9)]
        first = {c.engine_of(message) for message in await c.prefill(given)}
        assert len(first) == 1
        (engine,), fleet = first, fleet_of(llm)  # type: ignore[arg-type]
        assert fleet is not None
        fleet.loads.add(engine, fleet.measured.rates().encode * 2_000)
        assert c.engine_of(await c.prefill([10] * 90)) != engine

    _run(main())


def test_what_lies_somewhere_is_given_there(model_config: Any) -> None:
    async def main() -> None:
        llm = PlayedLLM(3, model_config)
        documents = [[n] * 90 for n in range(9)]
        homes = {}
        for number, tokens in enumerate(documents):
            c = AsyncChoreography(llm, tenant="t")
            homes[number] = c.engine_of(await c.prefill(tokens))
        assert len(set(homes.values())) == 3
        c = AsyncChoreography(llm, tenant="t")
        again = await c.prefill([{"tokens": tokens} for tokens in documents])
        assert {n: c.engine_of(message) for n, message in enumerate(again)} == homes

    _run(main())
