# SPDX-License-Identifier: Apache-2.0
"""Messages with pictures on the real engine in float32: laws, the dense oracle, refusals."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.engine.choreographies import (
    LOGPROB_TOLERANCE,
    TIE_MARGIN,
    check,
    check_tokens,
    side_by_side,
)
from tests.engine.oracle import whole
from tests.engine.pictured import OPTIONS, PictureOracle, draw_pictured, picture
from tests.grids import sampled
from tests.quick import ONE_PROCESS
from vllm_choreo import AsyncChoreography, ChoreoError, Choreography
from vllm_choreo.cli import keep
from vllm_choreo.errors import (
    KeptError,
    LimitError,
    RepairError,
    SpanError,
    UnsupportedOptionError,
)
from vllm_choreo.semantics.message import Message
from vllm_choreo.snapshot.manifest import manifest_bytes
from vllm_choreo.snapshot.storage import SnapshotFolder
from vllm_choreo.testing.laws import difference, greedy
from vllm_choreo.testing.models.pictured import make_idefics3, make_paddleocr_vl

_SEEDS = [range(2), *(range(first, first + 6) for first in range(2, 104, 6))]
_WORDS = [" ".join(f"t{n}" for n in range(first, first + 9)) for first in (10, 60, 110, 160)]
_PICTURES = [picture(1), picture(2, (112, 56)), picture(3)]


@pytest.fixture(scope="module", params=["idefics3", "paddleocr_vl"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Positions as in text, and positions of several rows, in turn."""
    make = {"idefics3": make_idefics3, "paddleocr_vl": make_paddleocr_vl}[request.param]
    return make(tmp_path_factory.mktemp("pictured"))


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> PictureOracle:
    return PictureOracle(model_path)


@pytest.fixture
def llm(engine_slot: Callable[..., Any], model_path: Path) -> Any:
    return engine_slot(model_path, **OPTIONS)


def _call(number: int, shown: Image.Image | None = None) -> dict[str, Any]:
    """Words, a picture among them, more words."""
    shown = _PICTURES[number] if shown is None else shown
    text = f"{_WORDS[number]} <image> {_WORDS[3]}"
    return {"tokens": text, "multi_modal_data": {"image": shown}}


def _question(**options: Any) -> dict[str, Any]:
    return {"header": "t7 t8 t9", "sampling_params": greedy(), **options}


def _chain(c: Choreography, count: int = 3) -> list[Message]:
    messages: list[Message] = []
    for number in range(count):
        call = _call(number)
        messages.append(c.prefill(call.pop("tokens"), parents=messages, **call))
    return messages


def _ordinary(llm: Any, count: int = 3, question: str = "t7 t8 t9") -> Any:
    """What vLLM answers to the text of a chain, and to its pictures."""
    text = " ".join(_call(number)["tokens"] for number in range(count))
    data = {"image": _PICTURES[:count]}
    request = {"prompt": f"{text} {question}", "multi_modal_data": data}
    (output,) = llm.generate(request, greedy(), use_tqdm=False)
    return output.outputs[0]


def _same(left: Any, right: Any) -> None:
    assert difference(left, right) < LOGPROB_TOLERANCE


def test_a_chain_equals_the_text(llm: Any, oracle: PictureOracle) -> None:
    """And what is asked behind a part of one, and in exact mode of messages encoded apart."""
    expected = _ordinary(llm)
    with Choreography(llm) as c:
        chain = _chain(c)
        answer = c.decode(**_question(parents=chain))
        assert answer.usage.exact
        _same(answer, expected)
        apart = c.prefill([_call(number) for number in range(3)])
        loose = c.decode(**_question(parents=apart))
        assert not loose.usage.exact and difference(loose, expected) > 100 * LOGPROB_TOLERANCE
        exact = c.decode(**_question(parents=apart, mode="exact"))
        assert exact.usage.exact
        _same(exact, expected)
        split = 5 if oracle.has_rows else chain[0].num_tokens - 15  # inside of the picture
        parts = [(chain[0], 0, split), (chain[0], split, None), *chain[1:]]
        if oracle.has_rows:
            for wrong in (parts, [(chain[0], 0, 12)], [(chain[0], chain[0].num_tokens - 4, None)]):
                with pytest.raises(SpanError, match=r"fewer positions than tokens.* at token 9"):
                    c.decode(**_question(parents=wrong))
            c.decode(**_question(parents=[(chain[0], 3, 9)]))
            return
        cut = c.decode(**_question(parents=parts, mode="exact"))
        assert cut.usage.exact
        _same(cut, expected)


