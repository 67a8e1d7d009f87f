# SPDX-License-Identifier: Apache-2.0
"""Messages that outlive their engine: what is loaded is what was saved, or it is refused."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.engine.oracle import random_tokens
from tests.engine.test_tiers import BLOCK_GIB
from vllm_choreo import Choreography
from vllm_choreo.engine.utility import call
from vllm_choreo.errors import (
    ChoreoError,
    DeniedMessageError,
    FreedMessageError,
    KeptError,
    LimitError,
    NameTakenError,
    TooLongError,
    UnknownKeptError,
)
from vllm_choreo.snapshot import tensors
from vllm_choreo.snapshot.manifest import manifest_bytes, read_manifest
from vllm_choreo.snapshot.storage import SnapshotFolder

ROOT = Path(__file__).parents[2]
# What the messages of the first engine take is more than the pool of the second one.
POOL = {"num_gpu_blocks_override": 31, "max_model_len": 640}


def params(num_tokens: int = 6) -> Any:
    """Greedy sampling of so many tokens, with two log-probabilities of each."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=2)


@dataclass(frozen=True)
class Saved:
    """What an engine has saved, and what its readers said before.

    Attributes:
        keys, recipes, large: folders; `large` holds more than the next engine's pool.
        answers: tokens and log-probabilities.
        session: that the messages were in.
        free: blocks of an engine without messages.
    """

    keys: Path
    recipes: Path
    large: Path
    answers: list[Any]
    session: str


def _answers(c: Choreography) -> list[Any]:
    """What readers of the saved messages say: as they lie, repaired, exact, and of a part."""
    chain = ["doc", "plan", "next"]
    calls: list[dict[str, Any]] = [
        {"parents": chain},
        {"parents": ["next", "doc"], "offsets": [40, 3], "new_offset": 200},
        {"parents": ["alone", ("doc", 5, 40)], "new_offset": 150},
        {"parents": ["doc", "alone"], "repair": "first:8"},
        {"parents": ["doc", "alone"], "mode": "exact"},
        {"parents": ["repaired", "plan"]},
    ]
    # One by one: what runs beside a call changes how its sums are rounded.
    answers = [c.decode([5, 6, 7], **call, sampling_params=params()) for call in calls]
    said = [
        (a.generated_token_ids, [[(t, p.logprob) for t, p in at.items()] for at in a.logprobs])
        for a in answers
    ]
    assert [a.usage.exact for a in answers] == [True, False, False, False, True, False]
    c.free(*answers)
    return said


def said_by(c: Choreography, *parents: str, **options: Any) -> Any:
    """Answer of a reader of these messages, freed."""
    answer = c.decode([5, 6, 7], parents=parents, sampling_params=params(12), **options)
    c.free(answer)
    return answer


def _totals(llm: Any) -> dict[str, int]:
    found: dict[str, int] = call(llm, "totals")
    return found


