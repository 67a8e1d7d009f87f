# SPDX-License-Identifier: Apache-2.0
"""Moves between engines that are played: real files, real checks, keys and values of their own.

What an engine has of a message are numbers drawn from the message's digest: so a message that got
those of another one, or of another tenant's, has wrong ones, which is found when it is made.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from tests.api.test_fleet import (
    PlayedEngine,
    PlayedLLM,
    _run,
    fleet_log,
    greedy,
    model_config,
)
from vllm_choreo.api.async_choreography import AsyncChoreography
from vllm_choreo.api.fleet import Fleet, fleet_of
from vllm_choreo.api.fleet_moves import Holder
from vllm_choreo.api.fleet_transfer import Move
from vllm_choreo.engine import moves
from vllm_choreo.engine.moves import MOVE_OPERATIONS, MessageMoves
from vllm_choreo.errors import ChoreoError
from vllm_choreo.fleet.placement import Rates
from vllm_choreo.snapshot import moving
from vllm_choreo.snapshot.manifest import manifest_bytes

__all__ = ["fleet_log", "model_config"]  # fixtures

_LAYERS, _SIZE = 2, 2


def numbers_of(digest: bytes, num_tokens: int) -> Any:
    """Keys and values of a message: float32 `[2 * layers, num_tokens, 1 * size]`."""
    draw = np.random.default_rng(list(blake2b(digest, digest_size=8).digest()))
    return draw.standard_normal((2 * _LAYERS, num_tokens, _SIZE), dtype=np.float32)


class SavingEngine(PlayedEngine):
    """An engine that has keys and values, and saves and loads them.

    Attributes:
        numbers: keys and values of each message by session and id.
        unfinished: messages whose last token is not encoded until a call reads them.
        num_held: messages whose blocks are held for a save, and saves and loads under way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[tuple[str, str], Any] = {}
        self.tokens: dict[tuple[str, str], list[int]] = {}
        self.unfinished: set[tuple[str, str]] = set()
        self.on_read: Callable[[], None] = lambda: None
        self.num_held = 0
        self.moves = MessageMoves(self._operate, self._ask_workers, piece_bytes=1)
        self._loads: dict[int, Any] = {}
        self._blocks: list[Any] = []

    def make(self, prompt: list[int], params: Any) -> tuple[list[int], dict[str, Any]]:
        call = params.extra_args["choreo"]
        key = call["session"], call["save_as"]
        for parent, _, _ in call["parents"]:
            self.unfinished.discard((call["session"], parent))
        generated, report = super().make(prompt, params)
        if "choreo_error" in report:
            return generated, report
        is_decode = call["kind"] == "decode"
        tokens = [*prompt, *(generated if is_decode else ())]
        digest, tenant = self.messages[key], call.get("tenant", "")
        digest = self.messages[key] = tenant.encode() + digest
        numbers = numbers_of(digest, len(tokens))
        same = [other for other, found in self.messages.items() if found == digest and other != key]
        if same:
            assert (self.numbers[same[0]] == numbers).all(), "these are another message's"
            report["choreo"]["encoded_tokens"] = 1
        self.numbers[key], self.tokens[key] = numbers, tokens
        if is_decode:
            self.unfinished.add(key)
        return generated, report

    async def call_utility_async(self, method: str, operation: str, args: list[Any]) -> Any:
        if operation not in MOVE_OPERATIONS and not operation.startswith("snapshot_"):
            return await super().call_utility_async(method, operation, args)
        await asyncio.sleep(0)
        plain = json.loads(json.dumps(args, default=bytes.hex))  # as it comes through a socket
        if operation not in MOVE_OPERATIONS:
            return self._operate(operation, plain)
        if operation.endswith("port_message"):
            plain[2][-1] = bytes.fromhex(plain[2][-1])
        try:
            return getattr(self.moves, operation)(*plain)
        except ChoreoError as error:
            return {"choreo_error": error.to_report()}

    def _operate(self, operation: str, args: Any) -> Any:
        return getattr(self, f"_{operation.removeprefix('snapshot_')}")(*args)

    def _describe(self, session: str, ids: list[str]) -> Any:
        entries = [
            {
                "message": message_id,
                "is_copy": False,
                "trace": 0,
                "adapter": None,
                "tokens": self.tokens[session, message_id],
                "parents": [],
                "spans": [],
                "new_offset": 0,
                "exact": True,
                "repaired_tokens": 0,
                "weights": None,
                "patch": None,
                "keeps": [],
                "is_untrusted": False,
                "digest": self.messages[session, message_id].hex(),
            }
            for message_id in ids
        ]
        self._keys = [(session, message_id) for message_id in ids]
        self.num_held += 1
        traces = [{"id": "t", "parents": [], "origin": None}]
        recipes = {"adapters": [], "traces": traces, "encodings": entries}
        numbers = list(range(len(ids)))
        told = {"ticket": 1, "recipes": recipes, "own": numbers, "resident": numbers}
        return {**told, "firsts": [[0]] * len(ids)}

    def _release_ticket(self, ticket: int) -> None:
        self.num_held -= 1

    def _hold(self, ticket: int, number: int) -> Any:
        key = self._keys[number]
        if key in self.unfinished:
            return None
        self._blocks.append(self.numbers[key])
        self.num_held += 1
        blocks = [[len(self._blocks) - 1]]
        return {"ticket": 2, "blocks": blocks, "stored_position": 0, "hidden": None, "state": None}

    def _release(self, ticket: int) -> bool:
        self.num_held -= 1
        return True

    def _begin(self, session: str, tenant: str, recipes: Any, named: Any) -> int:
        ticket = len(self._loads)
        self.num_held += 1
        self._loads[ticket] = session, recipes["encodings"], named, {}
        return ticket

    def _allocate(self, ticket: int, number: int, position: int) -> Any:
        _, entries, _, places = self._loads[ticket]
        self._blocks.append(np.zeros((2 * _LAYERS, len(entries[number]["tokens"]), _SIZE), "f4"))
        places[number] = len(self._blocks) - 1
        place = {"blocks": [[places[number]]], "firsts": [0], "in_host": False}
        return {**place, "hidden": None, "state": None}

    def _commit(self, ticket: int) -> Any:
        session, entries, named, places = self._loads.pop(ticket)
        self.num_held -= 1
        for message_id, number in named.items():
            key = session, message_id
            self.messages[key] = bytes.fromhex(entries[number]["digest"])
            self.tokens[key] = entries[number]["tokens"]
            if number in places:
                self.numbers[key] = self._blocks[places[number]]
        tokens = sum(len(entries[number]["tokens"]) for number in places)
        return {"messages": len(places), "tokens": tokens}

    def _abort(self, ticket: int) -> None:
        self.num_held -= self._loads.pop(ticket, None) is not None

    async def collective_rpc_async(self, method: str, timeout: None, args: Any) -> list[Any]:
        """Of a save or a load that is no move: bytes come and go through the API server."""
        await asyncio.sleep(0)
        return self._ask_workers(method, args)

    def _ask_workers(self, method: str, args: Any) -> list[Any]:
        if method == "choreo_kv_shape":
            layers = [[1, _SIZE, _SIZE]] * _LAYERS
            shape = {"dtype": "float32", "layers": layers, "groups": [0] * _LAYERS, "scales": []}
            return [{**shape, "hidden": ("float32", 0), "states": []}]
        if method == "choreo_read_kv":
            self.on_read()
            ((block,),), (first, last), start, stop = args
            return [self._blocks[block][first:last, start:stop].tobytes()]
        assert method == "choreo_write_kv"
        piece, _, (((block,),), _), (first, last), start, stop = args
        found = np.frombuffer(bytes(piece), "f4").reshape(last - first, stop - start, _SIZE)
        self._blocks[block][first:last, start:stop] = found
        return [None]


