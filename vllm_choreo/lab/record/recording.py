# SPDX-License-Identifier: Apache-2.0
"""A folder of recorded runs, split by problem: the data of training.

    folder/record.json               the model, the mode, the shares; what else the recorder says
    folder/train/00000.json          a transcript, its problems, the likeliest tokens of its text
    folder/development/00004.json
    folder/test/00006.json

No problem is in two parts. A recorder that is interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from vllm_choreo.errors import ChoreoError
from vllm_choreo.files import write_text
from vllm_choreo.lab.record.likeliest import Likeliest, likeliest_of
from vllm_choreo.trained_adapter import ModelIdentity
from vllm_choreo.transcript.check import check_form
from vllm_choreo.transcript.transcript import Transcript

FORMAT = 1
FILE_NAME = "record.json"
PARTS = ("train", "development", "test")
SHARES = (0.8, 0.1, 0.1)


class _About(Struct):
    format: int
    base: Annotated[ModelIdentity, Meta(description="must have name, weights and tokenizer")]
    mode: str


class _Run(Struct):
    problems: list[str]


@dataclass(frozen=True)
class RecordedRun:
    """One recorded run.

    Attributes:
        name: name of its file, with the part.
        transcript: transcript of the run as text.
        problems: problems of the run; runs that have one in common are in the same part.
        likeliest: tokens that the text made likeliest, at every generated token; None: they were
            not recorded.
    """

    name: str
    transcript: Transcript
    problems: tuple[str, ...]
    likeliest: Likeliest | None


@dataclass(frozen=True)
class Recording:
    """All runs of a folder.

    Attributes:
        base: the model that generated.
        mode: mode of `Choreography`.
        digest: digest of all files, hexadecimal.
        parts: runs of each of `PARTS`, in the order of the files.
    """

    base: ModelIdentity
    mode: str
    digest: str
    parts: Mapping[str, tuple[RecordedRun, ...]]

    @classmethod
    def load(cls, folder: str | Path) -> Recording:
        """Read the folder of a `Recorder`.

        Raises:
            ChoreoError: it is no recorder's, a file is damaged, or two parts share a problem.
        """
        folder = Path(folder).expanduser()
        digest = blake2b(digest_size=16)
        about = _read(folder / FILE_NAME, _About, digest)
        parts = {
            part: tuple(_run(path, digest) for path in sorted((folder / part).glob("*.json")))
            for part in PARTS
        }
        _check_split(parts)
        base = ModelIdentity(
            **{name: about["base"][name] for name in ("name", "weights", "tokenizer")},
            vocabulary=about["base"].get("vocabulary", ""),
        )
        return cls(base, about["mode"], digest.hexdigest(), parts)


@dataclass
class Recorder:
    """Writer of runs into a folder.

    Args:
        folder: folder that is made, or that holds runs of before with the same arguments.
        base: the model that generates.
        mode: "baseline" or "exact" of `Choreography`, for what is generated is to be learnt.
        shares: share of the runs for each of `PARTS`.
        settings: further settings that all runs have in common, as plain data.

    Raises:
        ChoreoError: the folder holds something else.
    """

    folder: Path
    base: ModelIdentity
    mode: str = "baseline"
    shares: Sequence[float] = SHARES
    settings: Mapping[str, Any] = field(default_factory=dict)
    _parts: dict[str, str] = field(default_factory=dict, repr=False)
    _counts: list[int] = field(default_factory=lambda: [0] * len(PARTS), repr=False)

    def __post_init__(self) -> None:
        if len(self.shares) != len(PARTS) or min(self.shares) < 0 or sum(self.shares) <= 0:
            raise ChoreoError(
                f"one share for each of {PARTS} is needed, none below 0",
                parameter="shares",
                value=self.shares,
            )
        about = {
            "format": FORMAT,
            "base": asdict(self.base),
            "mode": self.mode,
            "shares": list(self.shares),
            **self.settings,
        }
        path = self.folder / FILE_NAME
        text = json.dumps(about, ensure_ascii=False, indent=1) + "\n"
        if path.exists() and path.read_text("utf-8") != text:
            raise ChoreoError(
                "the folder holds runs that were recorded otherwise: choose another, or remove it",
                parameter="out",
                value=str(self.folder),
            )
        for part in PARTS:
            _make_folder(self.folder / part)
        write_text(path, text)

    def place(self, problems: Iterable[str]) -> Path:
        """The file of the next run; it exists if the run was recorded before.

        A run goes to the part that is most behind its share, unless one of its problems is in a
        part already. Call it for all runs, in the same order each time.

        Args:
            problems: texts that tell the run's problems from all others.

        Raises:
            ChoreoError: two of them are in different parts.
        """
        problems = list(problems)
        known = {self._parts[problem] for problem in problems if problem in self._parts}
        if len(known) > 1:
            raise ChoreoError(
                "a run on problems of several parts would tell one part of another",
                parameter="problems",
                value=problems,
            )
        part = known.pop() if known else self._most_behind()
        number = sum(self._counts)
        self._counts[PARTS.index(part)] += 1
        self._parts.update(dict.fromkeys(problems, part))
        return self.folder / part / f"{number:05}.json"

    def save(
        self,
        path: Path,
        transcript: Transcript,
        problems: Iterable[str],
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a run to the file that `place` gave it; whole or not at all.

        Args:
            about: more to be saved with the run, as plain data; `vllm-choreo run` saves its "task".

        Raises:
            ChoreoError: a run in another mode, or with pictures.
        """
        if transcript.mode != self.mode:
            raise ChoreoError(
                f"runs in mode {self.mode} are recorded here",
                parameter="mode",
                value=transcript.mode,
            )
        if pictured := [step for step in transcript.steps if step.message.num_pictures]:
            raise ChoreoError(
                "records hold tokens alone, and cannot be replayed or trained on with pictures: "
                "leave pictures out of what is recorded",
                parameter="multi_modal_data",
                value=pictured[0].message.id,
            )
        found = likeliest_of(transcript)
        data = {
            **transcript.to_json(),
            **(about or {}),
            "problems": list(problems),
            "likeliest": None if found is None else found.to_json(),
        }
        write_text(path, json.dumps(data, ensure_ascii=False, indent=None) + "\n")

    def _most_behind(self) -> str:
        total, done = sum(self.shares), sum(self._counts) + 1
        missing = [
            share / total * done - count
            for share, count in zip(self.shares, self._counts, strict=True)
        ]
        return PARTS[missing.index(max(missing))]