@pytest.fixture(scope="module")
def saved(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Saved:
    """Saved by an engine that is gone when another one is asked for."""
    folder, rng = tmp_path_factory.mktemp("kept"), random.Random(1)
    llm = engine_slot(tiny_model_path("llama"), max_model_len=POOL["max_model_len"])
    with Choreography(llm) as c:
        secret = c.prefill(random_tokens(rng, 20), save_as="secret")
        doc = c.prefill(random_tokens(rng, 70), save_as="doc", role="document")
        plan = c.decode(
            random_tokens(rng, 9), parents=[doc], sampling_params=params(), save_as="plan"
        )
        c.prefill(random_tokens(rng, 33), parents=[doc, plan], save_as="next")
        alone = c.prefill(random_tokens(rng, 50), save_as="alone")
        c.prefill(
            random_tokens(rng, 12), parents=[doc, alone], repair="first:8", save_as="repaired"
        )
        c.prefill(random_tokens(rng, 5), parents=[secret], save_as="told")
        c.free(secret)
        _answers(c)
        answers = _answers(c)  # with the copies that were made before
        c.evict("told")  # comes back to be saved
        kept = c.save(None, folder / "keys", encodings=True)
        assert kept.messages == 6 and kept.encodings == 8, "and copies of exact and repaired calls"
        assert kept.bytes > 0
        assert c.save(None, folder / "recipes", progress=True).bytes == 0
        session = c.session
    with Choreography(llm) as c:
        c.prefill([{"tokens": random_tokens(rng, 64)} for _ in range(24)])  # 48 blocks
        c.save(None, str(folder / "large"), encodings=True)
    assert _totals(llm)["num_blocks"] == 0, "nothing is held when all is saved"
    return Saved(folder / "keys", folder / "recipes", folder / "large", answers, session)


@pytest.fixture
def llm(
    saved: Saved, engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> Iterator[Any]:
    """Another engine, with a small pool; whatever a test does, nothing of it is left."""
    settings = {"choreo": {"host_memory_gib": 40.5 * BLOCK_GIB}}
    llm = engine_slot(tiny_model_path("llama"), **POOL, additional_config=settings)
    before = _totals(llm)["num_free_blocks"]
    yield llm
    after = _totals(llm)
    assert after["num_free_blocks"] == before and after["num_host_blocks_used"] == 0


def test_what_is_loaded_is_read_as_if_it_had_stayed(llm: Any, saved: Saved) -> None:
    before = _totals(llm)
    with Choreography(llm) as c:
        messages = c.load(saved.keys)
        assert [m.id.partition("/")[2] for m in messages] == [
            *("doc", "plan", "next", "alone", "repaired", "told")
        ]
        assert c.message("doc").role == "document" and c.message("plan").finish_reason == "length"
        assert c.message("next").parents[1].id == c.message("plan").id
        assert c.stats()["num_resident_tokens"] >= sum(m.num_tokens for m in messages)
        assert _answers(c) == saved.answers, "to the bit"
        after = _totals(llm)
        for name in ("encoded_again_messages_total", "encoded_again_tokens_total"):
            assert after.get(name, 0) == before.get(name, 0), "nothing was encoded"
        assert after["loaded_messages_total"] - before.get("loaded_messages_total", 0) == 8


def test_recipes_are_encoded_when_they_are_read(llm: Any, saved: Saved) -> None:
    before = _totals(llm).get("encoded_again_messages_total", 0)
    with Choreography(llm) as c:
        c.load(saved.recipes)
        assert c.stats()["num_resident_tokens"] == 0
        for mine, theirs in zip(_answers(c), saved.answers, strict=True):
            assert mine[0] == theirs[0]
        assert _totals(llm)["encoded_again_messages_total"] > before
        c.evict("doc", "plan")
        assert _answers(c)[0][0] == saved.answers[0][0], "and again"


def test_traces_and_policies_go_with_messages(llm: Any, saved: Saved) -> None:
    secret = f"{saved.session}/secret"
    with Choreography(llm) as c:
        c.load(saved.keys)
        assert c.provenance("next") == {c.message("doc").id, c.message("plan").id}
        assert c.provenance("told") == {secret}
        with pytest.raises(DeniedMessageError):
            c.deny(secret).decode([5], parents=["told"], sampling_params=params(1))
        with pytest.raises(DeniedMessageError):
            c.deny(secret).save(["told"], saved.keys.with_name("denied"))


def test_eight_readers_share_one_copy_and_tenants_share_nothing(llm: Any, saved: Saved) -> None:
    sessions = [Choreography(llm) for _ in range(8)]
    try:
        sessions[0].load(saved.keys)
        one = _totals(llm)["num_blocks"]
        for c in sessions[1:]:
            c.load(saved.keys)
        assert _totals(llm)["num_blocks"] == one
        for c in sessions:
            c.decode([5], parents=["doc", "next"], sampling_params=params(1))
        with Choreography(llm, tenant="other") as c:
            with pytest.raises(KeptError, match="another tenant's"):
                c.load(saved.keys, on_mismatch="encode")
            assert c.stats()["num_messages"] == 0
    finally:
        for c in sessions:
            c.close()


def test_more_than_the_pool_holds_lies_in_host_memory(llm: Any, saved: Saved) -> None:
    before = _totals(llm)
    with Choreography(llm) as c:
        messages = c.load(saved.large)
        assert len(messages) == 24 and _totals(llm)["num_host_blocks_used"] >= 18
        for message in reversed(messages):
            c.free(c.decode([5], parents=[message], sampling_params=params(2)))
        after = _totals(llm)
        again = "encoded_again_messages_total"
        assert after.get(again, 0) == before.get(again, 0)
        assert after["restored_messages_total"] > before.get("restored_messages_total", 0)


def test_names_and_lengths_that_are_in_the_way(llm: Any, saved: Saved) -> None:
    with Choreography(llm) as c:
        c.prefill([5], save_as="plan")
        with pytest.raises(NameTakenError, match="name"):
            c.load(saved.keys)
        assert [m["id"] for m in c.stats()["messages"]] == [f"{c.session}/plan"]
        zero = c.prefill([6])
        numbers = [m.id.partition("/")[2] for m in c.load(saved.large)]
        assert numbers == [str(i) for i in range(1, 25)], "numbered after those that there are"
        assert c.message(zero).token_ids == (6,)
    with Choreography(llm) as c, pytest.raises(UnknownKeptError):
        c.load(saved.keys.with_name("nothing"))
    with Choreography(llm, mode="baseline") as c:
        c.prefill([5])
        for refused in (lambda: c.save(None, "x"), lambda: c.load(saved.keys)):
            with pytest.raises(ChoreoError, match="baseline"):
                refused()
    with Choreography(llm) as c:
        for wrong in ({"on_mismatch": "ignore"}, {"on_mismatch": None}):
            with pytest.raises(ChoreoError, match="on_mismatch"):
                c.load(saved.keys, **wrong)  # type: ignore[arg-type]
        with pytest.raises(ChoreoError, match="no messages"):
            c.save([], saved.keys)


# -- damage ----------------------------------------------------------------------------------------


def _damaged(folder: Path, damage: str) -> str:
    """Damage a folder; the name of the file."""
    kept = read_manifest(SnapshotFolder(folder))
    (entry,) = [e for e in kept["encodings"] if e["message"].endswith("/plan")]
    path = folder / entry["data"]["file"]
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "longer":
        path.write_bytes(content + b"x")
    elif damage == "not finite":  # by whoever makes the digests anew
        content[-4:] = struct.pack("<f", math.nan)
        path.write_bytes(content)
        entry["data"]["sha256"] = hashlib.sha256(content).hexdigest()
        (folder / "manifest.json").write_bytes(manifest_bytes(kept))
    else:
        at = {"header": 20, "length": 1, "data": len(content) // 2, "last": len(content) - 1}
        content[at[damage]] ^= 16
        path.write_bytes(content)
    return path.name


@pytest.mark.parametrize(
    "damage",
    ["truncated", "data", "last", "header", "length", "longer", "gone", "not finite"],
)
def test_damaged_files_are_refused_by_name(
    damage: str, llm: Any, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "CHUNK_BYTES", 2000)
    folder = tmp_path / "kept"
    shutil.copytree(saved.keys, folder)
    name = _damaged(folder, damage)
    with Choreography(llm) as bystander, Choreography(llm) as c:
        kept = bystander.prefill([7, 8, 9])
        blocks = _totals(llm)["num_blocks"]
        with pytest.raises(KeptError) as refusal:
            c.load(folder)
        assert str(refusal.value.value).endswith(f"kept/{name}")
        assert c.stats()["num_messages"] == 0 and _totals(llm)["num_blocks"] == blocks
        bystander.decode([5], parents=[kept], sampling_params=params(1))
        # Or the one message is encoded from its recipe, the others are as they were saved.
        c.load(folder, on_mismatch="encode")
        # All but one of six messages and two copies; none where the manifest is not signed.
        assert c.stats()["num_resident"] == (0 if damage == "not finite" else 7)
        for mine, theirs in zip(_answers(c), saved.answers, strict=True):
            assert mine[0] == theirs[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "0123"),
        ("dtype", "bfloat16"),
        ("rotation", {"rope_theta": 10.0}),
        ("architecture", ["Qwen2ForCausalLM"]),
        ("quantization", "fp8"),
    ],
)
def test_keys_of_another_model_are_refused_or_encoded(
    field: str, value: Any, llm: Any, saved: Saved, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(saved.keys, folder)
    kept = read_manifest(SnapshotFolder(folder))
    kept["model"][field] = value
    (folder / "manifest.json").write_bytes(manifest_bytes(kept))
    with Choreography(llm) as c:
        with pytest.raises(KeptError, match=field) as refusal:
            c.load(folder)
        assert refusal.value.value == f"{folder}/manifest.json"
        c.load(folder, on_mismatch="encode")
        assert c.stats()["num_resident"] == 0
        assert _answers(c)[0][0] == saved.answers[0][0]


def test_tokens_of_another_tokenizer_are_never_taken(
    llm: Any, saved: Saved, tmp_path: Path
) -> None:
    kept = read_manifest(SnapshotFolder(saved.recipes))
    kept["model"] |= {"tokenizer": "0123", "vocabulary": "4567"}
    (tmp_path / "manifest.json").write_bytes(manifest_bytes(kept))
    with Choreography(llm) as c, pytest.raises(KeptError, match="tokenizer"):
        c.load(tmp_path, on_mismatch="encode")


def test_a_tokenizer_written_anew_is_the_same_while_its_tokens_have_the_same_numbers(
    llm: Any, saved: Saved, tmp_path: Path
) -> None:
    kept = read_manifest(SnapshotFolder(saved.recipes))
    kept["model"]["tokenizer"] = "0123"
    (tmp_path / "manifest.json").write_bytes(manifest_bytes(kept))
    with Choreography(llm) as c:
        c.load(tmp_path)
        assert _answers(c)[0][0] == saved.answers[0][0]


def test_what_could_not_be_encoded_again_is_not_loaded(
    llm: Any, saved: Saved, tmp_path: Path
) -> None:
    kept = read_manifest(SnapshotFolder(saved.recipes))
    for entry in kept["encodings"]:
        entry["tokens"] = entry["tokens"] * 20
    for message in kept["messages"]:
        message["token_ids"] = message["token_ids"] * 20
        message["num_tokens"] *= 20
    (tmp_path / "manifest.json").write_bytes(manifest_bytes(kept))
    with Choreography(llm) as c, pytest.raises(TooLongError, match="max_model_len"):
        c.load(tmp_path)


# -- who comes between -----------------------------------------------------------------------------


class _Closed(Choreography):
    """A session that is closed right before a step of its load.

    Attributes:
        steps_left: before that.
    """

    steps_left = 0

    def _answer(self, ask: Any) -> Any:
        if self.steps_left == 0:
            self.close()
        self.steps_left -= 1
        return super()._answer(ask)


def test_a_session_that_is_closed_while_it_loads_leaves_nothing(llm: Any, saved: Saved) -> None:
    names = ("num_messages", "num_blocks", "num_free_blocks", "num_host_blocks_used")
    before, num_steps, is_refused = _totals(llm), 0, True
    while is_refused:
        c = _Closed(llm)
        c.steps_left, is_refused = num_steps, False
        try:
            c.load(saved.keys)
        except FreedMessageError:
            is_refused = True
        finally:
            c.close()
        after = _totals(llm)
        assert [after[name] for name in names] == [before[name] for name in names], num_steps
        num_steps += 1
    assert num_steps > 10


@pytest.mark.parametrize("scheme", ["{}/again", "memory://again-{}"])
def test_a_load_that_a_save_overtakes_begins_again(
    scheme: str, llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the manifest, and the files that this names are gone."""
    uri = scheme.format(tmp_path if "memory" not in scheme else tmp_path.name)
    rng, reading = random.Random(6), SnapshotFolder.reading
    with Choreography(llm) as writer, Choreography(llm) as c:
        for name in ("first", "second", "third"):
            writer.prefill(random_tokens(rng, 40), save_as=name)
        writer.save(["first"], uri, encodings=True)
        following = iter(["second", "third"])

        def overtaken(folder: SnapshotFolder, names: Any) -> Any:
            if name := next(following, None):
                writer.save([name], uri, encodings=True)
                writer.evict("first", "second", "third")  # nobody's blocks can be shared
            return reading(folder, names)

        monkeypatch.setattr(SnapshotFolder, "reading", overtaken)
        (message,) = c.load(uri)
        assert message.id.partition("/")[2] == "third"
        assert (
            said_by(c, "third").generated_token_ids == said_by(writer, "third").generated_token_ids
        )


# -- storage ---------------------------------------------------------------------------------------


def test_recipes_have_to_find_room_too(llm: Any, tmp_path: Path) -> None:
    with Choreography(llm) as c:
        c.prefill(list(range(5, 205)))
        for encodings in (False, True):
            folder = SnapshotFolder(tmp_path / "much", max_bytes=1000)
            with pytest.raises(LimitError, match="room"):
                c.save(None, folder, encodings=encodings)
            assert not (tmp_path / "much").exists(), "nothing is left of what was refused"
        c.save(None, SnapshotFolder(tmp_path / "much", max_bytes=10_000))


class _Failing(MemoryFileSystem):
    """Memory that fails at one of its writes."""

    protocol = "failing"
    store: dict[str, Any] = {}  # noqa: RUF012  of fsspec's class
    pseudo_dirs = [""]  # noqa: RUF012
    writes_left = 0

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if "w" in mode:
            write = file.write

            def counted(data: Any) -> int:
                type(self).writes_left -= 1
                if type(self).writes_left < 0:
                    raise OSError(28, "No space left on device")
                return int(write(data))

            file.write = counted
        return file


def test_a_save_that_fails_anywhere_leaves_what_was_there(llm: Any) -> None:
    fsspec.register_implementation("failing", _Failing, clobber=True)
    rng, uri = random.Random(2), "failing://kept"
    with Choreography(llm) as c:
        _Failing.writes_left = 100
        old = c.prefill(random_tokens(rng, 40), save_as="old")
        c.save([old], uri, encodings=True)
        num_files = len(_Failing.store)
        new = c.prefill([{"tokens": random_tokens(rng, 40)} for _ in range(2)])
        failures = 0
        while True:
            _Failing.writes_left = failures
            try:
                c.save(new, uri, encodings=True)
                break
            except KeptError as error:
                assert "No space left" in str(error) and "kept/" in str(error.value)
            failures += 1
            assert len(_Failing.store) == num_files, "nothing is left of it"
            with Choreography(llm) as reader:
                assert [m.token_ids for m in reader.load(uri)] == [old.token_ids]
        assert failures >= 5
        with Choreography(llm) as reader:
            assert [m.token_ids for m in reader.load(uri)] == [m.token_ids for m in new]
    assert len(_Failing.store) == 3


def test_examples_of_the_documentation_run(
    llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "keep.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict[str, Any] = {"llm": llm}
    for example in examples:
        if "ChoreoClient" not in example:  # tests/server/test_keep.py
            exec(compile(example, "docs/keep.md", "exec"), scope)
    fields = json.loads((tmp_path / "library" / "manifest.json").read_text())["kept"]["model"]
    for name in fields:
        assert f"`{name}`" in text, "what is compared is told"
