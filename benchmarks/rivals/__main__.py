# SPDX-License-Identifier: Apache-2.0
"""The settings in which others measure reuse apart from prefixes, over HTTP.

    python -m benchmarks.rivals permuted [--document-tokens 500] [--orders 10]
    python -m benchmarks.rivals multidoc [--documents 20] [--per-request 5] [--requests 20]
    python -m benchmarks.rivals agents   [--agents 5] [--rounds 2] [--input-tokens 1000]
    python -m benchmarks.rivals ragqa --data FILE [--limit 20]

Asked in turn: vLLM without the plugin, with its prefix cache, and a server with the plugin, as text
that is found ("exact", "choreo", cut by content). Both are started with the embedded model; or name
running ones: --stock URL, --ours URL (or one of them), with --api-key and --tokenizer, by which
texts are made of the lengths that are asked for. Lengths are for a CPU; the originals are 5,000
tokens a document (permuted), 100 documents of 3,000 (multidoc), 512 of prefix and answer (agents).
ragqa reads MuSiQue or HotpotQA from a file of yours (`questions.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.record import record, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.harness.texts import long_text
from benchmarks.rivals import layouts
from benchmarks.rivals.questions import read_questions
from benchmarks.rivals.sides import WAYS, run, sides_of
from benchmarks.rivals.tables import LAYOUTS, TABLES

KEY = "bench"
# Of each layout: its options, with their defaults.
OPTIONS: dict[str, dict[str, int]] = {
    "permuted": {
        "system_tokens": 1000, "documents": 5, "document_tokens": 500, "orders": 10,
        "max_tokens": 128,
    },
    "multidoc": {
        "system_tokens": 200, "documents": 20, "document_tokens": 500, "per_request": 5,
        "requests": 20, "max_tokens": 32,
    },
    "ragqa": {"max_tokens": 32},
    "agents": {
        "agents": 5, "rounds": 2, "input_tokens": 1000, "prefix_tokens": 512, "max_tokens": 128,
    },
}  # fmt: skip


def main(words: list[str] | None = None) -> int:
    args = _arguments(words)
    sizes = {name: getattr(args, name) for name in OPTIONS[args.layout]}
    make = _layout(args, sizes)
    with _servers(args) as (stock, ours):
        rows = run(args.layout, sides_of(stock, ours, args.ways), make, ignore_eos=True)
    name = f"rivals_{args.layout}"
    if args.answers:
        args.answers.write_text("".join(f"{row['number']} {row['side']}: {row['answer']!r}\n"
                                        for row in rows))  # fmt: skip
    for row in rows:
        del row["answer"]  # of texts that are not ours to give out
    write_csv(name, rows, **record())
    print(as_text([TABLES[name]]))
    return 0


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="layout", required=True)
    for layout in LAYOUTS:
        part = parts.add_parser(layout)
        for name, default in OPTIONS[layout].items():
            option = f"--{name.replace('_', '-')}"
            part.add_argument(option, type=int, default=default, help="default: %(default)s")
        if layout == "ragqa":
            part.add_argument("--data", type=Path, required=True, help="a file of questions")
            part.add_argument("--limit", type=int, default=20, help="of questions; 0: all")
        part.add_argument("--stock", metavar="URL", help="a running server without the plugin")
        part.add_argument("--ours", metavar="URL", help="a running server with it")
        part.add_argument("--api-key", default=KEY, help="of running servers")
        part.add_argument("--tokenizer", help="of running servers' model: a folder or a name")
        part.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
        part.add_argument("--answers", type=Path, metavar="FILE", help="write all answers there")
        part.add_argument("--max-model-len", type=int, default=8192, help="of servers started here")
        part.add_argument("--kv-cache-gib", type=int, default=2, help="of servers started here")
    return parser.parse_args(words)


def _layout(args: argparse.Namespace, sizes: dict[str, int]) -> Callable[[], layouts.Layout]:
    if args.layout == "ragqa":
        return partial(layouts.ragqa, read_questions(args.data, args.limit), **sizes)
    from transformers import AutoTokenizer

    from vllm_choreo.testing.models.embedded import embedded_model

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or embedded_model())

    @cache
    def text(num_tokens: int, seed: int) -> str:
        # Reports are of about 100 tokens, and a text up to one shorter.
        return long_text(tokenizer, num_tokens + 50, seed)

    of_name: dict[str, Any] = {
        "permuted": layouts.permuted, "multidoc": layouts.multidoc, "agents": layouts.agents,
    }  # fmt: skip
    return partial(of_name[args.layout], text, **sizes)


@contextmanager
def _servers(args: argparse.Namespace) -> Iterator[tuple[httpx.Client | None, httpx.Client | None]]:
    """Clients of a server without the plugin and of one with it: those named, or started ones."""
    with ExitStack() as stack:
        if args.stock or args.ours:
            yield _client(stack, args, args.stock), _client(stack, args, args.ours)
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield _started(stack, folder, args, False), _started(stack, folder, args, True)


def _client(stack: ExitStack, args: argparse.Namespace, url: str | None) -> httpx.Client | None:
    if not url:
        return None
    headers = {"Authorization": f"Bearer {args.api_key}"}
    return stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=3600))


def _started(
    stack: ExitStack, folder: Path, args: argparse.Namespace, has_plugin: bool
) -> httpx.Client:
    from vllm_choreo.testing.models.embedded import embedded_model
    from vllm_choreo.testing.server import start_server

    env = {"VLLM_CPU_KVCACHE_SPACE": str(args.kv_cache_gib)}
    server = stack.enter_context(
        start_server(
            embedded_model(),
            folder,
            keys=[KEY],
            env=env if has_plugin else {**env, "VLLM_PLUGINS": ""},
            plugin="choreo" if has_plugin else None,
            max_model_len=args.max_model_len,
        )
    )
    return stack.enter_context(server.client(KEY, timeout=3600))


if __name__ == "__main__":
    sys.exit(main())
