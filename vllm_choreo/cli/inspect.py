# SPDX-License-Identifier: Apache-2.0
"""`vllm-choreo inspect`: where messages lie, and who shares their blocks.

An engine is reached from its own process only. So either a program writes what its session says of
itself, `json.dump(c.stats(), file)`, and that file is shown, or a few calls are run here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_choreo.cli.commands import Main
from vllm_choreo.errors import ChoreoError

_HEADER = ("Message", "Tokens", "At", "Blocks", "Refs", "Slots", "Used by", "Attends to")
_RIGHT = (False, True, True, False, False, True, True, False)


def command(parser: argparse.ArgumentParser) -> Main:
    """Show messages, their blocks and who shares them."""
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="JSON written by json.dump(c.stats(), file) (default: run a few calls on a model)",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="model folder or name (default: the small test model)"
    )
    return main


def main(args: argparse.Namespace) -> int:
    """Print the block map of a file, or of a few calls on a model.

    Args:
        args: `file` (a Path, or None), `model` (folder or name, or None for the small test model).

    Returns:
        The exit status, 0.

    Raises:
        ChoreoError: the file cannot be read, or is not from `c.stats()`.
    """
    stats = read_stats(args.file) if args.file else _run_example(args.model)
    print(block_map(stats))
    return 0


def read_stats(path: Path) -> dict[str, Any]:
    """Read a file of `json.dump(c.stats(), file)`.

    Raises:
        ChoreoError: the file cannot be read, or holds no block map.
    """
    try:
        stats = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ChoreoError(f"cannot be read: {error}", parameter="file", value=str(path)) from None
    messages = stats.get("messages") if isinstance(stats, dict) else None
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and "blocks" in message for message in messages
    ):
        raise ChoreoError(
            "holds no block map; write one with json.dump(c.stats(), file) in mode='choreo'",
            parameter="file",
            value=str(path),
        )
    return stats


def _run_example(model: str | None) -> dict[str, Any]:
    """Run an example: a document, two readers at different places, an answer that reads one."""
    from vllm_choreo.cli.doctor import start_engine
    from vllm_choreo.testing.models.embedded import model_folder

    folder = model_folder(model)
    print(f"Starting vLLM with {folder} …\n", flush=True)
    llm = start_engine(folder)
    from vllm import SamplingParams

    from vllm_choreo import Choreography

    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    try:
        # A model with states reads chains alone, or what is made one.
        mode = "exact" if llm.model_config.is_hybrid else "choreo"
        with Choreography(llm, mode=mode) as c:
            doc = c.prefill("The lighthouse was built in 1816. " * 6, save_as="document")
            c.prefill("You are a careful reader.", save_as="role")
            c.decode("Question:", parents=[doc], sampling_params=params, save_as="question")
            c.decode("Note:", parents=["role", doc], sampling_params=params, save_as="note")
            answer = {"parents": ["role", "question", doc], "sampling_params": params}
            c.decode("Answer:", save_as="answer", **answer)
            return c.stats()
    finally:
        llm.llm_engine.engine_core.shutdown()


def block_map(stats: Mapping[str, Any]) -> str:
    """The map as text: one row per message, and what the columns mean.

    Args:
        stats: data of `Choreography.stats`, in mode "choreo".
    """
    rows = [_HEADER, *(_row(message, stats["block_size"]) for message in stats["messages"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    used, total = stats["num_blocks"], stats.get("num_pool_blocks")
    of_pool = f" of {total - 1:,}" if total else ""
    lines += [
        "",
        f"{stats['num_messages']} messages in {used}{of_pool} blocks of {stats['block_size']} "
        f"tokens, {stats['num_evictions']} evictions so far.",
        "At: position of the first key as stored now. Refs: holders of each block, the message "
        "itself included.",
        "Slots: filled / held. Used by: calls that read it + calls that wait for it.",
    ]
    if num_window_blocks := stats.get("num_window_blocks"):
        windows = sorted({window for window in stats["windows"] if window is not None})
        lines.append(
            f"{num_window_blocks} of these blocks are of layers with windows of "
            f"{' and '.join(map(str, windows))} tokens: there a message keeps its end."
        )
    if num_states := stats.get("num_states"):
        names = [_name(m["id"]) for m in stats["messages"] if m["has_state"]]
        lines.append(
            f"{stats['num_states_used']} of {num_states:,} states; calls can begin at once behind: "
            f"{' '.join(names) or '-'}."
        )
    lines += _memory(stats)
    if any(message.get("is_copy") for message in stats["messages"]):
        lines.append(
            "(copy): a message encoded once more, after what stands under Attends to: calls in "
            "exact mode read it in place of the message."
        )
    return "\n".join(lines)


def _memory(stats: Mapping[str, Any]) -> list[str]:
    """Line for each message: its blocks by KV cache group, and bytes; none: an older file."""
    if "state_bytes" not in stats:
        return []
    kinds = ["all" if window is None else str(window) for window in stats["windows"]]
    by_group = f" by group ({' '.join(kinds)} tokens seen)" if len(kinds) > 1 else ""
    lines = ["", f"Blocks{by_group}, and bytes in one worker:"]
    for message in stats["messages"]:
        counts = " ".join(map(str, message["num_blocks_by_group"])) or "0"
        line = f"  {_name(message['id'])}: {counts}, {sum(message['bytes_by_group']):,} bytes"
        if message["state_bytes"]:
            line += f", and {message['state_bytes']:,} of its state"
        if message["host_bytes"]:
            line += f"; {message['host_bytes']:,} in host memory"
        lines.append(line)
    return lines


def _row(message: Mapping[str, Any], block_size: int) -> tuple[str, ...]:
    blocks = message["blocks"]
    filled = sum(block["num_valid_slots"] for block in blocks)
    return (
        _name(message["id"]) + (" (copy)" if message.get("is_copy") else ""),
        str(message["num_tokens"]),
        str(message["stored_position"]) if blocks else "-",
        _ranges([block["block_id"] for block in blocks]) if blocks else _absence(message),
        _counts([block["ref_cnt"] for block in blocks]),
        f"{filled}/{len(blocks) * block_size}",
        f"{message['num_readers']}+{message['num_waiting']}",
        " ".join(_name(parent) for parent in message["parents"]) or "-",
    )


def _absence(message: Mapping[str, Any]) -> str:
    if message["failure"]:
        return "failed"
    return "evicted" if message["num_tokens"] else "not yet made"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = zip(row, widths, _RIGHT, strict=True)
    return "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells).rstrip()


def _name(message_id: str) -> str:
    """Message id without its session: all messages of a map are of one tenant's, or of few."""
    return message_id.rpartition("/")[2]


def _ranges(block_ids: Sequence[int]) -> str:
    """`[4, 5, 6, 9]` -> "4-6 9"; order kept, for it is the order of the tokens."""
    runs: list[list[int]] = []
    for block_id in block_ids:
        if runs and block_id == runs[-1][-1] + 1:
            runs[-1].append(block_id)
        else:
            runs.append([block_id])
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _counts(ref_counts: Sequence[int]) -> str:
    """`[1, 1, 1]` -> "1", `[1, 2]` -> "1 2"."""
    if not ref_counts:
        return "-"
    same = len(set(ref_counts)) == 1
    return str(ref_counts[0]) if same else " ".join(map(str, ref_counts))