def started(model_config: Any) -> tuple[PlayedLLM, Fleet]:
    """Two engines between which moves cost nothing."""
    llm = PlayedLLM(2, model_config)
    llm.engine_core.clients[:] = [SavingEngine(), SavingEngine()]  # type: ignore[list-item]
    fleet = fleet_of(llm)  # type: ignore[arg-type]
    assert fleet is not None
    fleet.measured.rates = lambda: Rates(1e-3, 0.0)  # type: ignore[method-assign]
    return llm, fleet


def home_of(fleet: Fleet, c: AsyncChoreography, message: Any) -> int:
    runner: Any = c._runner
    (home,) = fleet.homes.of(runner._recipes[message.id].key)
    return int(home)


@contextmanager
def only_on(fleet: Fleet, engine: int) -> Iterator[None]:
    """Have calls go to one engine of two: the other one has much to do."""
    fleet.loads.add(1 - engine, 1e6)
    yield
    fleet.loads.add(1 - engine, -1e6)


async def read_elsewhere(fleet: Fleet, c: AsyncChoreography, messages: Any) -> Any:
    """Answers over messages of one engine: there, and at the other one."""
    (home,) = {home_of(fleet, c, message) for message in messages}
    with only_on(fleet, home):
        first = await c.decode([4], parents=messages, sampling_params=greedy())
    assert c.engine_of(first) == home
    with only_on(fleet, 1 - home):
        again = await c.decode([4], parents=messages, sampling_params=greedy())
    assert c.engine_of(again) == 1 - home
    assert again.generated_token_ids == first.generated_token_ids
    return first


