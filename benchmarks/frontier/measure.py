# SPDX-License-Identifier: Apache-2.0
"""One reader under every rule and budget: how far what it says is from what the text says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.frontier.rules import ALL, NONE, Choice, Given, choices, hidden_layers
from benchmarks.frontier.tasks import Reading
from vllm_choreo.lab.study.divergence import Measured, kl_per_token

# Temperature and scale of the log-sum-exp; the paper's searches are around these.
WEIGHTS = ((0.9, 1.0), (0.8, 1.0), (0.9, 0.95))


class Reader:
    """One reader, its messages in a session of their own.

    Args:
        llm: that forces tokens, and has memory for hidden states.
        seed: of candidates that are drawn, and of random choices.
    """

    def __init__(self, llm: Any, reading: Reading, budgets: Sequence[float], seed: int) -> None:
        from vllm import SamplingParams

        from vllm_choreo import Choreography

        self.reading, self.budgets, self.seed = reading, budgets, seed
        self.num_layers = llm.llm_engine.model_config.hf_text_config.num_hidden_layers
        self.c = Choreography(llm)
        self._params = SamplingParams(temperature=0.0, max_tokens=reading.max_tokens)
        first = self.c.prefill(reading.first)
        keep = hidden_layers(self.num_layers, budgets)
        behind = {"parents": [first], "keep_hidden": keep}
        if reading.documents:
            calls = [{"tokens": text, **behind} for text in reading.documents]
            others = self.c.prefill(calls)
        else:
            drawn = [
                SamplingParams(temperature=0.8, max_tokens=96, seed=1000 * seed + number)
                for number in range(len(reading.thoughts))
            ]
            calls = [
                {"header": header, "sampling_params": params, **behind}
                for header, params in zip(reading.thoughts, drawn, strict=True)
            ]
            others = self.c.decode(calls)
        self.parents = [first, *others]
        self.moved = self.parents[2:]  # the others are read where they were encoded

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per rule and budget."""
        text = self._read([{"mode": "exact"}])[0]
        said = list(text.generated_token_ids)
        given = Given(
            tuple(message.num_tokens for message in self.moved),
            text.num_tokens - len(said),
            self.seed,
            self.num_layers,
        )
        chosen = choices(given, self.budgets)
        ends = {(NONE, 0.0): Choice({}), (ALL, 1.0): Choice({"repair": "all"})}
        weighed = {
            (f"APE {temperature:g}, {scale:g}", 0.0): Choice(
                {"repair": {"reweight": [temperature, scale]}}
            )
            for temperature, scale in WEIGHTS
        }
        chosen = {**ends, **chosen, **weighed}
        options = [self._options(choice.options) for choice in chosen.values()]
        # Alone, as all that it is compared with.
        (base,) = self._distributions([{"mode": "exact"}], said)
        found = self._distributions(options, said)
        answers = self._read(options)
        for (name, choice), one, answer in zip(chosen.items(), found, answers, strict=True):
            cost = choice.charged(answer.usage.repaired_tokens)
            yield self._row(name, cost / sum(given.lengths), base, one, answer.generated_text)

    def _row(
        self,
        name: tuple[str, float],
        charged: float,
        base: np.ndarray,
        found: np.ndarray,
        text: str,
    ) -> dict[str, Any]:
        kl = kl_per_token(base, found)
        is_same = bool((base.argmax(1) == found.argmax(1)).all())
        wanted = self.reading.answer
        is_right = "" if wanted is None else int(all(w in text for w in wanted.split()))
        return {
            "rule": name[0],
            "budget": name[1],
            "charged": round(charged, 4),
            "kl": round(float(kl.mean()), 6),
            "same": int(is_same),
            "right": is_right,
        }

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Of a call: runs of all its parents, where a rule gives those that matter."""
        if not isinstance(options.get("repair"), list):
            return options
        return {"repair": [[], [], *options["repair"]]}

    def _read(self, options: Sequence[dict[str, Any]]) -> list[Any]:
        calls = [{"header": self.reading.header, "parents": self.parents, **o} for o in options]
        messages: list[Any] = self.c.decode(calls, sampling_params=self._params)
        self.c.free(*messages)
        return messages

    def _distributions(self, options: Sequence[dict[str, Any]], said: list[int]) -> list[Any]:
        """What is said at each token of the text's answer."""
        params = self._params.clone()
        params.extra_args = {"forced_tokens": said}
        params.max_tokens, params.ignore_eos = len(said), True
        calls = [
            {
                "header": self.reading.header,
                "parents": self.parents,
                "sampling_params": params,
                **o,
            }
            for o in options
        ]
        measured = Measured(self.c)
        self.c.free(*measured.decode(calls))
        return measured.distributions

    def close(self) -> None:
        self.c.close()
