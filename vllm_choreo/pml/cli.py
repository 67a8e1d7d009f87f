# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo pml`: files of schemas and prompts checked, shown, encoded and run (docs/pml.md)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_choreo.cli.arguments import add_model
from vllm_choreo.cli.commands import Main
from vllm_choreo.cli.engine import DEFAULT_MAX_MODEL_LEN
from vllm_choreo.cli.numbers import positive
from vllm_choreo.errors import ChoreoError
from vllm_choreo.pml.language.registered import CONTEXTS
from vllm_choreo.semantics.call import MODES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM

_ACTIONS = {
    "check": "read files of schemas and prompts; errors name line and column",
    "show": "print schemas as trees, with the tokens and positions that a model gives them",
    "encode": "encode schemas in an engine, and say what that takes",
    "run": "run the prompts of files in an engine, or on a server",
}
_LAYOUTS = ("schema", "compact")


def command(parser: argparse.ArgumentParser) -> Main:
    """Prompts from schemas of reusable modules: check, show, encode and run files."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in _ACTIONS.items():
        own = actions.add_parser(name, help=text, description=text)
        own.add_argument(
            "files",
            nargs="+",
            type=Path,
            metavar="FILE",
            help="a schema, a prompt, or several of both inside <pml>",
        )
        add_model(own)
        if name in ("encode", "run"):
            own.add_argument(
                "--context",
                choices=CONTEXTS,
                default="modules",
                help="what modules are encoded behind: nothing, or the text that is always there "
                "with them (default: %(default)s)",
            )
        if name == "run":
            _add_run(own)
    return main


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=MODES, default="choreo", help="(default: %(default)s)")
    parser.add_argument(
        "--layout",
        choices=_LAYOUTS,
        help="positions: those of the schema, the default, or without gaps",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=64, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="of `vllm serve MODEL --plugin choreo` (default: own engine)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="of the server (default: VLLM_API_KEY)")


def main(args: argparse.Namespace) -> int:
    """Do what `args.action` says with `args.files`.

    Returns:
        The exit status: 1 if a file is wrong.
    """
    try:
        documents = [d for path in args.files for d in _read(path)]
    except ChoreoError as error:
        print(error, file=sys.stderr)
        return 1
    action = {"check": _check, "show": _show, "encode": _encode, "run": _run}[args.action]
    return action(args, documents)


def _read(path: Path) -> list[Any]:
    """The schemas and prompts of a file.

    Raises:
        ChoreoError: the file cannot be read or parsed; the message begins with its name.
    """
    from vllm_choreo.pml.language.markup import parse

    try:
        return list(parse(path.read_text(encoding="utf-8"), path.parent))
    except (OSError, UnicodeDecodeError, ChoreoError) as error:
        raise ChoreoError(f"{path}: {error}") from None


def _split(documents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Schemas and prompts."""
    from vllm_choreo.pml.language.tree import Schema

    schemas = [document for document in documents if isinstance(document, Schema)]
    return schemas, [document for document in documents if document not in schemas]


def _tokenizer(model: str | None) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    from vllm_choreo.testing.models.embedded import model_folder

    return AutoTokenizer.from_pretrained(model_folder(model))


def _check(args: argparse.Namespace, documents: Sequence[Any]) -> int:
    from vllm_choreo.pml.language.structure import check_documents

    tokenizer = _tokenizer(args.model) if args.model else None
    try:
        check_documents(documents, tokenizer)
    except ChoreoError as error:
        # With several files the error's line does not tell which of them is meant.
        print(": ".join((*map(str, args.files), str(error))), file=sys.stderr)
        return 1
    schemas, prompts = _split(documents)
    print(f"{_count(schemas, 'schema')}, {_count(prompts, 'prompt')}: all right")
    return 0