def test_what_lies_elsewhere_is_moved_and_not_encoded(model_config: Any) -> None:
    async def main() -> None:
        llm, fleet = started(model_config)
        c = AsyncChoreography(llm, tenant="t")  # type: ignore[arg-type]
        with only_on(fleet, 0):
            chain = [await c.prefill([7] * 100)]
            chain.append(await c.prefill([8] * 50, parents=chain))
        await read_elsewhere(fleet, c, chain)
        total = fleet.mover.total
        assert (total.moved, total.failed, total.tokens) == (2, 0, 150)
        assert total.bytes >= 150 * 2 * _LAYERS * _SIZE * 4
        assert fleet.num_again == [0, 0]
        assert not list(fleet.mover.transfer.files.folder.iterdir())
        await c.close()
        assert not any(engine.messages for engine in llm.engine_core.clients)
        assert fleet.homes.used(0) == fleet.homes.used(1) == 0

    _run(main())


def test_a_tenant_is_given_nothing_of_another(model_config: Any) -> None:
    async def main() -> None:
        llm, fleet = started(model_config)
        a, b, c = (AsyncChoreography(llm, tenant=t) for t in ("one", "two", "one"))  # type: ignore[arg-type]
        first = await a.prefill([7] * 100)
        home = home_of(fleet, a, first)
        other = await b.prefill([7] * 100)
        assert home_of(fleet, b, other) == 1 - home, "the idlest engine"
        # The other tenant's engine has the same tokens, and they do not count.
        await read_elsewhere(fleet, a, [first])
        assert fleet.mover.total.moved == 1
        # A session of the same tenant: what its sibling has made is there already.
        same = await c.prefill([7] * 100)
        await c.decode([4], parents=[same], sampling_params=greedy())
        assert fleet.mover.total.moved == 1 and fleet.num_again == [0, 0]

    _run(main())


def test_an_answer_whose_last_token_is_not_encoded_yet_is_moved(model_config: Any) -> None:
    async def main() -> None:
        llm, fleet = started(model_config)
        c = AsyncChoreography(llm)  # type: ignore[arg-type]
        answer = await c.decode([5] * 60, sampling_params=greedy())
        home = home_of(fleet, c, answer)
        with only_on(fleet, 1 - home):
            await c.decode([4], parents=[answer], sampling_params=greedy())
        assert (fleet.mover.total.moved, fleet.mover.total.failed) == (1, 0)
        names = {name for _, name in llm.engine_core.clients[home].messages}
        assert names == {answer.id}, "the call that read it is freed"

    _run(main())


@pytest.mark.parametrize("part", ["export", "import"])
def test_a_move_that_is_cancelled_leaves_nothing_behind(part: str, model_config: Any) -> None:
    """Between two pieces of keys and values an engine does other things, such as giving up."""

    async def main() -> None:
        llm, fleet = started(model_config)
        engines: Any = llm.engine_core.clients
        c = AsyncChoreography(llm)  # type: ignore[arg-type]
        document = await c.prefill([7] * 100)
        home = home_of(fleet, c, document)
        recipe = c._runner._recipes[document.id]  # type: ignore[attr-defined]
        holder = Holder(home, c._session.id, document.id)
        order = fleet.mover._order(recipe, holder, "scratch")
        under_way, forever = asyncio.Event(), asyncio.Event()
        at = engines[home if part == "export" else 1 - home]
        answer = at.call_utility_async

        async def held_up(method: str, operation: str, args: list[Any]) -> Any:
            if operation == "continue_move":
                under_way.set()
                await forever.wait()
            return await answer(method, operation, args)

        async def complete() -> None: ...

        at.call_utility_async = held_up
        move = Move(order, engines[home], engines[1 - home], complete)
        task = asyncio.create_task(fleet.mover.transfer.move(move))
        await under_way.wait()
        assert at.num_held and list(fleet.mover.transfer.files.folder.iterdir())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [engine.num_held for engine in engines] == [0, 0]
        assert not list(fleet.mover.transfer.files.folder.iterdir())
        assert await answer("choreo", "cancel_move", ["unknown"]) is None

    _run(main())


