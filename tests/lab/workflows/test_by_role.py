# SPDX-License-Identifier: Apache-2.0
"""Roles that other models play: who makes which call, by what name others find it, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lab.notes import Notes
from vllm_choreo.cli import main as cli
from vllm_choreo.errors import UnknownKeptError
from vllm_choreo.lab.cli.roles import ROLES
from vllm_choreo.lab.cli.task import program_of
from vllm_choreo.lab.workflows.by_role import AdaptersByRole, ServersByRole
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.naming import ParentSpan

SCENARIO = {"id": "0", "involved_classes": ["MathAPI"], "initial_config": {}}
_INPUTS: dict[str, list[dict[str, Any]]] = {
    "direct": [{"question": "q"}],
    "tree_of_thoughts": [{"question": "q", "voters": ["a", "b"]}],
    "parallel_debate": [{"question": "q", "agents": ["a", "b"]}],
    "iterative_debate": [{"question": "q"}],
    "multi_qa": [{"questions": ["a", "b"], "layout": "paper"}],
    "document_qa": [{"question": "q", "documents": ["d", "e"], "opening": ""}],
    "branch_solve_merge": [
        {"concepts": ["a", "b"], "layout": layout} for layout in ("standard", "paper")
    ],
    "code_review": [{"question": "q"}],
    "function_calls": [{"requests": ["q"], "scenario": SCENARIO}],
    "prisoners_dilemma": [{"predict": True}],
}
# There are results where something is called.
_REPLIES = {"function_calls": ["add(a=1, b=2)]"]}


class Told(Notes):
    """Notes that remember the adapters of calls, as a session has them."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: list[tuple[Any, Any]] = []

    def prefill(self, tokens: Any, **options: Any) -> Any:
        self._note(tokens)
        return super().prefill(tokens, **options)

    def decode(self, header: Any, **options: Any) -> Any:
        self._note(header)
        return super().decode(header, **options)

    def _note(self, calls: Any) -> None:
        self.adapters += [(call.get("role"), call.get("adapter")) for call in calls]


class Server:
    """A client of a server that exchanges what is named, as far as workflows see one."""

    mode = "choreo"

    def __init__(self, folder: dict[str, Message], is_writer: bool = True) -> None:
        self.calls: list[dict[str, Any]] = []
        self.freed: list[str] = []
        self.is_closed = False
        self._folder = folder
        self._is_writer = is_writer
        self._own: set[str] = set()
        self._notes = Notes()

    def prefill(self, calls: Sequence[dict[str, Any]]) -> list[Message]:
        return [self._made("prefill", call) for call in calls]

    def decode(self, calls: Sequence[dict[str, Any]]) -> list[Message]:
        return [self._made("decode", call) for call in calls]

    def _made(self, kind: str, call: dict[str, Any]) -> Message:
        for parent in call["parents"]:
            assert parent.id in self._own or parent.id in self._folder, "nobody has it"
            self._own.add(parent.id)
        made: Message = getattr(self._notes, kind)([{**call, "parents": ()}])[0]
        self._own.add(call["save_as"])
        parents = tuple(ParentSpan(f"here/{p.id}", p.start, p.stop) for p in call["parents"])
        object.__setattr__(made, "id", f"here/{call['save_as']}")
        object.__setattr__(made, "parents", parents)
        if self._is_writer:
            self._folder[call["save_as"]] = made
        self.calls.append({"kind": kind, **call})
        return made

    def free(self, *names: str) -> None:
        assert self._own >= set(names)
        self.freed += names

    def delete_saved(self, name: str) -> None:
        if self._folder.pop(name.removeprefix("message."), None) is None:
            raise UnknownKeptError("nothing is saved under it", parameter="name", value=name)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *raised: object) -> None:
        self.is_closed = True


@pytest.mark.parametrize("workflow", ROLES)
def test_all_roles_of_a_workflow_are_known(workflow: str) -> None:
    found: set[Any] = set()
    for inputs in _INPUTS[workflow]:
        log = program_of(workflow)(Notes(*_REPLIES.get(workflow, ())), **inputs)
        found |= {step.message.role for step in log.steps}
    assert found == set(ROLES[workflow])


def test_calls_use_the_adapters_of_their_roles_in_turn() -> None:
    told = Told()
    players = {"candidate": ["one", "two"], "vote": ["judge"]}
    c = AdaptersByRole(told, players)  # type: ignore[arg-type]
    program_of("tree_of_thoughts")(c, question="q", candidates=3, voters=2)
    by_role: dict[Any, list[Any]] = {}
    for role, adapter in told.adapters:
        by_role.setdefault(role, []).append(adapter)
    assert by_role["candidate"] == ["one", "two", "one"]
    assert by_role["vote"] == ["judge", "judge"]
    assert set(by_role["answer"]) == set(by_role["question"]) == {None}


def test_sides_of_a_debate_are_two_models_that_find_each_others_words() -> None:
    folder: dict[str, Message] = {}
    servers = [Server(folder), Server(folder)]
    with ServersByRole(servers, {"round": [0, 1]}) as c:  # type: ignore[arg-type]
        log = program_of("iterative_debate")(c, question="q", rounds=2)
        assert len(folder) == len(log.steps)
        (free,) = (step.message for step in log.steps if step.stage == "answer")
        c.free(free)
        assert servers[0].freed == [free.id.rpartition("/")[2]] and not servers[1].freed
    assert all(server.is_closed for server in servers) and not folder
    made = [call["role"] for call in servers[1].calls]
    assert made == ["round", "round"], "the negative side's"
    ids = [step.message.id for step in log.steps]
    assert len(set(ids)) == len(ids)
    as_one = program_of("iterative_debate")(Notes(), question="q", rounds=2)
    numbers = {step.message.id: i for i, step in enumerate(as_one.steps)}
    for one, other in zip(as_one.steps, log.steps, strict=True):
        expected = [numbers[span.id] for span in one.message.parents]
        assert [ids.index(span.id) for span in other.message.parents] == expected


def test_a_list_is_made_on_all_servers_and_comes_back_in_order() -> None:
    folder: dict[str, Message] = {}
    servers = [Server(folder), Server(folder, is_writer=False)]
    with ServersByRole(servers, {"x": [1, 0]}) as c:  # type: ignore[arg-type]
        made = c.prefill([{"tokens": str(n), "role": "x" if n else None} for n in range(4)])
        assert [message.text for message in made] == ["0", "1", "2", "3"]
        assert [len(server.calls) for server in servers] == [2, 2]
        with pytest.raises(AssertionError, match="nobody has it"):
            c.prefill("y", parents=[made[1]])  # whose server writes for nobody


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--role", "vote"], "ROLE=MODEL"),
        (["--role", "vote="], "ROLE=MODEL"),
        (["--role", "voice=a"], "candidate, vote, answer"),
        (["--role", "vote=a", "--role", "vote=b"], "once"),
        (["--role", "vote=a", "--mode", "both"], "of one model"),
        (["--role", "vote=http://x"], "beside that of --server"),
        (["--server", "http://y", "--role", "vote=a,http://x"], "servers alone"),
    ],
)
def test_what_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["run", "tree_of_thoughts", *arguments, "--out", str(tmp_path / "out")]
    assert cli.main(given) == 1
    assert said in capsys.readouterr().err