def _show(args: argparse.Namespace, documents: Sequence[Any]) -> int:
    from vllm_choreo.pml.language.outline import outline
    from vllm_choreo.pml.language.structure import check_documents

    schemas, _ = _split(documents)
    book = check_documents(schemas, _tokenizer(args.model))
    print("\n\n".join(outline(schema.layout) for schema in book.schemas.values()))
    return 0


def _engine(args: argparse.Namespace) -> LLM:
    from vllm_choreo.cli.engine import start_engine

    return start_engine(args.model, args.max_model_len or DEFAULT_MAX_MODEL_LEN)


def _encode(args: argparse.Namespace, documents: Sequence[Any]) -> int:
    from vllm_choreo.api.choreography import Choreography
    from vllm_choreo.pml.prompt_cache import PromptCache

    schemas, _ = _split(documents)
    llm = _engine(args)
    with Choreography(llm) as c:
        cache = PromptCache(c, llm.get_tokenizer())
        for schema in schemas:
            cache.register(schema, context=args.context)
            begun = time.perf_counter()
            cache.encode(schema.name)
            seconds = time.perf_counter() - begun
            tokens = sum(message.num_tokens for message in cache.messages(schema.name))
            print(f"\n{cache.show(schema.name)}\n")
            print(f"{tokens} tokens encoded in {seconds:.2f} s")
        stats = c.stats()
        blocks = f"{stats['num_blocks']} blocks of {stats['block_size']} tokens"
        print(f"{_count(schemas, 'schema')}: {blocks}")
    return 0


def _run(args: argparse.Namespace, documents: Sequence[Any]) -> int:
    from vllm_choreo.pml.language.structure import check_documents

    schemas, prompts = _split(documents)
    if not prompts:
        print("vllm-choreo: there is no prompt in these files", file=sys.stderr)
        return 1
    check_documents(documents)
    answers = _on_server(args, schemas, prompts) if args.server else _here(args, schemas, prompts)
    for number, answer in enumerate(answers, 1):
        usage, metrics = answer.usage, answer.message.metrics
        print(f"\n--- prompt {number} of {len(prompts)}: {prompts[number - 1].schema}")
        print(answer.text.strip())
        print(
            f"    tokens: {usage.module_tokens} of modules, {usage.argument_tokens} of arguments, "
            f"{usage.new_tokens} new; first token after {metrics.ttft * 1000:.0f} ms"
        )
    return 0


def _here(args: argparse.Namespace, schemas: Sequence[Any], prompts: Sequence[Any]) -> list[Any]:
    from vllm import SamplingParams

    from vllm_choreo.api.choreography import Choreography
    from vllm_choreo.pml.prompt_cache import PromptCache

    llm = _engine(args)
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with Choreography(llm, mode=args.mode) as c:
        cache = PromptCache(c, llm.get_tokenizer())
        for schema in schemas:
            cache.register(schema, context=args.context, encode=True)
        # One by one: the time of each is its own.
        return [cache.decode(p, layout=args.layout, sampling_params=sampling) for p in prompts]


def _on_server(
    args: argparse.Namespace, schemas: Sequence[Any], prompts: Sequence[Any]
) -> list[Any]:
    """The answers of a server. Schemas that it did not have are deleted in the end."""
    import os

    from vllm_choreo.client import ChoreoClient
    from vllm_choreo.pml.client.server_prompts import ServerPrompts

    key = args.api_key or os.environ.get("VLLM_API_KEY")
    sampling = {"temperature": 0, "max_tokens": args.max_tokens}
    with ChoreoClient(args.server, key, args.mode) as c:
        served = ServerPrompts(c)
        known = {schema["id"] for schema in served.schemas()}
        try:
            for schema in schemas:
                served.register(schema, context=args.context)
            return [served.decode(p, layout=args.layout, sampling_params=sampling) for p in prompts]
        finally:
            for schema in schemas:
                if schema.name not in known:
                    served.unregister(schema.name)


def _count(things: Sequence[Any], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
