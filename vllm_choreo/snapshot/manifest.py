# SPDX-License-Identifier: Apache-2.0
"""`manifest.json`: the recipes of kept messages, whose they are, and where keys and values lie.

    {"sha256": of the rest, as `json.dumps(kept, sort_keys=True)` writes it,
     "hmac": of that digest, with the key of whoever has saved, see `keys.py` | null,
     "kept": {"format": 5, or 6 with pictures,
              "model": see `signature.py`,
              "tenant": digest of the tenant's name, "session": id,
              "adapters": [{"name", "number", "path", "weights": hex}],
              "traces": [{"id", "parents": [trace], "origin": trace | null}],
              "pictures": [{"name": hash, "file", "bytes", "sha256"}],
              "encodings": [{"message": id, "is_copy", "trace", "adapter": adapter | null,
                             "tokens": [int], "parents": [encoding],
                             "spans": [[start, stop, offset]], "new_offset", "exact",
                             "repaired_tokens", "weights": [temperature, scale] | null,
                             "patch": {"source": encoding, "start", "runs": [[start, stop]],
                                       "layers": [[first, stop]] | null} | null,
                             "keeps": [layer], "is_untrusted", "pictures": [[picture, start]],
                             "data": {"file", "bytes", "sha256", "stored_position",
                                      "firsts": [token]} | null}],
              "messages": [{as `wire.messages.record_json`, "parents": [[id, start, stop]],
                            "encoding"}]}}

Numbers stand for entries of the lists, and name earlier ones alone. `firsts` are the first tokens
that layers have; what was saved before there were KV cache groups of windows has all, and no such
entry. Nor are there `pictures` in what was saved before there were any; `start` is the first token
of one, below 0 where an encoding begins inside of it. A file that was damaged, or
that no save has written, is refused here, before any of it reaches the engine.

The digest tells that nothing was damaged, and anybody can make it. The keyed one tells who wrote
this: model, tenant, recipes, and by their digests keys and values.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b, sha256
from typing import Any, NamedTuple

from vllm_choreo.errors import KeptError
from vllm_choreo.snapshot.storage import MANIFEST, SnapshotFolder

FORMAT = 5
# With pictures, which whoever reads the other alone would leave out.
PICTURED_FORMAT = 6
# So that the key can serve other purposes, too.
_PURPOSE = b"vllm-choreo kept messages\0"
_RECORD = {
    "id": str,
    "position": int,
    "num_tokens": int,
    "token_ids": list,
    "text": str,
    "generated_token_ids": list,
    "generated_text": str,
    "usage": dict,
    "metrics": dict,
    "parents": list,
    "encoding": int,
}


def tenant_digest(tenant: str) -> str:
    """Digest by which a manifest names a tenant, without telling its name."""
    return blake2b(tenant.encode(), digest_size=16, person=b"choreo-keep").hexdigest()


class Manifest(NamedTuple):
    """Manifest of a folder, as it was read.

    Attributes:
        kept: the recipes and messages: the entry `kept` of the file.
        is_trusted: whether somebody with the key of the folder has written it.
        content: the bytes of the file.
    """

    kept: dict[str, Any]
    is_trusted: bool
    content: bytes


def manifest_bytes(kept: Mapping[str, Any], keep_key: bytes | None = None) -> bytes:
    """Bytes of the manifest of recipes and messages.

    Args:
        keep_key: key of whoever saves; None: the manifest will be untrusted.
    """
    digest = _digest(kept)
    keyed = None if keep_key is None else _keyed(digest, keep_key)
    return json.dumps({"sha256": digest, "hmac": keyed, "kept": kept}, ensure_ascii=False).encode()


def read_manifest(folder: SnapshotFolder) -> dict[str, Any]:
    """Read what is kept in a folder, whoever has written it; raises as `checked_manifest`."""
    return checked_manifest(folder).kept


def named_files(content: bytes) -> set[str]:
    """Names of the data files of a manifest that was not checked; none if it is no manifest, or
    names files of other folders.
    """
    try:
        names = data_files(json.loads(content)["kept"])
        for name in names:
            _check_file_name(name)
    except (ValueError, TypeError, KeyError, RecursionError):
        return set()
    return names


def checked_manifest(folder: SnapshotFolder, content: bytes | None = None) -> Manifest:
    """Read what is kept in a folder, and whether it is trusted.

    Args:
        folder: the folder.
        content: bytes of its manifest, if they have been read.

    Raises:
        UnknownKeptError: nothing is kept there.
        KeptError: the manifest is damaged, or of another format.
    """
    content = folder.manifest() if content is None else content
    try:
        found = json.loads(content)
        kept, digest = found["kept"], found["sha256"]
        if not isinstance(kept, dict) or digest != _digest(kept):
            raise ValueError("its digest is another")
        is_trusted = _is_written_with(folder.keep_key, digest, found["hmac"])
        if kept.get("format") not in (FORMAT, PICTURED_FORMAT):
            raise ValueError(f"format {kept.get('format')}, {FORMAT} is needed")
        _check(kept)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise KeptError(
            f"the manifest is damaged, or was not written by save ({error}): save again, or load "
            "another copy",
            parameter="uri",
            value=f"{folder.label}/{MANIFEST}",
        ) from None
    return Manifest(kept, is_trusted, content)


def data_files(kept: Mapping[str, Any]) -> set[str]:
    """Names of the files that hold keys and values, and pictures."""
    data = {entry["data"]["file"] for entry in kept["encodings"] if entry["data"]}
    return data | {entry["file"] for entry in kept.get("pictures", ())}


def _digest(kept: Mapping[str, Any]) -> str:
    return sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _keyed(digest: str, keep_key: bytes) -> str:
    return hmac.new(keep_key, _PURPOSE + digest.encode(), sha256).hexdigest()


def _is_written_with(keep_key: bytes | None, digest: str, keyed: object) -> bool:
    if keep_key is None or not isinstance(keyed, str):
        return False
    return hmac.compare_digest(keyed.encode(), _keyed(digest, keep_key).encode())


# -- checks: a digest tells that nothing was changed, not that it was right -----------------------


def _check(kept: Mapping[str, Any]) -> None:
    """Raise ValueError, TypeError or KeyError if the engine could not take it."""
    for trace_number, trace in enumerate(kept["traces"]):
        _texts(trace["id"])
        origin = [] if trace["origin"] is None else [trace["origin"]]
        _earlier([*trace["parents"], *origin], trace_number)
    for adapter in kept["adapters"]:
        _texts(adapter["name"], adapter["path"])
        bytes.fromhex(adapter["weights"])
        _count(adapter["number"])  # 0: another model
    for picture in kept.get("pictures", ()):
        _texts(picture["name"], picture["sha256"])
        _check_file_name(picture["file"])
        _count(picture["bytes"])
    encodings = kept["encodings"]
    for number, entry in enumerate(encodings):
        _check_encoding(entry, encodings[:number], kept)
    for message in kept["messages"]:
        for name, kind in _RECORD.items():
            if type(message[name]) is not kind:
                raise TypeError(f"{name} of a message is no {kind.__name__}")
        entry = encodings[_count(message["encoding"], most=len(encodings) - 1)]
        if message["token_ids"] != entry["tokens"] or message["num_tokens"] != len(entry["tokens"]):
            raise ValueError("a message and its encoding differ")
        if entry["is_copy"] or entry["message"] != message["id"]:
            raise ValueError("a message names an encoding that is not its own")
    _texts(kept["session"], kept["tenant"])


def _check_encoding(
    entry: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]], kept: Mapping[str, Any]
) -> None:
    tokens, spans = entry["tokens"], entry["spans"]
    _texts(entry["message"])
    _count(entry["trace"], most=len(kept["traces"]) - 1)
    if entry["adapter"] is not None:
        _count(entry["adapter"], most=len(kept["adapters"]) - 1)
    if not tokens or any(type(token) is not int or token < 0 for token in tokens):
        raise ValueError("tokens are ints from 0 on")
    _earlier(entry["parents"], len(earlier))
    for parent, (start, stop, offset) in zip(entry["parents"], spans, strict=True):
        _run(start, stop, len(earlier[parent]["tokens"]))
        _count(offset)
    _count(entry["repaired_tokens"])
    _check_weights(entry["weights"])
    patch = entry["patch"]
    if type(entry["new_offset"]) is not int or (entry["new_offset"] < 0 and patch is None):
        raise ValueError("new_offset is an int from 0 on")
    if not all(isinstance(entry[name], bool) for name in ("exact", "is_copy", "is_untrusted")):
        raise TypeError("exact, is_copy and is_untrusted are true or false")
    if patch is not None:
        _earlier([patch["source"]], len(earlier))
        if earlier[patch["source"]]["tokens"] != tokens:
            raise ValueError("a patch has the tokens of its source")
        _count(patch["start"], most=len(tokens) - 1)
        for start, stop in patch["runs"]:
            _run(start, stop, len(tokens))
        if patch["layers"] is not None:
            _check_layers(patch, earlier[patch["source"]]["keeps"])
    for picture, start in entry.get("pictures", ()):
        _count(picture, most=len(kept["pictures"]) - 1)
        if type(start) is not int or start >= len(tokens):
            raise ValueError("a picture begins among the tokens of its message")
    least = 1
    for layer in entry["keeps"]:
        least = _count(layer, least) + 1
    if entry["data"] is not None:
        _check_data(entry["data"], len(tokens))


def _check_weights(weights: Sequence[float] | None) -> None:
    """Check weights by the bounds of a call: others would fail in a worker."""
    if weights is None:
        return
    temperature, scale = weights
    if not all(type(x) is float and 0.1 <= x <= 10.0 for x in (temperature, scale)):
        raise ValueError("weights are a temperature and a scale, both from 0.1 to 10")


def _check_layers(patch: Mapping[str, Any], kept: Sequence[int]) -> None:
    """Check that a patch's layers are ranges, and begin with hidden states that are kept.

    Args:
        kept: layers whose hidden states the patch's source keeps.
    """
    ranges = patch["layers"]
    if not ranges or len(patch["runs"]) != 1:
        raise ValueError("a patch by layers has a range of them, and one run of tokens")
    least = 0
    for first, stop in ranges:
        least = _count(stop, least=_count(first, least=least) + 1) + 1
        if first and first not in kept:
            raise ValueError(f"the source of a patch does not keep what layer {first} was given")


def _check_data(data: Mapping[str, Any], num_tokens: int) -> None:
    _texts(data["sha256"])
    _check_file_name(data["file"])
    _count(data["bytes"])
    if type(data["stored_position"]) is not int:
        raise TypeError("stored_position is an int")
    for first in data.get("firsts", ()):
        _count(first, most=num_tokens - 1)


def _check_file_name(name: str) -> None:
    _texts(name)
    if "/" in name or "\0" in name or name.startswith("."):
        raise ValueError("data lies in the folder of its manifest")


def _earlier(numbers: Sequence[int], before: int) -> None:
    for number in numbers:
        _count(number, most=before - 1)


def _run(start: int, stop: int, length: int) -> None:
    _count(stop, least=_count(start) + 1, most=length)


def _count(value: int, least: int = 0, most: int = 2**62) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} where an int from {least} to {most} is needed")
    return value


def _texts(*values: object) -> None:
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{value!r} where a text is needed")
