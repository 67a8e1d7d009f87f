# SPDX-License-Identifier: Apache-2.0
"""What a type checker sees of the facades: one call makes a message, a list of calls a list."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest

import vllm_choreo
from tools.typed_examples import MYPY_CONFIG, copy_examples

ROOT = Path(__file__).parents[2]

SNIPPET = """
from vllm_choreo import (
    AsyncChoreoClient, AsyncChoreography, Call, ChoreoClient, Choreography, Message,
)
from vllm_choreo.api.facade_wrapper import FacadeWrapper
from vllm_choreo.api.protocol import AsyncFacade, Facade


def waits(c: Choreography | ChoreoClient | Facade | FacadeWrapper, doc: Message) -> None:
    reveal_type(c.prefill("text", save_as="doc"))
    reveal_type(c.prefill([1, 2], parents=[doc, "doc", (doc, 0, 4)], offsets=[0, None, None]))
    reveal_type(c.prefill([{"tokens": "text"}, {"tokens": [1], "parents": [doc]}]))
    reveal_type(c.decode("text", parents=[doc], sampling_params={"temperature": 0}))
    reveal_type(c.decode((1, 2)))
    reveal_type(c.decode([{"header": text, "parents": [doc]} for text in ("a", "b")]))
    calls: list[Call] = [{"header": "text", "role": "vote"}]
    reveal_type(c.decode(calls, mode="exact"))
    c.free(doc, "doc")


async def overlaps(c: AsyncChoreography | AsyncChoreoClient | AsyncFacade, doc: Message) -> None:
    reveal_type(await c.prefill("text", parents=[doc]))
    reveal_type(await c.prefill([{"tokens": "text"}]))
    reveal_type(await c.decode([1, 2]))
    reveal_type(await c.decode([{"header": [1, 2], "deny": [doc]}]))
    pending = await c.submit(header="text")
    reveal_type(await pending)
    reveal_type(await c.decode("text", parents=[pending, (pending, None, 3)]))
    await c.submit_all([{"header": "text"}, {"copy_of": doc}])
    reveal_type(await c.reencode(doc, parents=[pending]))
    reveal_type(await c.load("name"))
    async for piece in c.stream_decode("text", parents=[doc]):
        reveal_type(piece.message)


def of_a_session(c: Choreography | ChoreoClient, doc: Message) -> None:
    reveal_type(c.reencode(doc, parents=["doc"]))
    reveal_type(c.message("doc"))
    reveal_type(c.load("name"))
    with c as same:
        reveal_type(same.deny(doc).decode("text", sampling_params={"temperature": 0}))
"""
MESSAGE, MESSAGES = "Message", "list[Message]"
REVEALED = [
    *(MESSAGE, MESSAGE, MESSAGES, MESSAGE, MESSAGE, MESSAGES, MESSAGES),
    *(MESSAGE, MESSAGES, MESSAGE, MESSAGES, MESSAGE, MESSAGE, MESSAGE, MESSAGES, "Message | None"),
    *(MESSAGE, MESSAGE, MESSAGES, MESSAGE),
]

WRONG = """
from vllm_choreo import Call, Choreography


def wrong(c: Choreography) -> None:
    c.prefill(3)
    c.prefill("text", sampling_params={})
    c.decode("text", parents=[3])
    c.decode("text", temperature=0)
    call: Call = {"heading": "text"}
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Lines of mypy by the file that they are about."""
    api = pytest.importorskip("mypy.api")
    folder = tmp_path_factory.mktemp("typed")
    (folder / "mypy.ini").write_text(MYPY_CONFIG)
    (folder / "right.py").write_text(SNIPPET)
    (folder / "wrong.py").write_text(WRONG)
    paths = map(str, (folder / "right.py", folder / "wrong.py", *copy_examples(folder)))
    options = [f"--config-file={folder}/mypy.ini", f"--cache-dir={folder}/cache", "--no-pretty"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", str(ROOT))
        shown, trouble, _ = api.run([*options, "--show-absolute-path", *paths])
    assert not trouble
    lines: dict[str, list[str]] = {}
    for line in shown.splitlines():
        lines.setdefault(Path(line.partition(":")[0]).name, []).append(line)
    return lines


@pytest.mark.exhaustive  # mypy reads all of the package: 50 s
def test_one_call_makes_a_message_and_a_list_of_calls_a_list(said: dict[str, list[str]]) -> None:
    lines = said["right.py"]
    assert not [line for line in lines if " error: " in line]
    revealed = [match[1] for line in lines if (match := re.search(r'type is "(.*)"', line))]
    names = [re.sub(r"\b(\w+\.)+", "", name) for name in revealed]
    assert [set(name.split(" | ")) for name in names] == [
        set(name.split(" | ")) for name in REVEALED
    ]


@pytest.mark.exhaustive
def test_a_wrong_argument_is_an_error(said: dict[str, list[str]]) -> None:
    numbers = {int(line.split(":")[1]) for line in said["wrong.py"] if " error: " in line}
    assert numbers == {6, 7, 8, 9, 10}


@pytest.mark.exhaustive  # `make lint` does the same
def test_examples_are_typed(said: dict[str, list[str]], tmp_path: Path) -> None:
    """`make lint` has pyright look at them, too."""
    names = [path.name for path in copy_examples(tmp_path)]
    assert {"offline.py", "online.py", "readme_0.py", "supervisor.py"} <= {*names}
    assert not [line for name in names for line in said.get(name, []) if " error: " in line]


def test_the_package_says_that_it_is_typed() -> None:
    assert (files(vllm_choreo) / "py.typed").is_file()
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text()


def test_calls_are_exported_as_they_are_defined() -> None:
    from vllm_choreo.semantics.call_options import Call

    assert vllm_choreo.Call is Call
    assert {"header", "tokens", "copy_of", "parents", "sampling_params"} <= {*Call.__annotations__}
