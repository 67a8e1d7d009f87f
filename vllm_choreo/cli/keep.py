# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo keep`: encode texts and save them, load them, and see what a folder holds."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_choreo.cli.commands import Main
from vllm_choreo.errors import ChoreoError

if TYPE_CHECKING:
    from vllm_choreo import Choreography
    from vllm_choreo.snapshot.storage import SnapshotFolder


def command(parser: argparse.ArgumentParser) -> Main:
    """Encode texts and save them, load them, see what a folder of them holds."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    save = actions.add_parser("save", help="encode texts, each a message, and save them")
    save.add_argument("files", nargs="+", type=Path, metavar="FILE", help="text, in UTF-8")
    save.add_argument("--to", required=True, metavar="URI", help="folder, or a URL of fsspec's")
    save.add_argument(
        "--recipes", action="store_true", help="save no keys and values: encode when read"
    )
    load = actions.add_parser("load", help="load saved messages into a new engine")
    load.add_argument("uri", metavar="URI", help="folder, or a URL of fsspec's")
    load.add_argument(
        "--on-mismatch",
        choices=("refuse", "encode", "variant"),
        default="refuse",
        help="what becomes of keys that another model made, or that are damaged; variant: takes "
        "those of other weights as they are",
    )
    load.add_argument("--ask", metavar="TEXT", help="generate after TEXT, which reads them all")
    for action in (save, load):
        action.add_argument(
            "--model", metavar="MODEL", help="folder or name (default: the small test model)"
        )
        action.add_argument("--tenant", default="", help="whose messages (default: nobody's)")
    show = actions.add_parser("show", help="what is saved, by which model; check every file")
    show.add_argument("uri", metavar="URI", help="folder, or a URL of fsspec's")
    show.add_argument(
        "--keep-key", default="", metavar="FILE", help="key of who is believed (default: yours)"
    )
    return main


def main(args: argparse.Namespace) -> int:
    """Save texts, load them, or show what a folder holds.

    Args:
        args: `action`, and its arguments.

    Returns:
        The exit status: 1 if a file that is shown is damaged.

    Raises:
        ChoreoError: a file cannot be read or written, or does not fit.
    """
    if args.action == "show":
        return _show(args.uri, args.keep_key)
    texts = [(path, _text(path)) for path in args.files] if args.action == "save" else []
    from vllm_choreo import Choreography
    from vllm_choreo.cli.doctor import start_engine
    from vllm_choreo.testing.models.embedded import model_folder

    folder = model_folder(args.model)
    print(f"Starting vLLM with {folder} …", flush=True)
    llm = start_engine(folder)
    try:
        with Choreography(llm, tenant=args.tenant) as c:
            if args.action == "save":
                _save(c, texts, args)
            else:
                _load(c, args)
    finally:
        llm.llm_engine.engine_core.shutdown()
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChoreoError(f"cannot be read: {error}", parameter="FILE", value=str(path)) from None


def _save(c: Choreography, texts: list[tuple[Path, str]], args: argparse.Namespace) -> None:
    start = time.perf_counter()
    messages = c.prefill([{"tokens": text} for _, text in texts])
    encoded = time.perf_counter()
    saved = c.save(messages, args.to, encodings=not args.recipes)
    end = time.perf_counter()
    for (path, _), message in zip(texts, messages, strict=True):
        print(f"{path}: {message.num_tokens:,} tokens as message {message.id.rpartition('/')[2]}")
    print(
        f"{saved.messages} messages of {saved.tokens:,} tokens, {saved.bytes / 1e6:,.1f} MB of "
        f"keys and values: encoded in {encoded - start:.2f} s, saved in {end - encoded:.2f} s"
    )


def _load(c: Choreography, args: argparse.Namespace) -> None:
    start = time.perf_counter()
    messages = c.load(args.uri, on_mismatch=args.on_mismatch)
    seconds = time.perf_counter() - start
    resident, num_tokens = c.stats()["num_resident_tokens"], sum(m.num_tokens for m in messages)
    print(f"{len(messages)} messages of {num_tokens:,} tokens loaded in {seconds:.2f} s;")
    print(f"{resident:,} tokens can be read at once, {num_tokens - resident:,} are encoded first")
    if args.ask:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=64)
        answer = c.decode(args.ask, parents=messages, sampling_params=params)
        print(answer.generated_text.strip())


def _show(uri: str, key_file: str) -> int:
    from vllm_choreo.snapshot.keys import own_key
    from vllm_choreo.snapshot.manifest import checked_manifest
    from vllm_choreo.snapshot.storage import SnapshotFolder

    folder = SnapshotFolder(uri, keep_key=own_key(key_file))
    manifest, is_trusted, _ = checked_manifest(folder)
    if not is_trusted:
        print("UNTRUSTED: it was saved with another key; see docs/keep.md")
    model, damaged = manifest["model"], 0
    print(f"Made by {model['name']}, {model['dtype']}; weights {model['weights'] or 'unknown'}")
    for adapter in manifest["adapters"]:
        print(f"and by adapter {adapter['name']}; weights {adapter['weights'][:32]}")
    for message in manifest["messages"]:
        entry = manifest["encodings"][message["encoding"]]
        state = _state(folder, entry)
        damaged += state.startswith("DAMAGED")
        name = message["id"].rpartition("/")[2]
        print(f"{name}: {message['num_tokens']:,} tokens, {state}; {message['text'][:40]!r}")
    if pictures := manifest.get("pictures", ()):
        states = [_file_state(folder, picture) for picture in pictures]
        damaged += sum(state.startswith("DAMAGED") for state in states)
        print(f"{len(pictures)} pictures: {', '.join(states)}")
    return 1 if damaged else 0


def _state(folder: SnapshotFolder, entry: Mapping[str, Any]) -> str:
    """Describe a message's keys and values: a recipe, damaged, or their size."""
    data = entry["data"]
    return "a recipe" if data is None else _file_state(folder, data)


def _file_state(folder: SnapshotFolder, data: Mapping[str, Any]) -> str:
    """Describe a file: damaged, or its size."""
    from vllm_choreo.errors import KeptError
    from vllm_choreo.snapshot.streams import ReadAhead

    try:
        file, size = folder.open(data["file"])
        with folder.naming(data["file"]), ReadAhead(file) as ahead:
            ahead.rest()
            is_right = (size, ahead.sha256) == (data["bytes"], data["sha256"])
    except KeptError as error:
        return f"DAMAGED: {error}"
    return f"{size / 1e6:,.1f} MB" if is_right else f"DAMAGED: {data['file']}"
