# SPDX-License-Identifier: Apache-2.0
"""Saves and loads of a program: generators that ask the engine, a few times between its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tests.engine.feature_machine.invariants import Broken
from tests.engine.feature_machine.ledger import Ledger, Made
from tests.engine.feature_machine.program import TENANTS, Call, Load, Read, Save
from tests.engine.feature_machine.shown import Shown
from vllm_choreo.errors import ChoreoError, error_from_report


class Host(Protocol):
    """What saves and loads need of whoever runs the program."""

    def operation(self, name: str, *args: Any) -> Any: ...

    def of_workers(self, method: str, *args: Any) -> list[Any]: ...

    def submit(self, call: Call) -> Made: ...

    def free(self, session: str, names: Sequence[str]) -> None: ...

    def check(self) -> None: ...

    def num_closed(self, session: str) -> int: ...


@dataclass(eq=False)
class _Keeping:
    """A save or a load that is under way.

    Attributes:
        steps: see `snapshot/steps.py`.
        done: told what it came to: a result, or an error.
        entered: told when the engine has given messages their names.
        answer: what it is told next.
        waits_for: a call that has messages encoded for it.
    """

    steps: Any
    session: str
    key: str
    done: Callable[[Any], None]
    entered: Callable[[], None] | None = None
    answer: Any = None
    waits_for: Made | None = None


class _ExpectedLoad:
    """What a load may come to, and what it asks of its session on the way.

    Args:
        is_found: whether the tenant has saved messages there.
        loaded: what its messages will be.
    """

    def __init__(
        self, load: Load, is_found: bool, loaded: Sequence[Made], host: Host, ledger: Ledger
    ) -> None:
        self._load = load
        self._loaded = loaded
        self._host = host
        self._ledger = ledger
        self._num_closed = host.num_closed(load.session)
        self._may = set() if is_found else {"KeptError", "UnknownKeptError"}
        self._must: set[str] = set()

    def names_of(self, _: str, ids: Sequence[str]) -> dict[str, str]:
        session, suffix = self._load.session, self._load.suffix
        return {one: f"{session}/{one.partition('/')[2]}{suffix}" for one in ids}

    def admit(self, _: Sequence[Any]) -> None:
        self.check_open()
        if self._is_name_taken():
            self._must.add("NameTakenError")

    def check_open(self) -> None:
        if self._is_closed():
            raise ChoreoError("the session was closed", parameter="session")

    def entered(self) -> None:
        for made in self._loaded:
            made.state = "made"
            self._ledger.enter(made)

    def done(self, result: Any) -> None:
        """Check a result or an error."""
        error = type(result).__name__ if isinstance(result, BaseException) else None
        must = self._must | self._foreign_errors()
        if error is None and (must or not self._loaded):
            raise Broken("a load is not refused", self._load)
        if error is not None and error not in must | self._may | self._later_errors():
            raise result

    def _foreign_errors(self) -> set[str]:
        """How pictures that another engine saved must be refused."""
        shows = self._load.is_foreign and self._ledger.shows_pictures(self._loaded)
        return {"KeptError"} if shows else set()

    def _later_errors(self) -> set[str]:
        """How it may be refused for what others did while it was under way."""
        errors = set()
        if self._is_closed():
            errors.add("ChoreoError")
        if self._ledger.may_fill_hidden_memory() or self._ledger.may_fill_picture_memory():
            errors.add("LimitError")
        if self._load.is_foreign and self._ledger.shows_pictures(self._ledger.made):
            errors.add("KeptError")  # a copy that was saved with them may need some
        if self._is_name_taken():  # by a call that came since
            errors.add("NameTakenError")
        return errors

    def _is_closed(self) -> bool:
        return self._host.num_closed(self._load.session) != self._num_closed

    def _is_name_taken(self) -> bool:
        names = [made.call.name for made in self._loaded]
        existing = [self._ledger.find(self._load.session, name) for name in names]
        return any(made and made.state != "failed" for made in existing)


class Keepings:
    """The saves and loads of one program, and the folders that it has saved.

    Args:
        vllm_config: the engine's.
        root: of folders, in memory.
        shown: tokens of pictures.

    Attributes:
        num_asked: how often the engine was asked.
    """

    def __init__(
        self, host: Host, ledger: Ledger, vllm_config: Any, root: str, shown: Shown
    ) -> None:
        self._shown = shown
        self.num_asked = 0
        self._host = host
        self._ledger = ledger
        self._vllm_config = vllm_config
        self._root = root
        self._under_way: list[_Keeping] = []
        # By key: whose they are, messages, and which of them with keys and values.
        self._kept: dict[str, tuple[str, dict[str, Made], set[str]]] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def save(self, save: Save) -> bool:
        """Begin with a save; returns whether there is something that a client could save."""
        from vllm_choreo.snapshot.saving import saving

        found = {name: self._ledger.find(save.session, name) for name in save.names}
        chosen = {name: made for name, made in found.items() if made and made.state == "made"}
        if not chosen or len(chosen) < len(found) or self._is_taken(save.key):
            return False

        def done(result: Any) -> None:
            if not isinstance(result, BaseException):
                has_data = self._names_with_data(save, chosen)
                self._kept[save.key] = TENANTS[save.session], chosen, has_data
                return
            gone = any(made.freed for made in chosen.values())
            may = {"PoolFullError"} | ({"UnknownMessageError"} if gone else set())
            if any(self._ledger.may_lack_hidden_states(made) for made in chosen.values()):
                may.add("LimitError")
            if type(result).__name__ not in may:
                raise result

        messages = [_message(made, self._shown) for made in chosen.values()]
        origin = self._origin(save.session)
        steps = saving(messages, self._folder(save.key), origin, save.encodings, False)
        self._begin(_Keeping(steps, save.session, save.key, done), save.asks)
        return True

    def _names_with_data(self, save: Save, chosen: Mapping[str, Made]) -> set[str]:
        """Names of the messages that were saved with their keys and values.

        With states, what was evicted is saved as a recipe; without, what no call could read.
        """
        from vllm_choreo.snapshot.manifest import read_manifest

        kept = read_manifest(self._folder(save.key))
        encodings = [kept["encodings"][message["encoding"]] for message in kept["messages"]]
        found = {name for name, one in zip(chosen, encodings, strict=True) if one["data"]}
        may_lack = not save.encodings or self._vllm_config.model_config.is_hybrid
        most = self._ledger.limits.max_model_len // 2
        lacking = {n for n, m in chosen.items() if m.most_tokens < most} - found
        if (lacking and not may_lack) or (found and not save.encodings):
            raise Broken("keys and values are not saved as they shall be", (save, lacking, found))
        return found

    def load(self, load: Load) -> bool:
        """Begin with a load; returns whether nobody else is busy there."""
        from vllm_choreo.snapshot.loading import loading

        if self._is_taken(load.key):
            return False
        tenant, kept, has_data = self._kept.get(load.key, ("", {}, set()))
        is_found = bool(kept) and tenant == TENANTS[load.session]
        sources = {f"{name}{load.suffix}": made for name, made in kept.items() if is_found}
        given = {f"{name}{load.suffix}" for name in has_data}
        loaded = self._ledger.load(sources, load.session, given, is_foreign=load.is_foreign)
        expected = _ExpectedLoad(load, is_found, loaded, self._host, self._ledger)
        steps = loading(
            self._folder(load.key, is_foreign=load.is_foreign),
            self._origin(load.session),
            TENANTS[load.session],
            expected.names_of,
            expected.admit,
            expected.check_open,
            "refuse",
            False,
        )
        keeping = _Keeping(steps, load.session, load.key, expected.done, expected.entered)
        self._begin(keeping, load.asks)
        return True

    def advance(self, asks: int) -> None:
        """All that are under way ask the engine so many times more."""
        for keeping in list(self._under_way):
            self._advance(keeping, asks)

    def ended(self, made: Made) -> None:
        """A call has ended, for which one may have waited."""
        for keeping in self._under_way:
            if keeping.waits_for is made:
                keeping.waits_for = None
                if made.error is None:
                    self._host.free(made.call.session, [made.call.name])
                else:
                    told = {"type": made.error, "message": "of what a save had encoded"}
                    keeping.answer = error_from_report(told)

    def give_up(self) -> None:
        """End all that are under way, as a client's error does: what they hold is let go of.

        For a program that failed. What goes wrong here is that failure's consequence, and not told.
        """
        for keeping in self._under_way:
            answer: Any = ChoreoError("the program failed", parameter="program")
            try:
                ask = keeping.steps.throw(answer)
                while True:  # what it asks on its way out
                    answer = self._told(keeping, ask) if ask.what == "operation" else None
                    ask = keeping.steps.send(answer)
            except Exception:
                continue
        self._under_way.clear()

    def forget(self) -> None:
        """Delete all folders."""
        import fsspec

        memory = fsspec.filesystem("memory")
        if memory.exists(f"/{self._root}"):
            memory.rm(f"/{self._root}", recursive=True)

    def _is_taken(self, key: str) -> bool:
        return any(keeping.key == key for keeping in self._under_way)

    def _begin(self, keeping: _Keeping, asks: int) -> None:
        self._under_way.append(keeping)
        self._advance(keeping, asks)

    def _advance(self, keeping: _Keeping, asks: int) -> None:
        for _ in range(asks):
            if keeping.waits_for is not None:
                return
            self.num_asked += 1
            result: Any = None
            try:
                if isinstance(keeping.answer, BaseException):
                    ask = keeping.steps.throw(keeping.answer)
                else:
                    ask = keeping.steps.send(keeping.answer)
            except StopIteration as stop:
                result = stop.value
            except (ChoreoError, OSError) as error:
                result = error
            else:
                keeping.answer = self._told(keeping, ask)
                self._host.check()
                continue
            self._under_way.remove(keeping)
            keeping.done(result)
            return

    def _told(self, keeping: _Keeping, ask: Any) -> Any:
        """What an ask is answered with, maybe an error; of one that takes steps, later."""
        from vllm_choreo.api.outcomes import checked_answer

        try:
            if ask.what == "operation":
                answer = checked_answer(self._host.operation(*ask.args))
                if keeping.entered and ask.args[0] == "snapshot_commit":
                    keeping.entered()
                return answer
            if ask.what == "workers":
                return self._host.of_workers(*ask.args)
            if ask.what == "session":
                function, *arguments = ask.args
                return function(*arguments)
        except ChoreoError as error:
            return error
        reads = tuple(Read(message_id.partition("/")[2]) for message_id in ask.args)
        name = f"~{self.num_asked}"
        keeping.waits_for = self._host.submit(Call(keeping.session, name, (0, 1), reads))
        return None

    def _folder(self, key: str, *, is_foreign: bool = False) -> Any:
        from vllm_choreo.snapshot.storage import SnapshotFolder

        keep_key = b"another's" if is_foreign else b"this program's"
        return SnapshotFolder(f"memory://{self._root}/{key}", keep_key=keep_key)

    def _origin(self, session: str) -> Any:
        from vllm_choreo.snapshot.manifest import tenant_digest
        from vllm_choreo.snapshot.origin import Origin

        model = self._vllm_config.model_config
        return Origin(
            session,
            tenant_digest(TENANTS[session]),
            _signature(self._vllm_config),
            1,
            model.get_total_num_kv_heads(),
            model.get_vocab_size(),
        )


_signatures: dict[int, Any] = {}


def _signature(vllm_config: Any) -> Any:
    """Of an engine; its weights are digested once."""
    from vllm_choreo.snapshot.signature import signature

    if id(vllm_config) not in _signatures:
        _signatures.clear()
        _signatures[id(vllm_config)] = signature(vllm_config)
    return _signatures[id(vllm_config)]


def _message(made: Made, shown: Shown) -> Any:
    """What a client has of a message."""
    from vllm_choreo.semantics.message import Message, Metrics, Usage

    assert made.tokens is not None
    tokens = shown.as_engine(made.tokens)
    return Message(
        id=made.id,
        text="",
        token_ids=tokens,
        num_tokens=len(tokens),
        position=made.position,
        parents=(),
        generated_text="",
        generated_token_ids=(),
        logprobs=None,
        finish_reason="length" if made.is_decode else None,
        usage=Usage(False, 0, 0, 0),
        metrics=Metrics(0.0, None, 0.0, 0.0),
    )
