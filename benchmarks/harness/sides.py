# SPDX-License-Identifier: Apache-2.0
"""The sides of a comparison of workflows, which take turns.

    choreo              the plugin, the workflow choreographed
    repaired            the same, the first tokens of every parent encoded anew
    baseline            the same engine, the workflow as text over vLLM's prefix caching
    stock, 32           vLLM without the plugin, the workflow as text over its prefix caching
    stock, default      the same with vLLM's own block size

The first three are on one engine, in this process: processes on one machine differ by a tenth
either way, with and without the plugin alike, and that is more than what is to be measured. The
same in processes of their own is the check that the baseline with the plugin is stock vLLM: a stock
engine loads no code of the plugin. All processes are up at once; whoever is not at turn sleeps.

Workflows are replayed from transcripts, so every side reads and writes the same tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.child import Child, serve
from benchmarks.harness.engine import (
    BLOCK_SIZE,
    FORCED,
    empty_caches,
    has_plugin,
    set_environment,
    start_choreo_engine,
    start_engine,
)
from benchmarks.harness.probes import chain_tokens, step_times
from benchmarks.harness.script import scripted
from benchmarks.harness.turns import in_turn
from vllm_choreo.lab.workflows.iterative_debate import iterative_debate
from vllm_choreo.lab.workflows.parallel_debate import parallel_debate
from vllm_choreo.lab.workflows.tree_of_thoughts import tree_of_thoughts
from vllm_choreo.transcript.transcript import Transcript

# Name: block size (None: vLLM's own choice), VLLM_PLUGINS.
PROCESSES: dict[str, tuple[int | None, str]] = {
    "plugin": (BLOCK_SIZE, "choreo"),
    "stock, 32": (BLOCK_SIZE, ""),
    "stock, default": (None, ""),
}
REPAIR = "first:32"
# Name: process, arguments of the client.
SIDES: dict[str, tuple[str, dict[str, str]]] = {
    "choreo": ("plugin", {"mode": "choreo"}),
    "repaired": ("plugin", {"mode": "choreo", "repair": REPAIR}),
    "baseline": ("plugin", {"mode": "baseline"}),
    "stock, 32": ("stock, 32", {"mode": "baseline"}),
    "stock, default": ("stock, default", {"mode": "baseline"}),
}
IN_PROCESSES = ("choreo", "baseline", "stock, 32", "stock, default")
ON_ONE_ENGINE = ("choreo", "baseline")
WORKFLOWS: dict[str, Callable[..., Transcript]] = {
    "tree_of_thoughts": tree_of_thoughts,
    "iterative_debate": iterative_debate,
    "parallel_debate": parallel_debate,
}


@dataclass(frozen=True)
class Side:
    """An engine, and how it is asked.

    Attributes:
        name: one of `SIDES`.
        answer: asks the engine, see `answer`.
    """

    name: str
    answer: Callable[[dict[str, Any]], Any]

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run one of the commands below; its result."""
        return self.answer({"do": do, "client": SIDES[self.name][1], **arguments})

    def replay(self, path: Path) -> Transcript:
        """Replay a transcript, from an empty prefix cache."""
        return Transcript.from_json(self.ask("replay", path=str(path)))


@dataclass(frozen=True)
class Room:
    """What engines are started with: GiB of keys and values, and the context in tokens.

    Choreographed, each parent is padded to whole blocks.
    """

    kv_cache_gib: int
    max_model_len: int


def passes(
    names: Sequence[str], count: int, room: Room, in_processes: bool
) -> Iterator[tuple[int, list[Side]]]:
    """(number of the pass from 1, sides); on one engine, or in new processes for each pass.

    How fast a process runs depends a little on where its memory came to lie: with new ones for
    each pass that is seen in the spread.
    """
    if not in_processes:
        llm = start_choreo_engine(
            room.kv_cache_gib, max_model_len=room.max_model_len, logits_processors=[FORCED]
        )
        sides = [Side(name, lambda question: answer(llm, **question)) for name in names]
        check_chain(sides)
        for number in range(1, count + 1):
            yield number, sides
        return
    for number in range(1, count + 1):
        with contextlib.ExitStack() as stack:
            children = {
                process: stack.enter_context(_child(process, room))
                for process in dict.fromkeys(SIDES[name][0] for name in names)
            }
            sides = [Side(name, children[SIDES[name][0]].ask) for name in names]
            check_chain(sides)
            yield number, sides


