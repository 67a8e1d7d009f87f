# SPDX-License-Identifier: Apache-2.0
"""The settings in which others measure reuse apart from prefixes, over HTTP.

    python -m benchmarks.rivals permuted [--document-tokens 500] [--orders 10]
    python -m benchmarks.rivals multidoc [--documents 20] [--per-request 5] [--requests 20]
    python -m benchmarks.rivals agents   [--agents 5] [--rounds 2] [--input-tokens 1000]
    python -m benchmarks.rivals ragqa --data FILE [--limit 20] [--passages 6] [--adapter FOLDER]
                                      [--answers FILE] [--add]

Asked in turn: vLLM without the plugin, with its prefix cache, and a server with the plugin in
several ways, cut by content: "exact", "seen" and "alone" (the contexts of mode "choreo"), "repair"
(seen, with --repair) and "adapter" (alone, pieces encoded by --adapter). Each way has an API key of
its own, so that none finds what another has sent. Both servers are started with --model; or name
running ones: --stock URL, --ours URL (or one of them), with one --api-key for each way,
--tokenizer, by which texts are made of the lengths that are asked for, and the name of a served
adapter. Lengths are for a CPU; the originals are 5,000 tokens a document (permuted), 100 documents
of 3,000 (multidoc), 512 of prefix and answer (agents). ragqa reads MuSiQue or HotpotQA from a file
of yours (`questions.py` says where there are some), over all passages of each question, or over
fewer: those that the answer rests on, and the first others. Ended in the middle, it goes on from
--answers.
With --add it asks so many questions more than the results have of that file, and adds the answers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.harness.record import read_csv, record, rows_of_others, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.texts import long_text
from benchmarks.rivals import layouts
from benchmarks.rivals.answers import AnswerFile
from benchmarks.rivals.questions import read_questions
from benchmarks.rivals.sides import WAYS, Rows, Side, count_requests, run, sides_of
from benchmarks.rivals.tables import LAYOUTS, TABLES
from vllm_choreo.trained_adapter import ModelIdentity, adapter_weights

KEY = "bench"
ADAPTER = "adapter"  # its name on servers that are started here
Servers = tuple[httpx.Client | None, Mapping[str, httpx.Client]]


def main(words: list[str] | None = None) -> int:
    args = _arguments(words)
    name = f"rivals_{args.layout}"
    about = {"data": args.data.stem} if args.layout == "ragqa" else {}
    adds = bool(about) and args.add
    others = rows_of_others(name, **about) if about else []
    known = [row for row in read_csv(name) if row["data"] == about["data"]] if adds else []

    def write(rows: Rows) -> None:
        # Without texts, which are not ours to give out.
        told = [{key: row[key] for key in row if key != "answer"} for row in rows]
        where = {"set_up": _set_up(args)} if about else {}
        where |= record() | ({} if args.stock or args.ours else {"threads": args.threads})
        measured = [{**about, **row, **where} for row in told if row["kind"] == "timed"]
        write_csv(name, [*others, *known, *measured])

    with _servers(args) as (stock, ours):
        adapter = args.adapter and (args.adapter if args.ours else ADAPTER)
        write(_measure(args, sides_of(stock, ours, args.repair, adapter), known, write))
    print(as_text([TABLES[name]]))
    return 0


def _measure(
    args: argparse.Namespace, sides: Sequence[Side], known: Rows, write: Callable[[Rows], None]
) -> Rows:
    """Ask all sides what they were not asked before; all answers but the known ones.

    Args:
        known: rows of the results that stay, of the same file of questions.
        write: is given all answers so far whenever all sides have answered.
    """
    names = [side.name for side in sides]
    asked = {row["side"] for row in known}
    if known and asked != {*names}:
        told, given = (", ".join(sorted(one)) for one in (asked, names))
        raise SystemExit(f"--add: the results have answers of {told}, not of {given}")
    if any(row["set_up"] != _set_up(args) for row in known):
        raise SystemExit(
            "--add: the results are of another model, --repair, --adapter or of other sizes; "
            "without --add they are measured anew"
        )
    num_known = len({row["number"] for row in known})
    first_number = 1 + max((int(row["number"]) for row in known), default=-1)
    sizes = {name: getattr(args, name) for name in layouts.SIZES[args.layout]}
    is_ragqa = args.layout == "ragqa"
    data = hashlib.sha256(args.data.read_bytes()).hexdigest() if is_ragqa else ""
    about = {"layout": args.layout, "sizes": sizes, "data": data, "sides": names}
    about |= {"model": args.model or sides[0].model, "repair": args.repair, "adapter": args.adapter}
    answers = AnswerFile(args.answers, about, len(sides), goes_on=is_ragqa)
    make = _layout(args, sizes, num_known + answers.num_done)
    left = count_requests(make)
    with tqdm(
        total=answers.num_done + left, initial=answers.num_done, desc=args.layout, unit="request"
    ) as bar:

        def on_answers(rows: Rows) -> None:
            answers.add(rows)
            if rows[0]["kind"] == "timed":
                firsts = {row["side"]: f"{1e3 * row['first_token_s']:.0f} ms" for row in rows}
                bar.set_postfix(firsts, refresh=False)
                bar.update()
                write(answers.rows)

        if left:
            run(args.layout, sides, make, True, on_answers, max(first_number, answers.next_number))
    return answers.rows


def _set_up(args: argparse.Namespace) -> str:
    """A digest of what answers depend on beside the question."""
    sizes = {name: getattr(args, name) for name in layouts.SIZES[args.layout]}
    adapter = args.adapter and (adapter_weights(Path(args.adapter)) or args.adapter)
    model: Any = [args.stock, args.ours]
    if not any(model):
        model = asdict(ModelIdentity.of(_model(args)))
    told = json.dumps([model, args.repair, adapter, sizes])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="layout", required=True)
    for layout in LAYOUTS:
        part = parts.add_parser(layout)
        for name, default in layouts.SIZES[layout].items():
            option = f"--{name.replace('_', '-')}"
            part.add_argument(option, type=int, default=default, help="default: %(default)s")
        if layout == "ragqa":
            part.add_argument("--data", type=Path, required=True, help="a file of questions")
            part.add_argument("--limit", type=int, default=20, help="of questions; 0: all")
            part.add_argument("--add", action="store_true", help="to what the results have of FILE")
        _add_common(part)
    args = parser.parse_args(words)
    if args.layout == "ragqa" and args.add and args.answers:
        parser.error("--add goes on from the results, --answers from its file: give one of them")
    quality = ["seen", "alone", "repair", *(["adapter"] if args.adapter else [])]
    args.ways = args.ways or (quality if args.layout == "ragqa" else ["exact", "seen", "alone"])
    return args


def _add_common(part: argparse.ArgumentParser) -> None:
    add = part.add_argument
    add("--stock", metavar="URL", help="a running server without the plugin")
    add("--ours", metavar="URL", help="a running server with it")
    add("--api-key", nargs="+", default=[KEY], help="of running servers; one for each way, or one "
        "for all, which then find what the others have sent")  # fmt: skip
    add("--tokenizer", help="of running servers' model: a folder or a name")
    add("--model", help="of servers started here; default: the embedded one")
    add("--ways", nargs="+", choices=WAYS, help="of the server with the plugin")
    add("--repair", default="first:16", metavar="RULE", help="of the way repair; default: "
        "%(default)s")  # fmt: skip
    add("--adapter", help="of the way adapter: its folder, or with --ours the name under which it "
        "is served")  # fmt: skip
    add("--answers", type=Path, metavar="FILE", help="write all answers there, as JSON lines")
    add("--max-model-len", type=int, default=8192, help="of servers started here")
    add("--kv-cache-gib", type=int, default=2, help="of servers started here")
    add("--threads", type=int, default=1, help="of each server started here; they are asked in "
        "turn, so on a quiet machine as many as it has cores")  # fmt: skip


def _layout(
    args: argparse.Namespace, sizes: dict[str, int], num_done: int
) -> Callable[[], layouts.Layout]:
    """What begins the layout anew, without the questions that were asked before."""
    if args.layout == "ragqa":
        stop = num_done + args.limit if args.add and args.limit else args.limit
        questions = read_questions(args.data, stop)[num_done:]
        return partial(layouts.ragqa, questions, **sizes)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or _model(args))

    @cache
    def text(num_tokens: int, seed: int) -> str:
        # Reports are of about 100 tokens, and a text up to one shorter.
        return long_text(tokenizer, num_tokens + 50, seed)

    of_name: dict[str, Any] = {
        "permuted": layouts.permuted, "multidoc": layouts.multidoc, "agents": layouts.agents,
    }  # fmt: skip
    return partial(of_name[args.layout], text, **sizes)


def _model(args: argparse.Namespace) -> Path:
    from vllm_choreo.testing.models.embedded import model_folder

    return Path(model_folder(args.model))


@contextmanager
def _servers(args: argparse.Namespace) -> Iterator[Servers]:
    """A client of a server without the plugin and those of one with it: named, or started ones."""
    with ExitStack() as stack:
        if args.stock or args.ours:
            stock = _client(stack, args.stock, args.api_key[0]) if args.stock else None
            keys = args.api_key * (len(args.ways) if len(args.api_key) == 1 else 1)
            if args.ours and len(keys) != len(args.ways):
                raise SystemExit(f"--api-key: give one, or {len(args.ways)}, one for each way")
            ways = zip(args.ways, keys, strict=True) if args.ours else ()
            yield stock, {way: _client(stack, args.ours, key) for way, key in ways}
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (stock,) = _started(stack, folder, args, [KEY], has_plugin=False)
        keys = [f"{KEY}-{way}" for way in args.ways]
        ours = _started(stack, folder, args, keys, has_plugin=True)
        yield stock, dict(zip(args.ways, ours, strict=True))


def _client(stack: ExitStack, url: str, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=3600))


def _started(
    stack: ExitStack, folder: Path, args: argparse.Namespace, keys: Sequence[str], has_plugin: bool
) -> list[httpx.Client]:
    """A server, and a client of it for each key."""
    from vllm_choreo.testing.server import start_server

    env = {"VLLM_CPU_KVCACHE_SPACE": str(args.kv_cache_gib), "OMP_NUM_THREADS": str(args.threads)}
    options: dict[str, Any] = {"max_model_len": args.max_model_len}
    if has_plugin and args.adapter:
        from vllm_choreo.engine.lora import engine_options

        options |= engine_options([Path(args.adapter)])
        options["lora_modules"] = f"{ADAPTER}={args.adapter}"
    server = stack.enter_context(
        start_server(
            _model(args),
            folder,
            keys=keys,
            env=env if has_plugin else {**env, "VLLM_PLUGINS": ""},
            plugin="choreo" if has_plugin else None,
            **options,
        )
    )
    return [stack.enter_context(server.client(key, timeout=3600)) for key in keys]


if __name__ == "__main__":
    sys.exit(main())
