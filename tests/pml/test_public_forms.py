# SPDX-License-Identifier: Apache-2.0
"""What a prompt says on a real engine is its text, whatever template and form the schema has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.chat.chat_templates import tokenizer_of
from tests.pml.language.test_branches import trip
from tests.pml.trees import Words
from vllm_choreo import Choreography, pml
from vllm_choreo.pml import PromptCache, parse_schema
from vllm_choreo.pml.language.tree import Schema

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
TURNS = (
    '<schema name="s"><system>one</system><user>two <module name="a">three</module></user>'
    "<assistant>four</assistant></schema>"
)


@pytest.fixture
def llm(plain_llama: Any) -> Any:
    return plain_llama


def assert_is_text(llm: Any, answer: Any, token_ids: Sequence[int]) -> None:
    """An answer is that of an ordinary request."""
    (plain,) = llm.generate([{"prompt_token_ids": [*token_ids]}], GREEDY, use_tqdm=False)
    assert answer.message.usage.exact
    assert answer.message.generated_token_ids == tuple(plain.outputs[0].token_ids)


@pytest.mark.parametrize("family", ["qwen3", "llama3", "mistral"])
def test_turns_are_those_of_the_family(llm: Any, c: Choreography, family: str) -> None:
    tokenizer = tokenizer_of(family)
    cache = PromptCache(c, tokenizer)
    cache.register(TURNS)
    prompt = '<prompt schema="s"><a/><user>ask</user></prompt>'
    answer = cache.decode(prompt, mode="exact", sampling_params=GREEDY)
    if family == "mistral":  # its template would move the system's text behind the answer
        text = "<s>[INST] one\n\ntwo three[/INST] four</s>[INST] ask[/INST]"
    else:
        roles = ("system", "user", "assistant", "user")
        said = ("one", "two three", "four", "ask")
        chat = [{"role": r, "content": t} for r, t in zip(roles, said, strict=True)]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert_is_text(llm, answer, tokenizer.encode(text, add_special_tokens=False))
    module = cache.decode(prompt, layout="compact", sampling_params=GREEDY)
    assert module.message.num_tokens == answer.message.num_tokens


def test_modules_may_be_empty_and_come_from_files(
    llm: Any, c: Choreography, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("t7 t8 t9")
    schema = parse_schema(
        '<schema name="s"> t5 <module name="none"/><module name="a" src="a.txt"/> t6 </schema>',
        sources=tmp_path,
    )
    cache = PromptCache(c, Words())
    cache.register(schema)
    answer = cache.decode(
        '<prompt schema="s"><none/><a/> t10 </prompt>', mode="exact", sampling_params=GREEDY
    )
    assert_is_text(llm, answer, Words().encode("t5 t7 t8 t9 t6 t10"))


@pytest.mark.parametrize("city", ["rome", "St. John's", "else"])
@pytest.mark.parametrize("abroad", [False, True])
def test_a_function_with_branches_says_what_it_yields(
    llm: Any, c: Choreography, abroad: bool, city: str
) -> None:
    """The oracle is the function, run as it stands."""
    program = pml.program(trip)
    cache = PromptCache(c, Words())
    cache.register(Schema((program.module,), name="s"))
    given = {"abroad": abroad, "city": city, "hot": False}
    prompt = pml.prompt("s", program(**given, days="t20 t21"), "t30")
    answer = cache.decode(prompt, mode="exact", sampling_params=GREEDY)
    text = "".join(trip(**given, days="t20 t21 ")) + "t30"
    assert_is_text(llm, answer, Words().encode(text))
