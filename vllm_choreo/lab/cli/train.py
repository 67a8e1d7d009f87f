# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo train`: an adapter from recorded runs; an interrupted training goes on."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.cli.arguments import add_out
from vllm_choreo.cli.commands import Main
from vllm_choreo.cli.numbers import natural, positive
from vllm_choreo.lab.train.settings import CUTS, LOSSES, SCHEDULES, TrainSettings
from vllm_choreo.trained_adapter import PLACEMENTS, TrainedAdapter, current_placement

if TYPE_CHECKING:
    from vllm_choreo.lab.train.loop import TrainState

PICTURE = "curves.png"


def command(parser: argparse.ArgumentParser) -> Main:
    """Train an adapter on recorded runs, so that choreography answers as text.

    Defaults of the arguments are those of `TrainSettings`.
    """
    add = parser.add_argument
    add("recorded", type=Path, metavar="RECORDED", help="folder of `vllm-choreo record`")
    add("--model", metavar="MODEL", help="model folder or name (default: the small test model)")
    add(
        "--placement",
        required=True,
        type=current_placement,
        choices=PLACEMENTS,
        help="which calls use the adapter; prefill: those that encode messages; decode: those "
        "that generate; both: all",
    )
    add("--cut", choices=CUTS, help="messages: calls read messages as they were recorded, the "
        "default; content: the same texts cut by their content, as choreo_auto reads them with the "
        "context alone")  # fmt: skip
    add("--cut-tokens", type=positive, metavar="N", help="of a piece on average (default: 128)")
    add("--loss", choices=LOSSES, help="kl: match the text's distribution, the default; ce: "
        "say the recorded tokens")  # fmt: skip
    add("--rank", type=positive, metavar="N", help="of LoRA (default: 64)")
    add("--alpha", type=float, metavar="A", help="of LoRA (default: 32)")
    add("--dropout", type=float, metavar="P", help="of LoRA (default: 0.05)")
    add("--targets", nargs="+", metavar="LAYER", help="linear layers that LoRA changes (default: "
        "q_proj k_proj v_proj o_proj)")  # fmt: skip
    add("--learning-rate", type=float, metavar="R", help="the largest one (default: 5e-5)")
    add("--schedule", choices=SCHEDULES, help="of the learning rate (default: linear)")
    add("--warmup", type=float, metavar="S", help="share of all steps (default: 0)")
    add("--epochs", type=positive, metavar="N", help="at most (default: 8)")
    add("--batch", type=positive, metavar="N", help="runs per step (default: 4)")
    add("--pack-tokens", type=positive, metavar="N", help="of one forward (default: 2048)")
    add("--clip", type=float, metavar="G", help="greatest norm of a gradient (default: 1)")
    add("--patience", type=positive, metavar="N", help="evaluations without a better one that end "
        "the training (default: 3)")  # fmt: skip
    add("--evaluations", type=positive, metavar="N", help="per epoch (default: 1)")
    add("--seed", type=natural, metavar="N", help="(default: 0)")
    add("--dtype", choices=("float32", "bfloat16"), help="of the base model (default: bfloat16 on "
        "a GPU that computes in it, else float32)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="(default: cuda if there is one)")
    add("--save-memory", action="store_true", default=None, help="run layers twice instead of "
        "keeping what they computed")  # fmt: skip
    add_out(parser, "adapter", "folder of the adapter")
    return main


def main(args: argparse.Namespace) -> int:
    """Train; the exit status, 0.

    Raises:
        ChoreoError: see `vllm_choreo.lab.train.loop.train`.
    """
    from vllm_choreo.lab.record.recording import Recording
    from vllm_choreo.lab.report.curves import draw_curves
    from vllm_choreo.lab.train.loop import train
    from vllm_choreo.testing.models.embedded import model_folder

    device, dtype = _device_and_dtype(args)
    given = {setting.name: getattr(args, setting.name) for setting in fields(TrainSettings)}
    given |= {"device": device, "dtype": dtype}
    given["targets"] = None if args.targets is None else tuple(args.targets)
    settings = TrainSettings(**{name: v for name, v in given.items() if v is not None})
    recording = Recording.load(args.recorded)
    with _Bar() as bar:
        adapter = train(model_folder(args.model), recording, settings, args.out, bar.show)
    draw_curves(adapter.curves, f"{settings.loss}, nats per token", args.out / PICTURE)
    print(_summary(adapter, args.out))
    if bar.state and bar.state.seconds:
        tokens, seconds = bar.state.num_tokens, bar.state.seconds
        rate = f"{tokens / seconds:,.0f} a second"
        print(f"{tokens:,} tokens in {seconds / 60:.1f} minutes of steps: {rate}")
    return 0


def _device_and_dtype(args: argparse.Namespace) -> tuple[str, str]:
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_native = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return device, args.dtype or ("bfloat16" if is_native else "float32")


class _Bar:
    """A progress bar of steps, with both losses and the tokens of a second.

    Attributes:
        state: progress that was shown last; None: nothing was left to be done.
    """

    state: TrainState | None = None

    def __enter__(self) -> _Bar:
        from tqdm import tqdm

        self._bar = tqdm(desc="training", unit="step", dynamic_ncols=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, state: TrainState) -> None:
        """Show the progress that `train` reports."""
        self.state = state
        self._bar.total = state.num_steps
        if not self._bar.n:  # what was done before took none of this run's time
            self._bar.n = self._bar.initial = state.step
        shown = {name: f"{curve[-1][1]:.4f}" for name, curve in state.curves.items() if curve}
        if state.seconds:
            shown["tokens/s"] = f"{state.num_tokens / state.seconds:.0f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(state.step - self._bar.n)


def _summary(adapter: TrainedAdapter, out: Path) -> str:
    development = adapter.curves["development"]
    step, best = min(development, key=lambda point: point[1])
    return (
        f"{out}: {adapter.placement} adapter for {adapter.base.name}; development loss "
        f"{development[0][1]:.4f} -> {best:.4f} nats per token at step {step} ({adapter.loss}); "
        f"curves in {out / PICTURE}"
    )
