# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Coder-0.5B with its real weights: the conversion, and laws of choreography on them.

Collected only where `vllm-choreo model --name qwen2.5-coder-0.5b` has made the folder (see
conftest.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer
from vllm import LLM, SamplingParams

from tests.engine.choreographies import LOGPROB_TOLERANCE
from vllm_choreo import Choreography
from vllm_choreo.testing.models.embedded import embedded_model

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # 2.5 GB of weights

_GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
_PARTS = (
    "<|im_start|>system\nYou answer briefly.<|im_end|>\n",
    "<|im_start|>user\nThe shed is green. Anna owns a red bicycle.<|im_end|>\n",
    "<|im_start|>user\nWhat colour is the shed?<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def llm(engine_slot: Callable[..., Any]) -> LLM:
    engine: LLM = engine_slot(embedded_model(progress=False, name="qwen2.5-coder-0.5b"))
    return engine


def _answered(llm: LLM, prompt: str) -> tuple[list[int], list[float], str]:
    (output,) = llm.generate([prompt], _GREEDY, use_tqdm=False)
    (answer,) = output.outputs
    assert answer.logprobs is not None
    logprobs = [
        step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)
    ]
    return list(answer.token_ids), logprobs, answer.text


def test_tokens_are_those_of_qwen() -> None:
    """As its authors' tokenizer cuts them."""
    folder = embedded_model(progress=False, name="qwen2.5-coder-0.5b")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("Hello world").ids == [9707, 1879]
    turn = tokenizer.encode("<|im_start|>user\n1234 it's<|im_end|>\n")
    assert turn.ids[:3] == [151644, 872, 198] and turn.ids[-2:] == [151645, 198]
    assert turn.tokens[3:9] == ["1", "2", "3", "4", "Ġit", "'s"]


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is the capital of France? One word.", "Paris"),
        ("What is 17 + 25? The number alone.", "42"),
        ("Write the Python keyword that defines a function. One word.", "def"),
    ],
)
def test_it_knows_what_it_should(llm: LLM, question: str, expected: str) -> None:
    tokenizer = llm.get_tokenizer()
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert expected in _answered(llm, prompt)[2]


def test_text_is_not_surprising(llm: LLM) -> None:
    """A wrong matrix, norm or merge makes a surprise of 5 nats and more of every token."""
    text = (
        "The cat sat on the mat and looked out of the window. It was raining, so the children "
        "stayed inside and played a game until their mother called them for dinner."
    )
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([text], scored, use_tqdm=False)
    assert output.prompt_logprobs is not None and output.prompt_token_ids is not None
    pairs = list(zip(output.prompt_logprobs, output.prompt_token_ids, strict=True))[1:]
    surprise = [-step[token].logprob for step, token in pairs if step is not None]
    assert len(surprise) == len(pairs) and 1.0 < sum(surprise) / len(surprise) < 3.5


def test_a_chain_is_the_text(llm: LLM) -> None:
    token_ids, logprobs, text = _answered(llm, "".join(_PARTS))
    with Choreography(llm) as c:
        first = c.prefill(_PARTS[0])
        second = c.prefill(_PARTS[1], parents=[first])
        answer = c.decode(_PARTS[2], parents=[first, second], sampling_params=_GREEDY)
        found = [step[token] for step, token in _steps(answer)]
        assert answer.usage.exact
        assert list(answer.generated_token_ids) == token_ids and "green" in text
        assert found == pytest.approx(logprobs, abs=LOGPROB_TOLERANCE)


def _steps(answer: Any) -> list[tuple[dict[int, float], int]]:
    """Log-probabilities of each step by token, and the token that was taken."""
    steps = [{token: one.logprob for token, one in step.items()} for step in answer.logprobs]
    return list(zip(steps, answer.generated_token_ids, strict=True))