def _run(path: Path, digest: blake2b) -> RecordedRun:
    data = _read(path, _Run, digest)
    try:
        transcript = Transcript.from_json(data)
        found = data.get("likeliest")
        likeliest = None if found is None else Likeliest.from_json(found, transcript)
    except (ValueError, TypeError) as error:
        if isinstance(error, ChoreoError):
            raise
        raise _damaged(path, error) from error
    name = f"{path.parent.name}/{path.name}"
    return RecordedRun(name, transcript, tuple(data["problems"]), likeliest)


def _read(path: Path, form: type[Struct], digest: blake2b) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        data = json.loads(content)
        check_form(data, form, "the file")
    except OSError as error:
        raise ChoreoError(
            f"cannot read {path} ({error.strerror}): give a folder of `vllm-choreo record`",
            parameter="recorded",
            value=str(path.parent),
        ) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    if path.name == FILE_NAME and data["format"] != FORMAT:
        raise _damaged(path, f"format {data['format']}, {FORMAT} is needed")
    digest.update(len(content).to_bytes(8, "little") + path.name.encode() + content)
    checked: dict[str, Any] = data
    return checked


def _check_split(parts: Mapping[str, Sequence[RecordedRun]]) -> None:
    seen: dict[str, RecordedRun] = {}
    for runs in parts.values():
        for run in runs:
            for problem in run.problems:
                other = seen.setdefault(problem, run)
                if other.name.split("/")[0] != run.name.split("/")[0]:
                    raise ChoreoError(
                        f"{other.name} and {run.name} are about the same problem, so one part "
                        "tells of another: record again",
                        parameter="recorded",
                        value=problem,
                    )


def _damaged(path: Path, reason: object) -> ChoreoError:
    return ChoreoError(
        f"{path} is not as a recorder writes it ({reason}): record again",
        parameter="recorded",
        value=str(path),
    )


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ChoreoError(f"cannot make the folder {path}: {error.strerror}") from error
