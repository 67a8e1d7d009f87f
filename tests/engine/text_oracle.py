# SPDX-License-Identifier: Apache-2.0
"""The oracle of models with states: a dense pass of HuggingFace's model over the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN
from tests.engine.oracle import private_model_class
from vllm_choreo.semantics.message import Message
from vllm_choreo.testing.laws import largest


class TextOracle:
    """Log-probabilities of a text by a dense pass of a HuggingFace model in float32."""

    def __init__(self, model_path: Path) -> None:
        model = private_model_class(model_path).from_pretrained(
            model_path, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = model.eval()
        self.num_layers = int(self.model.config.num_hidden_layers)

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 `[len(token_ids), vocab_size]`; row i predicts the token after token i."""
        return self.model(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)

    def check(self, text: Sequence[int], message: Message) -> float:
        """Check a generated message behind `text`, its header included.

        Returns:
            The largest difference in log-probability.
        """
        worst, generated = 0.0, message.generated_token_ids
        found = self.logprobs([*text, *generated])[len(text) - 1 :]
        for row, token, logprobs in zip(found, generated, message.logprobs or (), strict=False):
            assert float(row[token]) > float(row.max()) - TIE_MARGIN
            differences = [abs(e.logprob - float(row[other])) for other, e in logprobs.items()]
            worst = largest([worst, *differences])
        assert worst < LOGPROB_TOLERANCE
        return worst
