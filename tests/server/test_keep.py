# SPDX-License-Identifier: Apache-2.0
"""Saving and loading over HTTP: names and no paths, each API key its own, and after a restart."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import httpx
import pytest
from pydantic import TypeAdapter

from tests.server.serving import QUICK, Session
from vllm_choreo import AsyncChoreoClient, ChoreoClient
from vllm_choreo.config import ServerConfig
from vllm_choreo.errors import ChoreoError, KeptError, UnknownKeptError
from vllm_choreo.server.answers import ListAnswer
from vllm_choreo.server.snapshot_bodies import SavedAnswer, SavedDeletedAnswer, SavedEntry
from vllm_choreo.snapshot.manifest import manifest_bytes
from vllm_choreo.testing.server import KEYS, Server, start_server
from vllm_choreo.wire.messages import MessageAnswer

pytestmark = pytest.mark.exhaustive  # servers of its own

DOCS = (Path(__file__).parents[2] / "docs" / "keep.md").read_text(encoding="utf-8")
GREEDY = {"temperature": 0, "max_tokens": 6}
SHED = "The shed behind the house is green, and its door is red.\n"


def _client(server: Server, key: str = KEYS[0]) -> ChoreoClient:
    return ChoreoClient(server.base_url, api_key=key)


def _names(alpha: httpx.Client) -> list[str]:
    listed = alpha.get("/v1/choreo/kept").json()
    TypeAdapter(ListAnswer[SavedEntry]).validate_python(listed, strict=True)
    return [entry["name"] for entry in listed["data"]]


def test_from_saving_to_deleting(server: Server, alpha: httpx.Client, session: Session) -> None:
    shed = session.call(type="prefill", content=SHED, save_as="shed")
    said = session.call(content="The door is", parents=["shed"], sampling_params=GREEDY)
    session.client.delete(f"{session.path}/messages/{said['id'].rpartition('/')[2]}")
    answer = alpha.post(f"{session.path}/save", json={"name": "house", "encodings": True}).json()
    TypeAdapter(SavedAnswer).validate_python(answer, strict=True)
    assert answer["messages"] == answer["encodings"] == 1
    assert answer["tokens"] == shed["num_tokens"] and answer["bytes"] > 1000 * answer["tokens"]
    assert "house" in _names(alpha)
    other = Session(alpha)
    (loaded,) = alpha.post(f"{other.path}/load", json={"name": "house"}).json()["data"]
    TypeAdapter(MessageAnswer).validate_python(loaded, strict=True)
    assert loaded["id"] == f"{other.id}/shed" and loaded["text"] == SHED
    assert other.usage()["resident_tokens"] == shed["num_tokens"]
    again = other.call(content="The door is", parents=["shed"], sampling_params=GREEDY)
    assert again["generated_token_ids"] == said["generated_token_ids"]
    assert again["usage"]["encoded_tokens"] == again["num_tokens"]
    taken = alpha.post(f"{other.path}/load", json={"name": "house"})
    assert taken.status_code == 409
    deleted = alpha.delete("/v1/choreo/kept/house").json()
    TypeAdapter(SavedDeletedAnswer).validate_python(deleted, strict=True)
    assert "house" not in _names(alpha)
    for gone in (
        alpha.delete("/v1/choreo/kept/house"),
        alpha.post(f"{other.path}/load", json={"name": "house"}),
    ):
        assert gone.status_code == 404, gone.text
    alpha.delete(other.path)


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "/etc", ".", "..", ".x", "memory://x", "", "x" * 129]
)
def test_a_name_is_no_path(name: str, session: Session) -> None:
    session.call(type="prefill", content=SHED)
    for action in ("save", "load"):
        answer = session.client.post(f"{session.path}/{action}", json={"name": name})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in ("uri", "name")


def test_keys_have_nothing_of_one_another(
    server: Server, alpha: httpx.Client, beta: httpx.Client
) -> None:
    with _client(server) as mine, _client(server, KEYS[1]) as theirs:
        mine.prefill(SHED, save_as="shed")
        mine.save(["shed"], "mine", encodings=True)
        assert "mine" in _names(alpha) and "mine" not in _names(beta)
        with pytest.raises(UnknownKeptError):
            theirs.load("mine")
        assert beta.delete("/v1/choreo/kept/mine").status_code == 404
        folder = _folder(server)
        (own,) = (path.parent for path in folder.glob("*/mine"))
        theirs.prefill(SHED)
        theirs.save(None, "theirs")
        (other,) = (path.parent for path in folder.glob("*/theirs"))
        assert own != other
        # Though somebody put it into their folder.
        shutil.copytree(own / "mine", other / "stolen")
        with pytest.raises(KeptError, match="another tenant's") as refusal:
            theirs.load("stolen", on_mismatch="encode")
        assert refusal.value.value == "stolen/manifest.json", "no path of the server's is told"
        assert (folder / "tenants.key").stat().st_mode & 0o077 == 0


def _folder(server: Server) -> Path:
    return server.log.parent / "kept"


def test_all_that_lies_there_is_listed_and_can_be_deleted(
    server: Server, alpha: httpx.Client, session: Session
) -> None:
    """Recipes alone, and what a save has left that was killed."""
    session.call(type="prefill", content=SHED * 20)
    alpha.post(f"{session.path}/save", json={"name": "recipes"}).raise_for_status()
    (recipes,) = _folder(server).glob("*/recipes")
    left = recipes.with_name("left")
    left.mkdir()
    (left / "20260102T030405-9f86d081-00000.safetensors").write_bytes(b"x" * 10_000)
    sizes = {e["name"]: e["bytes"] for e in alpha.get("/v1/choreo/kept").json()["data"]}
    assert sizes["recipes"] >= (recipes / "manifest.json").stat().st_size
    assert sizes["left"] >= 10_000
    assert alpha.post(f"{session.path}/load", json={"name": "left"}).status_code == 404
    for name in ("recipes", "left"):
        assert alpha.delete(f"/v1/choreo/kept/{name}").status_code == 200
        assert alpha.delete(f"/v1/choreo/kept/{name}").status_code == 404
    assert not recipes.exists() and not left.exists()


def test_forged_files_reach_nobody_who_has_not_loaded_them(
    server: Server, alpha: httpx.Client, session: Session
) -> None:
    texts = {"one": list(range(100, 190)), "two": list(range(300, 390))}
    ask = {"content": "So", "sampling_params": {**GREEDY, "logprobs": 1}}
    for name, text in texts.items():
        session.call(type="prefill", content=text, save_as=name)
    right = session.call(**ask, parents=["one"])
    alpha.post(f"{session.path}/save", json={"name": "forged", "encodings": True})
    alpha.delete(session.path)
    (folder,) = _folder(server).glob("*/forged")
    kept = json.loads((folder / "manifest.json").read_text())["kept"]
    kept["messages"] = kept["messages"][:2]
    kept["encodings"] = one, two = kept["encodings"][:2]
    one["data"], two["data"] = two["data"], one["data"]
    (folder / "manifest.json").write_bytes(manifest_bytes(kept))
    loaded, honest = Session(alpha), Session(alpha)
    answer = alpha.post(f"{loaded.path}/load", json={"name": "forged"})
    assert [m["usage"]["untrusted"] for m in answer.json()["data"]] == [True, True]
    wrong = loaded.call(**ask, parents=["one"])
    assert wrong["usage"]["untrusted"] and not wrong["usage"]["exact"]
    assert wrong["logprobs"] != right["logprobs"], "they are forged"
    sent = honest.call(type="prefill", content=texts["one"], save_as="one")
    assert not sent["usage"]["untrusted"]
    assert sent["usage"]["reused_tokens"] == 0
    assert honest.call(**ask, parents=["one"])["logprobs"] == right["logprobs"]
    exact = loaded.call(**ask, parents=["one"], mode="exact")
    assert (
        exact["generated_token_ids"] == right["generated_token_ids"]
        and not exact["usage"]["untrusted"]
    )
    for opened in (loaded, honest):
        alpha.delete(opened.path)
    alpha.delete("/v1/choreo/kept/forged")


def test_the_asynchronous_client(server: Server) -> None:
    async def run() -> None:
        async with AsyncChoreoClient(server.base_url, api_key=KEYS[0]) as c:
            first = await c.prefill(SHED, save_as="first")
            kept = await c.save([first], "asynchronous", encodings=True)
            assert kept.messages == 1 and kept.tokens == first.num_tokens
        async with AsyncChoreoClient(server.base_url, api_key=KEYS[0]) as c:
            calls = asyncio.gather(*(c.decode("So", sampling_params=GREEDY) for _ in range(3)))
            (loaded,) = await c.load("asynchronous")
            assert loaded.token_ids == first.token_ids
            await calls  # ran meanwhile

    asyncio.run(run())


def test_the_example_of_the_documentation(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = (e for e in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL) if "Client" in e)
    example = example.replace("http://127.0.0.1:8000", server.base_url)
    exec(compile(example.replace('"secret"', repr(KEYS[0])), "docs/keep.md", "exec"), {})
    assert capsys.readouterr().out.startswith("What is green?")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_restarted_server_serves_the_same_handles(
    server: Server, shallow_model_path: Path, tmp_path: Path
) -> None:
    client = _client(server)  # stays open: its handles are to outlive the server
    shed = client.prefill(SHED, save_as="shed")
    note = client.decode("It", parents=[shed], sampling_params=GREEDY)
    reader = client.decode("The door is", parents=[shed, note], sampling_params=GREEDY)
    client.save([shed, note], "restart", encodings=True)
    kept = tmp_path / "kept"
    shutil.copytree(_folder(server), kept)
    (damaged,) = kept.glob("*/asynchronous/*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:1000])
    settings = {"server": {"max_kept_gib_per_tenant": 1e-6}}
    options = {"choreo_keep": str(kept), "choreo_load": str(kept), "settings": settings}
    with start_server(shallow_model_path, tmp_path, **options, **QUICK) as restarted:
        log = restarted.log.read_text()
        assert f"asynchronous/{damaged.name}" in log and "was not loaded" in log
        path = f"/v1/choreo/sessions/{client.session}"
        with restarted.client() as alpha, restarted.client(KEYS[1]) as beta:
            assert beta.get(path).status_code == 404
            session = Session.__new__(Session)
            session.client, session.path = alpha, path
            before = session.usage()
            assert before["resident_tokens"] == shed.num_tokens + note.num_tokens
            parents = [shed.id, note.id]
            body = {"content": "The door is", "parents": parents, "sampling_params": GREEDY}
            again = session.call(**body)
            assert tuple(again["generated_token_ids"]) == reader.generated_token_ids
            assert again["usage"]["reused_tokens"] == shed.num_tokens + note.num_tokens
            for encodings in (True, False):
                full = alpha.post(f"{path}/save", json={"name": "more", "encodings": encodings})
                assert full.status_code == 429
                assert full.json()["error"]["param"] == "max_kept_gib_per_tenant"
            assert "more" not in _names(alpha), "nothing is left of what was refused"
            assert not again["usage"]["untrusted"]
    client.close()


def test_a_server_that_keeps_nothing(server: Server) -> None:
    """The option is the operator's: without it nothing is written."""
    from vllm_choreo.server import snapshot_folders

    assert snapshot_folders.start(None, None, ServerConfig()) == (None, None)
    with pytest.raises(ChoreoError, match=r"tenants\.key"):
        snapshot_folders.start(None, str(_folder(server).with_name("elsewhere")), ServerConfig())