def test_a_picture_in_the_header(llm: Any, oracle: PictureOracle) -> None:
    with Choreography(llm) as c:
        (first,) = _chain(c, 1)
        call = _call(1)
        answer = c.decode(
            call.pop("tokens"), parents=[first], offsets=[40], sampling_params=greedy(), **call
        )
    tokens, pictures = oracle.prompt(_prompt(oracle, 0), [_PICTURES[0]])
    assert first.token_ids == tokens
    parent = oracle.encode(tokens, pictures=pictures)
    header, pictures = oracle.prompt(_prompt(oracle, 1), [_PICTURES[1]])
    assert answer.token_ids[: len(header)] == header
    new_offset = 40 + oracle.num_positions(tokens, [_PICTURES[0]])
    encoded = oracle.encode(answer.token_ids, [whole(parent, 40)], new_offset, pictures)
    assert answer.position == new_offset
    check_tokens(answer, encoded, len(header), LOGPROB_TOLERANCE, TIE_MARGIN)


def _prompt(oracle: PictureOracle, number: int) -> list[int]:
    ids: list[int] = oracle.processor.tokenizer(_call(number)["tokens"])["input_ids"]
    return ids


def test_shift_and_permutation(llm: Any) -> None:
    with Choreography(llm) as c:
        a, b, d = c.prefill([_call(number) for number in range(3)])
        expected = c.decode(**_question(parents=[a, b, d], offsets=[0, 90, 50], new_offset=140))
        shifted = c.decode(**_question(parents=[a, b, d], offsets=[600, 690, 650], new_offset=740))
        turned = c.decode(**_question(parents=[d, a, b], offsets=[50, 0, 90], new_offset=140))
        for other in (shifted, turned):
            _same(other, expected)


def test_pictures_do_not_meet(llm: Any) -> None:
    """Two pictures at the same place in equal words, side by side and one by one."""
    with Choreography(llm) as c:
        calls = [_call(0, _PICTURES[0]), _call(0, _PICTURES[2])]
        messages = c.prefill(calls)
        assert messages[0].token_ids == messages[1].token_ids
        answers = c.decode([_question(parents=[m]) for m in messages])
        assert difference(*answers) > 100 * LOGPROB_TOLERANCE
        for call, answer in zip(calls, answers, strict=True):
            with Choreography(llm, tenant="alone") as other:
                alone = other.prefill([call])
                assert alone[0].usage.reused_tokens == 0
                _same(other.decode(**_question(parents=alone)), answer)


def test_equal_pictures_share_blocks_within_a_tenant(llm: Any) -> None:
    with Choreography(llm) as c:
        first, same, other = (
            c.prefill([_call(0, shown)])[0]
            for shown in (_PICTURES[0], _PICTURES[0].copy(), _PICTURES[2])
        )
        assert first.usage.reused_tokens == other.usage.reused_tokens == 0
        assert same.usage.reused_tokens == 32  # a whole block
        with Choreography(llm, tenant="other") as elsewhere:
            (hidden,) = elsewhere.prefill([_call(0)])
            assert hidden.usage.reused_tokens == 0


def test_an_evicted_picture_is_encoded_again(llm: Any) -> None:
    """Also when vLLM has dropped what its encoder made of it, and its own copy of the picture."""
    with Choreography(llm) as c:
        messages = _chain(c)
        expected = c.decode(**_question(parents=messages[1:], offsets=[70, 0]))
        for drops in (False, True):
            c.evict(*messages)
            if drops:
                llm.llm_engine.reset_mm_cache()
                llm.llm_engine.reset_encoder_cache()
            again = c.decode(**_question(parents=messages[1:], offsets=[70, 0]))
            _same(again, expected)
        assert c.stats()["num_evictions"] >= 6


def test_tokens_encoded_anew_among_pictures(llm: Any, oracle: PictureOracle) -> None:
    """Repair of all tokens is what exact mode gives, run by run, pictures cut or not."""
    expected = _ordinary(llm)
    with Choreography(llm) as c:
        apart = c.prefill([_call(number) for number in range(3)])
        if oracle.has_rows:
            with pytest.raises(RepairError, match="without M-RoPE"):
                c.decode(**_question(parents=apart, repair="first:8"))
            return
        runs = [[(0, 20), (20, m.num_tokens)] for m in apart]
        repaired = c.decode(**_question(parents=apart, repair=[[], *runs[1:]]))
        _same(repaired, expected)
        clean = c.reencode(apart[1], parents=apart[:1])
        chain = [apart[0], clean, c.reencode(apart[2], parents=[apart[0], clean])]
        _same(c.decode(**_question(parents=chain)), expected)


