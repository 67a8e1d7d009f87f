# SPDX-License-Identifier: Apache-2.0
"""Wings: the example of docs/wings.md as an installed package, and wings that cannot be."""

from __future__ import annotations

import asyncio
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from starlette.testclient import TestClient

from tests.server.serving import QUICK, Session
from vllm_choreo.errors import ChoreoError, UnsupportedOptionError
from vllm_choreo.server import wings
from vllm_choreo.server.plugin import ChoreoEndpoints
from vllm_choreo.server.wings import BegunPrompt, PromptReader, PromptRequest, Wing
from vllm_choreo.testing.server import start_server

DOCS = (Path(__file__).parents[2] / "docs" / "wings.md").read_text(encoding="utf-8")


def installed(folder: Path) -> Path:
    """A folder that holds the package of the documentation, as pip would install it."""
    blocks = dict(re.findall(r"```(python|toml)\n(.*?)```", DOCS, re.S))
    (folder / "longest.py").write_text(blocks["python"])
    info = folder / "longest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: longest\nVersion: 1.0\n")
    groups = tomllib.loads(blocks["toml"])["project"]["entry-points"]
    ((group, points),) = groups.items()
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
    return folder


@pytest.fixture(autouse=True)
def _found_anew() -> Iterator[None]:
    wings.wings.cache_clear()
    yield
    wings.wings.cache_clear()


def test_schemas_are_a_wing() -> None:
    names = {point.name for point in entry_points(group=wings.GROUP)}
    assert names == {"pml"}, "install the package anew: its entry points have changed"
    assert wings.prompt_arguments() == {"choreo_schema": "schema", "choreo_layout": "layout"}


def test_a_package_adds_a_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed(tmp_path)))
    messages = [SimpleNamespace(id=f"s/{n}", num_tokens=n) for n in (3, 8, 5)]

    @contextmanager
    def used() -> Iterator[Any]:
        yield SimpleNamespace(messages=lambda: messages)

    app = FastAPI()
    ChoreoEndpoints().attach_router(app)
    app.state.choreo = SimpleNamespace(session=lambda tenant, name: SimpleNamespace(used=used))
    with TestClient(app) as client:
        answer = client.get("/v1/choreo/sessions/s/longest")
    assert answer.json() == {"id": "s/8", "num_tokens": 8}


@pytest.mark.exhaustive  # a server of its own
def test_a_server_has_the_routes_of_a_package(shallow_model_path: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(installed(tmp_path)), os.environ.get("PYTHONPATH"))))
    with (
        start_server(shallow_model_path, tmp_path, env={"PYTHONPATH": path}, **QUICK) as server,
        server.client() as client,
    ):
        session = Session(client)
        made = [session.call(type="prefill", content=text) for text in ("One.", "One, two, three.")]
        assert client.get(f"{session.path}/longest").json()["id"] == made[1]["id"]
        assert client.get("/v1/choreo/sessions/none/longest").status_code == 404


@pytest.mark.parametrize(
    ("value", "reason"),
    [("nowhere:register", "ModuleNotFoundError"), ("builtins:dict", "returned dict, and no Wing")],
)
def test_a_wing_that_cannot_be_loaded_ends_the_start(
    value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (point_file,) = installed(tmp_path).glob("*/entry_points.txt")
    point_file.write_text(f"[{wings.GROUP}]\nlongest = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ChoreoError, match=reason):
        ChoreoEndpoints().attach_router(FastAPI())


# -- prompts of OpenAI's routes ------------------------------------------------------------------


def reader(*names: str) -> PromptReader:
    async def begin(request: PromptRequest) -> BegunPrompt:
        return BegunPrompt([request.arguments.pop(name) for name in names], {})

    return PromptReader(names, begin)


def begun(arguments: dict[str, Any]) -> BegunPrompt | None:
    request: Any = SimpleNamespace(arguments=arguments)
    return asyncio.run(wings.begin_prompt(request))


def test_a_prompt_has_one_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tuple(Wing(APIRouter(), reader=one) for one in (reader("a"), reader("b", "c")))
    monkeypatch.setattr(wings, "wings", lambda: made)
    assert wings.prompt_arguments() == {f"choreo_{name}": name for name in "abc"}
    assert begun({"parents": []}) is None
    asked = {"b": 1, "c": 2, "parents": []}
    answer = begun(asked)
    assert answer is not None and answer.header == [1, 2] and asked == {"parents": []}
    with pytest.raises(UnsupportedOptionError, match="one prompt: leave this out, or a"):
        begun({"a": 1, "c": 2})