def _child(process: str, room: Room) -> Child:
    arguments = (process, str(room.kv_cache_gib), str(room.max_model_len))
    return Child.of(__name__, *arguments, VLLM_PLUGINS=PROCESSES[process][1])


def check_chain(sides: Sequence[Side]) -> None:
    """Raises SystemExit: a chain of messages is not, to the token, the text on every side."""
    answers = [[list(tokens) for tokens in side.ask("chain")] for side in sides]
    if any(answer != answers[0] for answer in answers):
        raise SystemExit("the sides differ where they must not: nothing is timed")
    print("chain of messages = plain text on all sides: same greedy tokens", flush=True)


def replay_in_turn(sides: Sequence[Side], path: Path, turn: int) -> dict[str, Transcript]:
    """A transcript replayed on every side; who is first changes from turn to turn.

    Raises SystemExit: the outputs differ.
    """
    runs = {side.name: side.replay(path) for side in in_turn(sides, turn)}
    outputs = [[step.message.token_ids for step in run.steps] for run in runs.values()]
    if any(output != outputs[0] for output in outputs):
        raise SystemExit("the sides did not generate the same tokens: their times mean nothing")
    return runs


# -- what a side is asked --------------------------------------------------------------------------


Client = Mapping[str, str]  # arguments of `Choreography`


def answer(llm: Any, do: str, client: Client, **arguments: Any) -> Any:
    """Run a command on an engine in this process."""
    return COMMANDS[do](llm, client, **arguments)


def _block_size(llm: Any, client: Client) -> int:
    block_size: int = llm.llm_engine.vllm_config.cache_config.block_size
    return block_size


def _record(
    llm: Any,
    client: Client,
    workflow: str,
    inputs: Mapping[str, Any],
    lengths: Mapping[str, int],
    path: str,
) -> None:
    """Run a workflow and save its transcript. `lengths`: tokens by name of the parameters."""
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    # No seeds: vLLM's CPU runner cannot take a seeded prompt in several steps. The engine's own
    # seed makes runs alike.
    params = {
        name: SamplingParams(temperature=0.7, max_tokens=length, ignore_eos=True)
        for name, length in lengths.items()
    }
    empty_caches(llm)
    with Choreography(llm, **client) as c:
        WORKFLOWS[workflow](c, **inputs, **params).save(Path(path))


def _script(
    llm: Any, client: Client, workflow: str, lengths: Mapping[str, int], **rest: Any
) -> None:
    """Save the transcript of a workflow whose answers are given text: see `script`."""
    c = scripted(llm.get_tokenizer(), lengths)
    WORKFLOWS[workflow](c, **rest["inputs"]).save(Path(rest["path"]))


def _replay(llm: Any, client: Client, path: str) -> dict[str, Any]:
    from vllm_choreo import Choreography
    from vllm_choreo.lab.record.replay import Replay

    recorded = Transcript.load(Path(path))
    inputs = {
        name: value for name, value in recorded.inputs.items() if not name.endswith("_params")
    }
    empty_caches(llm)
    with Choreography(llm, **client) as c, Replay(c, recorded) as replay:
        return WORKFLOWS[recorded.workflow](replay, **inputs).to_json()


# `chain` warms the engine, too.
COMMANDS: dict[str, Callable[..., Any]] = {
    "chain": chain_tokens,
    "steps": step_times,
    "record": _record,
    "script": _script,
    "replay": _replay,
    "block_size": _block_size,
}


def child(process: str, kv_cache_gib: str, max_model_len: str) -> None:
    """A process of `PROCESSES`: answers until it is asked no more."""
    set_environment(int(kv_cache_gib))
    block_size, plugins = PROCESSES[process]
    llm = start_engine(block_size, max_model_len=int(max_model_len), logits_processors=[FORCED])
    assert has_plugin(llm) == bool(plugins), "the plugin is where it should not be, or is missing"
    serve(lambda question: answer(llm, **question))
