# SPDX-License-Identifier: Apache-2.0
"""Prompts on the real engine against dense HuggingFace: a grid of schemas, and random ones.

What a prompt means is computed by `reference` from its trees, with none of the package's positions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams

from tests.engine.adapters import Adapter
from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN
from tests.engine.oracle import Oracle
from tests.pml.reference import Meaning, Unit, by_mask, by_oracle
from tests.pml.trees import Words, prompts, schemas
from vllm_choreo import Choreography
from vllm_choreo.errors import PmlError
from vllm_choreo.pml import PromptCache, parse_prompt, parse_schema
from vllm_choreo.semantics.message import Message

GREEDY = SamplingParams(
    temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=5, detokenize=False
)


def words(first: int, count: int) -> str:
    return " ".join(f"t{5 + (first * 31 + 17 * i + i * i) % 480}" for i in range(count))


def w(first: int, count: int) -> str:
    return f" {words(first, count)} "


# Name, schema, prompts. Lengths lie around the block size of 32.
GRID: dict[str, tuple[str, list[str]]] = {
    "modules": (
        f'<schema name="s">{w(1, 9)}<module name="a">{w(2, 40)}</module>{w(3, 3)}'
        f'<module name="b">{w(4, 33)}</module><module name="c">{w(5, 7)}</module></schema>',
        [
            f'<prompt schema="s"><a/><b/><c/>{w(6, 5)}</prompt>',
            f'<prompt schema="s"><b/>{w(7, 2)}</prompt>',
            f'<prompt schema="s"><c/><a/>{w(8, 4)}</prompt>',
            f'<prompt schema="s">{w(9, 1)}</prompt>',
        ],
    ),
    "nested": (
        f'<schema name="s"><module name="a">{w(1, 20)}<module name="b">{w(2, 35)}'
        f'<module name="c">{w(3, 4)}</module>{w(4, 31)}</module>{w(5, 6)}'
        f"</module>{w(6, 2)}</schema>",
        [
            f'<prompt schema="s"><a><b><c/></b></a>{w(7, 3)}</prompt>',
            f'<prompt schema="s"><a><b/></a>{w(8, 3)}</prompt>',
            f'<prompt schema="s"><a>{w(9, 9)}</a>{w(8, 3)}</prompt>',
        ],
    ),
    "unions": (
        f'<schema name="s"><union><module name="a">{w(1, 12)}</module><module name="b">{w(2, 40)}'
        f'<union><module name="d">{w(3, 5)}</module><module name="e">{w(4, 9)}</module></union>'
        f'</module></union>{w(5, 3)}<union><module name="f">{w(6, 32)}</module></union></schema>',
        [
            f'<prompt schema="s"><a/><f/>{w(7, 3)}</prompt>',
            f'<prompt schema="s"><b><e/></b>{w(8, 3)}</prompt>',
            f'<prompt schema="s"><f/><b><d/></b>{w(9, 3)}</prompt>',
            f'<prompt schema="s"><a/>{w(10, 30)}<f/>{w(7, 3)}</prompt>',
        ],
    ),
    "params": (
        f'<schema name="s">{w(1, 4)}<module name="a"><param name="x" len="6"/>{w(2, 30)}'
        f'<param name="y" len="33"/><param name="z" len="2"/>{w(3, 5)}</module></schema>',
        [
            f'<prompt schema="s"><a x="{words(4, 6)}" y="{words(5, 20)}" z="t7 t8"/>{w(6, 3)}'
            "</prompt>",
            f'<prompt schema="s"><a y="{words(5, 33)}"/>{w(6, 3)}</prompt>',
            f'<prompt schema="s"><a x="" z="t9"/>{w(6, 3)}</prompt>',
            f'<prompt schema="s"><a/>{w(6, 3)}</prompt>',
        ],
    ),
    "scaffolds": (
        f'<schema name="s">{w(1, 5)}<module name="a">{w(2, 34)}<module name="d">{w(3, 6)}</module>'
        f'</module>{w(4, 8)}<module name="b">{w(5, 20)}<param name="x" len="3"/></module>'
        f'<module name="c">{w(6, 9)}</module>{w(7, 2)}<scaffold modules="a a/d b"/></schema>',
        [
            f'<prompt schema="s"><a><d/></a><b/>{w(8, 3)}</prompt>',
            f'<prompt schema="s"><a><d/></a><b x="t9 t10"/><c/>{w(8, 3)}</prompt>',
            f'<prompt schema="s"><a/><b/>{w(8, 3)}</prompt>',
        ],
    ),
    "chat": (
        f'<schema name="s"><system>{w(1, 9)}</system><user>{w(2, 3)}<module name="a">{w(3, 40)}'
        f'</module></user><assistant>{w(4, 2)}</assistant></schema>',
        [
            f'<prompt schema="s"><a/><user>{w(5, 4)}</user></prompt>',
            f'<prompt schema="s"><user>{w(5, 4)}</user><assistant>{w(6, 2)}</assistant></prompt>',
            f'<prompt schema="s"><a/>{w(6, 2)}</prompt>',
        ],
    ),
    "uncached": (
        f'<schema name="s">{w(1, 9)}<module name="a" cache="false">{w(2, 10)}'
        f'<param name="x" len="4"/>{w(3, 3)}<module name="b">{w(4, 35)}</module>{w(5, 2)}'
        f"</module>{w(6, 3)}</schema>",
        [
            f'<prompt schema="s"><a x="t5 t6"><b/></a>{w(7, 3)}</prompt>',
            f'<prompt schema="s"><a/>{w(7, 3)}</prompt>',
        ],
    ),
}  # fmt: skip


@pytest.fixture
def llm(plain_llama: Any) -> Any:
    return plain_llama


@pytest.fixture(scope="module")
def oracle(tiny_oracle: Callable[[str], Oracle]) -> Oracle:
    return tiny_oracle("llama")


def assert_same(message: Message, expected: torch.Tensor, num_header: int) -> None:
    """Every greedy token, and every log-probability that the engine tells."""
    assert message.logprobs is not None
    rows = expected[num_header - 1 : -1]
    for row, token, told in zip(rows, message.generated_token_ids, message.logprobs, strict=True):
        assert float(row.max() - row[token]) < TIE_MARGIN
        for token_id, entry in told.items():
            assert abs(float(row[token_id]) - entry.logprob) < LOGPROB_TOLERANCE


def check(
    message: Message, oracle: Oracle, meaning: Meaning, ways: tuple[Any, ...] = (by_oracle,)
) -> None:
    header = meaning.header
    assert message.token_ids[: len(header.tokens)] == tuple(header.tokens)
    for way in ways:
        assert_same(message, way(oracle, header, message.token_ids), len(header.tokens))


def fits(cache: PromptCache, prompt: Any, layout: str) -> bool:
    """Whether new text has room; and turns, which are random, are those of one conversation."""
    try:
        cache.plan(prompt, layout=layout)
    except PmlError as error:
        assert "does not fit" in str(error) or "chat template" in str(error)
        return False
    return True


@pytest.mark.parametrize("layout", ["schema", "compact"])
@pytest.mark.parametrize("context", ["modules", "schema"])
@pytest.mark.parametrize("name", GRID)
def test_the_grid(c: Choreography, oracle: Oracle, name: str, context: str, layout: str) -> None:
    markup, asked = GRID[name]
    cache = PromptCache(c, Words())
    cache.register(markup, context=context)
    schema = parse_schema(markup)
    asked = [prompt for prompt in asked if fits(cache, prompt, layout)]
    answers = cache.decode(asked, layout=layout, sampling_params=GREEDY)
    # In the schema's layout everything is seen where it was encoded: one row and a block mask.
    ways = (by_mask, by_oracle) if layout == "schema" else (by_oracle,)
    for prompt, answer in zip(asked, answers, strict=True):
        meaning = Meaning([schema], parse_prompt(prompt), context, layout)
        check(answer.message, oracle, meaning, ways)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],
)
@given(data=st.data(), context=st.sampled_from(("modules", "schema")))
def test_random_schemas(llm: Any, oracle: Oracle, data: st.DataObject, context: str) -> None:
    schema = data.draw(schemas())
    asked = [data.draw(prompts(schema)) for _ in range(3)]
    with Choreography(llm) as c:
        cache = PromptCache(c, Words())
        cache.register(schema, context=context)
        for layout in ("schema", "compact"):
            good = [prompt for prompt in asked if fits(cache, prompt, layout)]
            for prompt, answer in zip(
                good,
                cache.decode(good, layout=layout, sampling_params=GREEDY) if good else [],
                strict=True,
            ):
                check(answer.message, oracle, Meaning([schema], prompt, context, layout))


def test_a_scaffold_that_is_taken_as_a_whole_is_plain_text(llm: Any, c: Choreography) -> None:
    markup = (
        f'<schema name="s">{w(1, 5)}<module name="a">{w(2, 34)}</module>{w(3, 8)}'
        f'<module name="b">{w(4, 20)}</module>{w(5, 3)}<scaffold modules="a b"/></schema>'
    )
    cache = PromptCache(c, Words())
    layout = cache.register(markup, encode=True)
    answer = cache.decode(f'<prompt schema="s"><b/><a/>{w(6, 4)}</prompt>', sampling_params=GREEDY)
    assert answer.message.usage.exact and answer.usage.module_tokens == layout.num_tokens
    text = " ".join(
        words(n, count) for n, count in ((1, 5), (2, 34), (3, 8), (4, 20), (5, 3), (6, 4))
    )
    prompt = {"prompt_token_ids": Words().encode(text)}
    (plain,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert tuple(plain.outputs[0].token_ids) == answer.message.generated_token_ids
    for one, other in zip(plain.outputs[0].logprobs, answer.message.logprobs, strict=True):
        for token in one.keys() & other.keys():
            assert abs(one[token].logprob - other[token].logprob) < LOGPROB_TOLERANCE
    alone = cache.decode(f'<prompt schema="s"><b/>{w(6, 4)}</prompt>', sampling_params=GREEDY)
    assert not alone.message.usage.exact


@pytest.mark.parametrize("name", GRID)
def test_exact_mode_is_plain_text(llm: Any, c: Choreography, name: str) -> None:
    markup, asked = GRID[name]
    cache = PromptCache(c, Words())
    cache.register(markup)
    for prompt in asked:
        meaning = Meaning([parse_schema(markup)], parse_prompt(prompt), layout="compact")
        answer = cache.decode(prompt, mode="exact", sampling_params=GREEDY)
        assert answer.message.usage.exact
        text = [t for unit, a, b, _ in meaning.header.sees for t in unit.tokens[a:b]]
        ids = [*text, *meaning.header.tokens]
        (plain,) = llm.generate([{"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
        assert tuple(plain.outputs[0].token_ids) == answer.message.generated_token_ids
    with Choreography(llm, mode="baseline") as text_session:
        cache = PromptCache(text_session, Words())
        cache.register(markup)
        again = cache.decode(asked[-1], sampling_params=GREEDY)
        assert again.message.generated_token_ids == answer.message.generated_token_ids


def test_messages_of_the_run_and_several_schemas(c: Choreography, oracle: Oracle) -> None:
    cache = PromptCache(c, Words())
    markups = [GRID["modules"][0], GRID["unions"][0].replace('name="s"', 'name="t"')]
    for markup in markups:
        cache.register(markup)
    note = c.decode(Words().encode(w(20, 9)), sampling_params=GREEDY)
    prompt = (
        '<prompt schema="s"><b/><message name="note"/><prompt schema="t"><a/></prompt>'
        f'{w(21, 3)}<message name="note"/>{w(22, 2)}</prompt>'
    )
    for layout in ("schema", "compact"):
        answer = cache.decode(
            prompt, layout=layout, messages={"note": note}, sampling_params=GREEDY
        )
        assert answer.usage.message_tokens == 2 * note.num_tokens
        passed = {"note": Unit(list(note.token_ids), 0)}
        trees = [parse_schema(markup) for markup in markups]
        check(
            answer.message, oracle, Meaning(trees, parse_prompt(prompt), "modules", layout, passed)
        )


def test_adapters_encode_modules_and_answer(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tiny_model_path("llama")
    adapter = Adapter(path, tmp_path, 1)
    markup, asked = GRID["params"]
    with Choreography(engine_slot(path, enable_lora=True, max_loras=1, max_lora_rank=8)) as c:
        cache = PromptCache(c, Words())
        cache.register(markup, adapter=adapter.request)
        answers = cache.decode(asked, adapter=adapter.request, sampling_params=GREEDY)
        for prompt, answer in zip(asked, answers, strict=True):
            meaning = Meaning([parse_schema(markup)], parse_prompt(prompt))
            check(answer.message, adapter.oracle, meaning, (by_mask,))
