# SPDX-License-Identifier: Apache-2.0
"""A full fine-tune of a model on right answers: the second variant of a pair of models.

    python -m benchmarks.variants.finetune RECORDED OUT [--model MODEL] [--epochs 2]
    vllm-choreo profile-pair MODEL OUT RECORDED

All weights are trained (`transformers.Trainer`, float32) on what `vllm-choreo record` has written:
the texts that its calls read, with the right answers in place of the recorded ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.recorded import recorded_task
from vllm_choreo.lab.cli.task import Task
from vllm_choreo.lab.train.packing import pack, pack_as_text
from vllm_choreo.lab.train.recorded import calls_of
from vllm_choreo.testing.models.embedded import model_folder

_NO_LOSS = -100  # label of a token that is read, not learnt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recorded", type=Path, help="folder of `vllm-choreo record`")
    parser.add_argument("out", type=Path, help="folder of the model that is trained")
    parser.add_argument("--model", help="folder or name (default: the small test model)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    tasks = [recorded_task(path) for path in sorted((args.recorded / "train").glob("*.json"))]
    if not tasks:
        raise SystemExit(f"{args.recorded} has no runs in train/: give a folder of a recorder")
    train(model_folder(args.model), tasks, args)
    return 0


def train(model: str, tasks: Sequence[Task], args: argparse.Namespace) -> None:
    """Train all weights of a model, and save it with its tokenizer."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=TrainingArguments(
            output_dir=str(args.out / "checkpoints"),
            num_train_epochs=args.epochs,
            learning_rate=args.learning_rate,
            per_device_train_batch_size=args.batch,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=[example(task, tokenizer) for task in tasks],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train()
    trainer.save_model(str(args.out))
    tokenizer.save_pretrained(str(args.out))


def example(task: Task, tokenizer: Any) -> dict[str, list[int]]:
    """The text of a run's last call up to its answer, and then the right one.

    Raises:
        ChoreoError: nobody knows the right answer, or there are several.
    """
    assert task.recorded is not None
    if len(task.problems) != 1:
        raise ChoreoError("one problem is to be learnt of a run", parameter="task", value=task.id)
    text = pack_as_text(pack(calls_of(task.recorded))).calls[-1]
    read = list(text.token_ids[: -text.num_generated])
    right = tokenizer.encode(f" {task.problems[0].answers[0]}", add_special_tokens=False)
    right.append(tokenizer.eos_token_id)
    return {"input_ids": [*read, *right], "labels": [_NO_LOSS] * len(read) + right}


if __name__ == "__main__":
    sys.exit(main())