def test_chunks_cut_pictures(llm: Any, oracle: PictureOracle) -> None:
    """A message that is encoded in several steps, whose ends lie inside of pictures."""
    tokens = [3, 4, *[oracle.placeholder, 5] * 24]
    shown = [picture(seed % 5) for seed in range(24)]
    ids, pictures = oracle.prompt(tokens, shown)
    assert len(ids) > 400  # of which a step takes 256
    with Choreography(llm) as c:
        message = c.prefill(tokens, multi_modal_data={"image": shown})
        assert message.token_ids == ids and message.num_pictures == 24
        answer = c.decode([7, 8], parents=[message], offsets=[20], sampling_params=greedy())
    parent = oracle.encode(ids, pictures=pictures)
    encoded = oracle.encode(
        answer.token_ids, [whole(parent, 20)], 20 + oracle.num_positions(ids, shown)
    )
    check_tokens(answer, encoded, 2, LOGPROB_TOLERANCE, TIE_MARGIN)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", [range(100, 104), range(104, 108)], ids=str)
def test_random_in_little_room(
    engine_slot: Callable[..., Any], model_path: Path, oracle: PictureOracle, seeds: range
) -> None:
    """Pictures are evicted, preempted and encoded again, and keys are turned where they lie."""
    settings = {"choreo": {"reposition": "in_place"}}
    llm = engine_slot(model_path, **OPTIONS, num_gpu_blocks_override=66, additional_config=settings)
    drawn = [draw_pictured(seed, oracle.placeholder, not oracle.has_rows) for seed in seeds]
    with Choreography(llm) as c:
        check(c, oracle, side_by_side(drawn))
        assert c.stats()["num_evictions"] > 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_engine_in_another_process(llm: Any, model_path: Path) -> None:
    """AsyncLLM: pictures cross to the engine's process, of equal ones the first time alone."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with Choreography(llm) as c:
        messages = _chain(c)
        expected = c.decode(**_question(parents=messages[1:], offsets=[70, 0]))
    args = AsyncEngineArgs(
        str(model_path),
        **OPTIONS,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=32,
        distributed_executor_backend=ONE_PROCESS,
    )

    async def run() -> list[Message]:
        other = AsyncLLM.from_engine_args(args)
        try:
            return [await answer(other, tenant) for tenant in ("a", "a", "b")]
        finally:
            other.shutdown()

    async def answer(other: AsyncLLM, tenant: str) -> Message:
        async with AsyncChoreography(other, tenant=tenant) as c:
            chain: list[Any] = []
            for number in range(3):
                call = _call(number)
                chain.append(await c.submit(parents=list(chain), **call))
            await asyncio.gather(*chain)
            await c.decode(**_question(parents=chain[1:], offsets=[70, 0]))
            await other.reset_mm_cache()
            await other.reset_encoder_cache()
            await c.evict(*[await message for message in chain])
            return await c.decode(**_question(parents=chain[1:], offsets=[70, 0]))

    for found in asyncio.run(run()):
        _same(found, expected)


@pytest.mark.parametrize("encodings", [False, True], ids=["recipes", "keys"])
def test_saved_messages_show_their_pictures(llm: Any, tmp_path: Path, encodings: bool) -> None:
    """Also one behind which another was encoded, that nobody saved; and once more when evicted."""
    folder = tmp_path / "saved"
    with Choreography(llm, tenant="t") as c:
        chain = _chain(c)
        expected = c.decode(**_question(parents=chain[1:], offsets=[70, 0]))
        saved = c.save(chain[1:], folder, encodings=encodings)
        assert saved.encodings == 2 * encodings
        # Theirs, and that of the first one, behind which they were encoded; each once.
        assert len(list(folder.glob("*.safetensors"))) == 3 + 2 * encodings
    _forget(llm)
    with Choreography(llm, tenant="t") as c:
        loaded = c.load(folder)
        assert [message.num_pictures for message in loaded] == [1, 1]
        answer = c.decode(**_question(parents=loaded, offsets=[70, 0]))
        _same(answer, expected)
        c.evict(*loaded)
        _same(c.decode(**_question(parents=loaded, offsets=[70, 0])), expected)
        # What was loaded is found by what it shows.
        again = _chain(c)[1:]
        assert [m.usage.reused_tokens for m in again] >= [m.num_tokens // 32 * 32 for m in loaded]
    with Choreography(llm, tenant="other") as c, pytest.raises(KeptError, match="another tenant"):
        c.load(folder)


def _forget(llm: Any) -> None:
    """Have the engine forget all that nobody names."""
    llm.reset_prefix_cache()
    llm.llm_engine.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()
    with Choreography(llm) as c:
        gc.collect()
        assert c.stats()["num_picture_bytes"] == 0


def test_pictures_of_others_are_not_loaded(
    llm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with another signature, of another processor, and a damaged one; each is named."""
    key, folder = b"k" * 32, tmp_path / "saved"
    with Choreography(llm) as c:
        c.save(_chain(c, 1), SnapshotFolder(folder, keep_key=key))
        with pytest.raises(KeptError, match="signed with another key"):
            c.load(SnapshotFolder(folder, keep_key=b"l" * 32), on_mismatch="encode")
        manifest = folder / "manifest.json"
        kept = json.loads(manifest.read_text())["kept"]
        kept["model"]["processor"] = "another"
        content = manifest.read_bytes()
        manifest.write_bytes(manifest_bytes(kept, key))
        with pytest.raises(KeptError, match="another processor"):
            c.load(SnapshotFolder(folder, keep_key=key))
        manifest.write_bytes(content)
        options = argparse.Namespace(action="show", uri=str(folder), keep_key="")
        assert keep.main(options) == 0
        (file,) = folder.glob("*.safetensors")
        *rest, last = file.read_bytes()
        file.write_bytes(bytes([*rest, last ^ 1]))
        with pytest.raises(KeptError, match=rf"damaged.*{file.name}"):
            c.load(SnapshotFolder(folder, keep_key=key))
        assert keep.main(options) == 1
        assert "1 pictures: DAMAGED" in capsys.readouterr().out


