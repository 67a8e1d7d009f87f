# SPDX-License-Identifier: Apache-2.0
"""An engine in this process on which programs run, one after the other."""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.engine.feature_machine.configurations import (
    Configuration,
    scheduling_of,
)
from tests.engine.feature_machine.program import Operation
from tests.engine.feature_machine.running import Run
from tests.engine.feature_machine.shown import Shown
from tests.engine.feature_machine.truth import AnyTruth, StateTruth, TextTruth, Truth
from tests.engine.fp8_witness import Witness
from tests.engine.state_oracle import StateOracle
from tests.engine.text_oracle import TextOracle


@dataclass
class Machine:
    """An engine for programs of one configuration, and what is true of its models.

    Attributes:
        llm: vLLM's.
        adapters: vLLM's requests for them, by number from 1.
        witness: of what is read and stored in 8 bits.
        shown: pictures that programs show.
        counts: what happened in all programs.
        is_clean: whether the engine is as new; not so after a program that failed.
    """

    configuration: Configuration
    llm: Any
    truth: AnyTruth
    adapters: Sequence[Any] = ()
    counts: Counter[str] = field(default_factory=Counter)
    is_clean: bool = True
    witness: Witness | None = None
    shown: Shown = field(default_factory=Shown)

    def run(self, operations: Iterable[Operation]) -> None:
        """Run a program and check all of it.

        Raises:
            AssertionError: something is wrong.
            RuntimeError: a program before it failed, and the engine could not be made as new: what
                this one found would be that one's. Or what else the engine raised.
        """
        if not self.is_clean and not self.recover():
            raise RuntimeError("a program before this one has left the engine unusable; start anew")
        self.counts["programs"] += 1
        self.truth.clear()
        self.is_clean = False
        self._run().run(operations)
        self.is_clean = True

    def recover(self) -> bool:
        """Give up what a failed program has left; returns whether the engine is as new then."""
        try:
            self._run().give_up()
        except Exception:
            self.is_clean = False
        else:
            self.is_clean = True
        return self.is_clean

    def stop(self) -> None:
        """Shut the engine down now: vLLM's process groups are global."""
        self.llm.llm_engine.engine_core.shutdown()
        gc.collect()

    def _run(self) -> Run:
        given = (self.llm, self.configuration, self.truth, self.adapters, self.counts)
        return Run(*given, self.shown, self.witness)


def start_machine(
    configuration: Configuration, model_path: Path, oracle: Callable[[Path], Any], folder: Path
) -> Machine:
    """Start the engine of a configuration, with its adapters and oracles.

    Args:
        model_path: of the configuration's model.
        oracle: makes that of a model.
        folder: for adapters.
    """
    from tests.engine.adapters import Adapter
    from tests.engine.engines import start_engine

    torch.set_num_threads(1)
    # What torch takes from the system holds NaN then, so that whoever reads it is found.
    torch.use_deterministic_algorithms(True, warn_only=True)
    adapters = []
    for number in range(1, configuration.num_adapters + 1):
        adapters.append(Adapter(model_path, Path(tempfile.mkdtemp(dir=folder)), number))
    truth: AnyTruth
    shown = Shown()
    if configuration.composes:
        truth = StateTruth(StateOracle(model_path))
    elif configuration.has_states:
        truth = TextTruth(TextOracle(model_path))
    else:
        oracles = [oracle(model_path), *(adapter.oracle for adapter in adapters)]
        truth = Truth(oracles, configuration.block_size)
        shown = getattr(oracles[0], "shown", shown)
    with scheduling_of(configuration):
        llm = start_engine(model_path, **configuration.engine_options(model_path))
    requests = [adapter.request for adapter in adapters]
    machine = Machine(configuration, llm, truth, requests, shown=shown)
    if "fp8" in configuration:
        machine.witness = Witness(llm, dict(enumerate(oracles)))
    return machine
