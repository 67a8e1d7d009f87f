# SPDX-License-Identifier: Apache-2.0
"""Sessions over several engines, of which one after the other is killed; then all is checked.

python -m benchmarks.fleet.soak [--calls 10000] [--sessions 200] [--engines 3] [--kills 20]

A tiny random model, so that HuggingFace's can judge every answer. Sessions of four tenants read
documents that those of their tenant share, and one another's answers, in any order. At the end no
token may be wrong, no session lost, and no block held.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet.tables import SOAK
from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from vllm_choreo import AsyncChoreography
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.message import Message
from vllm_choreo.testing import Made, Reference, make_tiny_model
from vllm_choreo.testing.reference import num_unlike_greedy

_TENANTS = 4
_DOCUMENTS = 20  # of a tenant
_AT_A_TIME = 12  # sessions
_VOCAB = (3, 512)  # of the tiny model, special tokens left out
_BLOCK_SIZE = 32
_BLOCKS = 160  # of an engine: room for half of what the sessions at a time hold
# Engines side by side: none takes all memory, or the first core alone.
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
_TOLD_EVERY = 500  # calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ.update(_ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model("llama", Path(folder))
        soak = _Soak(model, args)
        row = asyncio.run(soak.run())
        row["wrong_tokens"], row["tokens_checked"] = soak.judge()
    write_csv("fleet_soak", [row], **record())
    print(as_text([SOAK]))
    failures = ("wrong_tokens", "lost_sessions", "failed_calls", "blocks_left", "files_left")
    return int(any(row[name] for name in failures))


@dataclass(eq=False)
class _Seen:
    """An answer, and what it was asked to read.

    Attributes:
        parents: messages and the offsets at which they were seen.
    """

    message: Message
    parents: list[tuple[Message, int]]
    new_offset: int


@dataclass
class _Notes:
    """What a session got, in order."""

    seen: list[_Seen] = field(default_factory=list)
    is_lost: bool = False


class _Soak:
    """Sessions on an AsyncLLM of several engines, and a killer among them."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        self._model, self._args = model, args
        self._draw = random.Random(args.seed)
        self._notes: list[_Notes] = []
        self._num_calls = self._num_failed = 0
        self._killed: list[int] = []

    async def run(self) -> dict[str, Any]:
        """Run all sessions; returns a row of the results."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine_args = AsyncEngineArgs(
            str(self._model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            block_size=_BLOCK_SIZE,
            num_gpu_blocks_override=_BLOCKS,
            data_parallel_size=self._args.engines,
            distributed_executor_backend="uni",
            disable_log_stats=True,
        )
        llm = await asyncio.to_thread(AsyncLLM.from_engine_args, engine_args)
        try:
            return await self._run_on(llm)
        finally:
            llm.shutdown()

    async def _run_on(self, llm: Any) -> dict[str, Any]:
        from vllm_choreo.api.fleet import fleet_of, totals_by_engine
        from vllm_choreo.api.fleet_transfer import FolderTransfer

        fleet = fleet_of(llm)
        assert fleet is not None, "there are several engines"
        slots = asyncio.Semaphore(_AT_A_TIME)
        began = time.perf_counter()

        async def one(number: int) -> None:
            async with slots:
                await self._session(llm, number)

        await asyncio.gather(*(one(number) for number in range(self._args.sessions)))
        seconds = time.perf_counter() - began
        while sum(llm.engine_core.starts) - fleet.num_engines < len(self._killed):
            await asyncio.sleep(0.1)
        totals = await totals_by_engine(llm)
        states, transfer = fleet.describe(), fleet.mover.transfer
        assert isinstance(transfer, FolderTransfer), "all engines are on this machine"
        return {
            "engines": fleet.num_engines,
            "sessions": self._args.sessions,
            "calls": self._num_calls,
            "kills": len(self._killed),
            "restarts": sum(state.restarts for state in states),
            "moved": fleet.mover.total.moved,
            "failed_moves": fleet.mover.total.failed,
            "encoded_again": sum(state.encoded_again_messages for state in states),
            "seconds": round(seconds, 1),
            "lost_sessions": sum(notes.is_lost for notes in self._notes),
            "failed_calls": self._num_failed,
            "blocks_left": sum(found["num_blocks"] for found in totals.values()),
            "files_left": len(list(transfer.files.folder.iterdir())),
        }

    # -- one session -----------------------------------------------------------------------------

    async def _session(self, llm: Any, number: int) -> None:
        notes, draw = _Notes(), random.Random(self._args.seed << 32 | number)
        self._notes.append(notes)
        per_session = self._args.calls // self._args.sessions
        try:
            async with AsyncChoreography(llm, tenant=f"t{number % _TENANTS}") as c:
                documents = [
                    await c.prefill(self._document(number % _TENANTS, draw.randrange(_DOCUMENTS)))
                    for _ in range(3)
                ]
                await self._count(llm, len(documents))
                answers: list[_Seen] = []
                for _ in range(per_session - len(documents)):
                    await self._answer(llm, c, draw, documents, answers, notes)
        except ChoreoError as error:
            notes.is_lost = True
            print(f"session {number} is lost: {error!r}", flush=True)

    def _document(self, tenant: int, number: int) -> list[int]:
        draw = random.Random(f"{tenant}/{number}")
        return [draw.randrange(*_VOCAB) for _ in range(draw.randrange(33, 120))]

    async def _answer(
        self,
        llm: Any,
        c: AsyncChoreography,
        draw: random.Random,
        documents: list[Message],
        answers: list[_Seen],
        notes: _Notes,
    ) -> None:
        """Ask for an answer over some documents, and the latest answers; free what is old."""
        from vllm import SamplingParams

        read = draw.sample([*documents, *(seen.message for seen in answers)], draw.randrange(1, 4))
        offsets = [draw.randrange(0, 300) for _ in read]
        header = [draw.randrange(*_VOCAB) for _ in range(draw.randrange(2, 40))]
        sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        try:
            message = await c.decode(
                header, parents=read, offsets=offsets, new_offset=500, sampling_params=sampling
            )
        except ChoreoError as error:
            self._num_failed += 1
            print(f"a call failed: {error!r}", flush=True)
            return
        seen = _Seen(message, list(zip(read, offsets, strict=True)), 500)
        notes.seen.append(seen)
        # Answers over answers over answers would be judged for ever.
        if all(parent in documents for parent in read):
            answers.append(seen)
        if len(answers) > 3:
            await c.free(answers.pop(0).message)
        await self._count(llm, 1)

    async def _count(self, llm: Any, num_calls: int) -> None:
        """Count calls; each time that enough are over, kill an engine as soon as all run."""
        before, self._num_calls = self._num_calls, self._num_calls + num_calls
        if before // _TOLD_EVERY != self._num_calls // _TOLD_EVERY:
            print(f"{self._num_calls} calls, {len(self._killed)} kills", flush=True)
        kills, client = self._args.kills, llm.engine_core
        due = min(kills, self._num_calls * (kills + 1) // self._args.calls)
        while len(self._killed) < due:
            num_restarts = sum(client.starts) - client.num_engines
            if num_restarts == len(self._killed) and len(client.alive) == client.num_engines:
                engine = self._draw.choice(client.alive)
                self._killed.append(engine)
                (process,) = client.clients[engine].resources.engine_manager.processes
                os.kill(process.pid, signal.SIGKILL)
            else:
                await asyncio.sleep(0.1)

    # -- afterwards ------------------------------------------------------------------------------

    def judge(self) -> tuple[int, int]:
        """Tokens that are not HuggingFace's, and tokens that were compared."""
        reference, wrong, checked = Reference(str(self._model)), 0, 0
        for notes in self._notes:
            made: dict[str, Made] = {}
            for seen in notes.seen:
                parents = tuple(
                    (made.get(m.id) or Made(m.token_ids), 0, m.num_tokens, offset)
                    for m, offset in seen.parents
                )
                message = seen.message
                made[message.id] = Made(message.token_ids, parents, seen.new_offset)
                generated = message.generated_token_ids
                logits = reference.logits(made[message.id])
                wrong += num_unlike_greedy(logits, message.num_tokens - len(generated), generated)
                checked += len(generated)
            reference.forget()
        return wrong, checked


if __name__ == "__main__":
    sys.exit(main())