@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1), ids=str)
def test_random(llm: Any, oracle: PictureOracle, seeds: range) -> None:
    drawn = [draw_pictured(seed, oracle.placeholder, not oracle.has_rows) for seed in seeds]
    with Choreography(llm) as c:
        check(c, oracle, side_by_side(drawn))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "t5 <image>", "multi_modal_data": {}}, "as vLLM takes them"),
        ({"tokens": "t5 <image>", "multi_modal_data": {"image": []}}, "leave it out"),
        ({"tokens": "t5 <image>", "multi_modal_data": {"image": "a.png"}}, "PIL image"),
        ({"tokens": "t5 <image>", "multi_modal_data": {"video": 1}}, "leave the others out"),
        ({"tokens": "t5", "multi_modal_data": {"image": _PICTURES[0]}}, "there are 0"),
        ({"tokens": "t5 <image>"}, "each placeholder a picture"),
        ({"tokens": "<image> <image>", "multi_modal_data": {"image": _PICTURES[0]}}, "are 2"),
        (
            {"tokens": "<image> " * 41, "multi_modal_data": {"image": _PICTURES[:1] * 41}},
            "vLLM makes no prompt",
        ),
        (
            {
                "tokens": "<image> " * 40 + "t9 " * 1800,
                "multi_modal_data": {"image": _PICTURES[:1] * 40},
            },
            "context of",
        ),
    ],
)
def test_bad_pictures_are_named(llm: Any, options: dict[str, Any], message: str) -> None:
    options = dict(options)
    tokens = options.pop("tokens")
    with Choreography(llm) as c, pytest.raises(ChoreoError, match=message) as caught:
        c.prefill(tokens, **options)
    assert caught.value.parameter in ("multi_modal_data", "parents")
    with Choreography(llm) as c:  # and the engine goes on
        assert c.prefill("t5 t6").num_tokens == 2


def test_what_pictures_cannot_do_is_refused(llm: Any) -> None:
    with Choreography(llm) as c:
        (message,) = c.prefill([_call(0)])
        with pytest.raises(UnsupportedOptionError, match="as a whole"):
            c.reencode((message, 0, 12))
        with pytest.raises(UnsupportedOptionError, match="its own pictures"):
            c.reencode(message, multi_modal_data={"image": _PICTURES[0]})


def test_memory_for_pictures_is_limited(engine_slot: Callable[..., Any], tmp_path: Path) -> None:
    """A message's picture has room until it, and all that was encoded behind it, are given up."""
    size = 5 * 56 * 56 * (3 * 4 + 8) + 8  # five tiles: colours, masks, and how many they are
    settings = {"choreo": {"picture_memory_gib": 2.5 * size / 2**30}}
    llm = engine_slot(make_idefics3(tmp_path), **OPTIONS, additional_config=settings)
    with Choreography(llm) as c:
        first, second = c.prefill([_call(0), _call(1, _PICTURES[2])])
        used = c.stats()["num_picture_bytes"]
        assert used == 2 * size < c.stats()["max_picture_bytes"]
        (same,) = c.prefill([_call(0)])  # which is held already
        behind = c.prefill("t5", parents=[second])
        copy = c.reencode(first, parents=[behind])
        for needed in ([], [first, same], [second, behind]):
            c.free(*needed)
            with pytest.raises(LimitError, match="are free; free messages with pictures"):
                c.prefill([_call(2, picture(7))])
            assert c.stats()["num_picture_bytes"] == used
        # The copy was encoded behind the one whose parent shows the second picture.
        c.free(copy)
        (third,) = c.prefill([_call(2, picture(7))])
        assert c.decode(**_question(parents=[third])).num_tokens > 3
    with Choreography(llm) as c:  # whose messages were given up
        c.prefill([_call(0), _call(1, _PICTURES[2])])