def _flipped(fleet: Fleet) -> None:
    """Change a byte of what is being moved."""
    (path,) = fleet.mover.transfer.files.folder.glob("*/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _signed_anew(fleet: Fleet) -> None:
    """Put a manifest in the place of one that is being moved: all as it was, but for who wrote."""
    (path,) = fleet.mover.transfer.files.folder.glob("*/manifest.json")
    path.write_bytes(signed_by_another(path.read_bytes()))


def signed_by_another(content: bytes) -> bytes:
    """Bytes of a manifest, signed with a key that the order of its move does not have."""
    return manifest_bytes(json.loads(content)["kept"], b"another key")


_HARMS = {"damaged file": _flipped, "another's signature": _signed_anew}
_REASONS = {
    "damaged file": "its digest is another",
    "another's signature": "signed with another key",
}


@pytest.mark.parametrize("fault", [*_HARMS, "engine ends", "no room"])
def test_a_move_that_fails_is_an_encoding(
    fault: str,
    model_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    fleet_log: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        llm, fleet = started(model_config)
        c = AsyncChoreography(llm)  # type: ignore[arg-type]
        document = await c.prefill([7] * 100)
        home = home_of(fleet, c, document)
        engines: Any = llm.engine_core.clients
        if fault in _HARMS:
            importing = moves.importing

            def harmed(*args: Any) -> Any:
                _HARMS[fault](fleet)
                return importing(*args)

            monkeypatch.setattr(moves, "importing", harmed)
        elif fault == "engine ends":

            def end() -> None:
                llm.engine_core.end(home)
                raise EngineDeadError

            engines[home].on_read = end
        else:
            monkeypatch.setattr(moving.shutil, "disk_usage", lambda path: _Full())
        with only_on(fleet, home):
            expected = await c.decode([4], parents=[document], sampling_params=greedy())
        fleet.loads.add(home, 1e6)
        found = await c.decode([4], parents=[document], sampling_params=greedy())
        assert found.generated_token_ids == expected.generated_token_ids
        assert (fleet.mover.total.moved, fleet.mover.total.failed) == (0, 1)
        assert fleet.num_again[1 - home] == 1
        assert not list(fleet.mover.transfer.files.folder.iterdir())
        assert fault == "engine ends" or [engine.num_held for engine in engines] == [0, 0]

    _run(main())
    assert _REASONS.get(fault, "") in fleet_log.text


class _Full:
    free = 10


def test_a_session_is_saved_from_engines_and_loaded_into_one(
    model_config: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        llm, fleet = started(model_config)
        client = llm.engine_core
        c = AsyncChoreography(llm)  # type: ignore[arg-type]
        a = await c.prefill([7] * 100, save_as="a")
        fleet.loads.add(home_of(fleet, c, a), 1e6)
        b = await c.prefill([8] * 70, save_as="b")
        assert home_of(fleet, c, a) != home_of(fleet, c, b)
        saved = await c.save([a, b], tmp_path, encodings=True)
        assert (saved.messages, saved.encodings, saved.tokens) == (2, 2, 170)
        expected = await c.decode([4], parents=[b, a], sampling_params=greedy())
        await c.close()

        later = AsyncChoreography(llm)  # type: ignore[arg-type]
        loaded = await later.load(tmp_path)
        assert [m.token_ids for m in loaded] == [a.token_ids, b.token_ids]
        (home,) = {home_of(fleet, later, message) for message in loaded}
        found = await later.decode([4], parents=loaded[::-1], sampling_params=greedy())
        assert found.generated_token_ids == expected.generated_token_ids
        client.end(home)  # recipes are in front of the engines
        found = await later.decode([4], parents=loaded[::-1], sampling_params=greedy())
        assert found.generated_token_ids == expected.generated_token_ids
        assert later.engine_of(found) == 1 - home
        await later.close()

    _run(main())
