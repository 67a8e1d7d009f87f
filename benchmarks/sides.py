# SPDX-License-Identifier: Apache-2.0
"""The sides of a comparison of workflows: engines in processes of their own, which take turns.

    choreo              the plugin, the workflow choreographed
    stock, 32           vLLM without the plugin, the workflow as text over its prefix caching
    stock, default      the same with vLLM's own block size

A stock engine loads no code of the plugin: only the workflow that sends it prompts is the same. All
sides are up at once; whoever is not at turn sleeps. A side is asked by a line of JSON and answers
with one. Workflows are replayed from transcripts, so every side reads and writes the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_ttft import chain_tokens, step_times
from benchmarks.common import (
    BLOCK_SIZE,
    empty_caches,
    run_child,
    scheduler_of,
    set_environment,
    start_engine,
)
from benchmarks.script import scripted
from vllm_choreo.workflows.iterative_debate import iterative_debate
from vllm_choreo.workflows.parallel_debate import parallel_debate
from vllm_choreo.workflows.record.transcript import Transcript
from vllm_choreo.workflows.tree_of_thoughts import tree_of_thoughts

# Name: block size (None: vLLM's own choice), VLLM_PLUGINS, mode of the client.
SIDES: dict[str, tuple[int | None, str, str]] = {
    "choreo": (BLOCK_SIZE, "choreo", "choreo"),
    "stock, 32": (BLOCK_SIZE, "", "baseline"),
    "stock, default": (None, "", "baseline"),
}
WORKFLOWS: dict[str, Callable[..., Transcript]] = {
    "tree_of_thoughts": tree_of_thoughts,
    "iterative_debate": iterative_debate,
    "parallel_debate": parallel_debate,
}
FORCED = "vllm_choreo.engine.worker.forced:ForcedTokens"


class Side:
    """A child process with an engine.

    Args:
        name: one of `SIDES`.
        kv_cache_gib: room for keys and values.
        max_model_len: in tokens; choreographed, each parent is padded to whole blocks.
    """

    def __init__(self, name: str, kv_cache_gib: int, max_model_len: int) -> None:
        self.name = name
        arguments = ["-m", "benchmarks.sides", name, "--max-model-len", str(max_model_len)]
        arguments += ["--kv-cache-gib", str(kv_cache_gib)]
        self._child = run_child(arguments, VLLM_PLUGINS=SIDES[name][1])

    def ask(self, do: str, **arguments: Any) -> Any:
        """Run one of the commands below; its result."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._child.stdin.flush()
        for line in self._child.stdout:
            if line.startswith('{"answer"'):  # vLLM may print, too
                return json.loads(line)["answer"]
        raise SystemExit(f"{self.name} ended with status {self._child.wait()}")

    def replay(self, path: Path) -> Transcript:
        """Replay a transcript, from an empty prefix cache."""
        return Transcript.from_json(self.ask("replay", path=str(path)))

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.kill()
        self._child.wait()


@contextlib.contextmanager
def open_sides(names: Sequence[str], kv_cache_gib: int, max_model_len: int) -> Iterator[list[Side]]:
    """New processes for these sides, all of which are right: see `Side`, `check_chain`.

    How fast a process runs depends a little on where its memory came to lie: a benchmark that
    takes new ones for each pass sees that in its spread.
    """
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(Side(name, kv_cache_gib, max_model_len)) for name in names]
        check_chain(sides)
        print("chain of messages = plain text on all sides: same greedy tokens", flush=True)
        yield sides


def check_chain(sides: Sequence[Side]) -> None:
    """Raises SystemExit: a chain of messages is not, to the token, the text on every side."""
    answers = [side.ask("chain") for side in sides]
    if any(answer != answers[0] for answer in answers):
        raise SystemExit("the sides differ where they must not: nothing is timed")


def replay_in_turn(sides: Sequence[Side], path: Path, turn: int) -> dict[str, Transcript]:
    """A transcript replayed on every side; who is first changes from turn to turn.

    Raises SystemExit: the outputs differ.
    """
    order = sides if turn % 2 == 0 else sides[::-1]
    runs = {side.name: side.replay(path) for side in order}
    outputs = [[step.message.token_ids for step in run.steps] for run in runs.values()]
    if any(output != outputs[0] for output in outputs):
        raise SystemExit("the sides did not generate the same tokens: their times mean nothing")
    return runs


# -- in the child ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--kv-cache-gib", type=int, required=True)
    args = parser.parse_args()
    set_environment(args.kv_cache_gib)
    block_size, plugins, mode = SIDES[args.side]
    options = {"max_model_len": args.max_model_len, "logits_processors": [FORCED]}
    llm = start_engine(block_size, **options)
    uses_plugin = type(scheduler_of(llm)).__module__.startswith("vllm_choreo")
    assert uses_plugin == bool(plugins), "the plugin is where it should not be, or is missing"
    commands = {"chain": _chain, "record": _record, "script": _script, "replay": _replay,
                "steps": _steps, "block_size": _block_size}  # fmt: skip
    for line in sys.stdin:
        command = json.loads(line)
        answer = commands[command.pop("do")](llm, mode, **command)
        print(json.dumps({"answer": answer}), flush=True)
    return 0


def _chain(llm: Any, mode: str) -> list[tuple[int, ...]]:
    """What `bench_ttft` compares; it warms the engine, too."""
    return chain_tokens(llm, mode)


def _steps(llm: Any, mode: str, repeats: int) -> list[dict[str, Any]]:
    """Seconds to first token, by the tokens to prefill: see `bench_ttft.step_times`."""
    return step_times(llm, 1, repeats, mode)


def _block_size(llm: Any, mode: str) -> int:
    block_size: int = llm.llm_engine.vllm_config.cache_config.block_size
    return block_size


def _record(
    llm: Any,
    mode: str,
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
    with Choreography(llm, mode=mode) as c:
        WORKFLOWS[workflow](c, **inputs, **params).save(Path(path))


def _script(
    llm: Any,
    mode: str,
    workflow: str,
    inputs: Mapping[str, Any],
    lengths: Mapping[str, int],
    path: str,
) -> None:
    """Save the transcript of a workflow whose answers are given text: see `script`."""
    c = scripted(llm.get_tokenizer(), lengths)
    WORKFLOWS[workflow](c, **inputs).save(Path(path))


def _replay(llm: Any, mode: str, path: str) -> dict[str, Any]:
    from vllm_choreo import Choreography
    from vllm_choreo.workflows.record.replay import Replay

    recorded = Transcript.load(Path(path))
    inputs = {
        name: value for name, value in recorded.inputs.items() if not name.endswith("_params")
    }
    empty_caches(llm)
    with Choreography(llm, mode=mode) as c, Replay(c, recorded) as replay:
        return WORKFLOWS[recorded.workflow](replay, **inputs).to_json()


if __name__ == "__main__":
    sys.exit(main())
