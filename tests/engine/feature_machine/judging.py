# SPDX-License-Identifier: Apache-2.0
"""Whether what a program came to is right: refusals, answers, and what lies in the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.engine.choreographies import LOGPROB_TOLERANCE, TIE_MARGIN
from tests.engine.feature_machine.invariants import Broken
from tests.engine.feature_machine.ledger import Ledger, Made, is_exact
from tests.engine.feature_machine.program import TENANTS, Ordinary
from tests.engine.feature_machine.shown import Shown
from tests.engine.feature_machine.truth import AnyTruth, StateTruth, Truth
from tests.engine.fp8_witness import READ_TOLERANCE, Witness
from tests.engine.oracle import Parent
from vllm_choreo.engine.kv_cache import groups_of_layers
from vllm_choreo.repair.rules import AllTokens, ByAttention, ByLayers, Reweighted, Seen

# Keys and values in the pool against the oracle's; they are of size 1.
CONTENT_TOLERANCE = 2e-3


class Judge:
    """
    Args:
        core: the engine's, in which keys and values are looked at.
        counts: what could not be judged is counted.
        shown: tokens of pictures.
        witness: compares what is read and stored in 8 bits, where the truth is one for each request
            alone (see `fp8_witness.py`); None: the truth knows it all.
    """

    def __init__(
        self,
        truth: AnyTruth,
        ledger: Ledger,
        core: Any,
        counts: Counter[str],
        shown: Shown,
        witness: Witness | None = None,
    ) -> None:
        self._witness = witness
        self._shown = shown
        self._truth = truth
        self._ledger = ledger
        self._core = core
        self._counts = counts

    def judge(self, ordinary: Sequence[tuple[Ordinary, Any]]) -> None:
        """All that was made, and ordinary requests with their outputs. Raises Broken."""
        for made in self._ledger.made:
            if made.state == "loading":
                continue
            is_known = self._ledger.resolve(made)
            if made.source is None:
                self._check_end(made)
            if is_known and made.state == "made":
                self._check_made(made)
        for request, output in ordinary:
            if self._witness is not None:
                self._check_witnessed(output, None)
                continue
            header = self._shown.tokens_of(request)
            truth = self._truth.encode(
                request.adapter, (*header, *output.outputs[0].token_ids), (), 0
            )
            _compare(output.outputs[0], truth, len(header), True, request)
        self._check_contents()

    def _check_end(self, made: Made) -> None:
        """Whether a call was refused if and only if it had to be, by an error that it may get."""
        if made.is_aborted:
            return
        allowed = made.must | made.may
        if made.error is None and made.must:
            raise Broken(f"not refused: {sorted(made.must)}", made.call)
        if made.error is not None and made.error not in allowed:
            report = (made.answer and made.answer.kv_transfer_params) or {}
            text = report.get("choreo_error", {}).get("message", "")
            raise Broken(f"refused without need: {made.error}", f"{made.call!r} {text}")

    def _check_made(self, made: Made) -> None:
        if made.source is not None:
            made.encoded = made.source.encoded
            return
        assert made.tokens is not None
        if self._witness is not None:
            if made.answer is not None:
                self._check_witnessed(made.answer, made)
                self._check_exact(made)
            return
        parents = self._read_by(made)
        if parents is None:
            self._counts["cannot be judged"] += 1
            return
        weights = None
        if isinstance(made.rule, Reweighted) and len(parents) > 1:
            weights = made.rule.weights
        made.encoded = self._truth.encode(
            made.call.adapter, made.tokens, parents, made.position, weights
        )
        if made.answer is None:
            return
        if made.is_decode:
            is_greedy = made.call.seed is None
            _compare(made.answer.outputs[0], made.encoded, len(made.header), is_greedy, made)
        if made.call.scores is not None:
            header = self._shown.as_engine(made.header)
            _compare_header(made.answer.prompt_logprobs, made.encoded, header, made)
        self._check_exact(made)

    def _check_exact(self, made: Made) -> None:
        report = (made.answer.kv_transfer_params or {}).get("choreo")
        if report and report["exact"] != is_exact(made):
            raise Broken("exact is reported wrongly", f"{made.call!r} {report}")

    def _check_witnessed(self, output: Any, made: Made | None) -> None:
        """An answer against the dense pass over what lay in the cache for it.

        The witness has compared that with what had to be stored; that it is what the call names is
        compared here. Nobody can tell of a call that was preempted, or ended by the client in an
        engine that runs ahead: it has read bytes that are not there any more.
        """
        assert self._witness is not None
        seen = self._witness.by_request.get(output.request_id)
        if seen is None or seen.is_again:
            self._counts["cannot be judged"] += 1
            return
        self._counts["judged by what was stored"] += 1
        if made is not None:
            assert made.tokens is not None
            read = [(name, stop - start, offset) for name, start, stop, offset in seen.spans]
            named = [
                (parent.id, stop - start, offset)
                for (parent, _), (start, stop, offset) in zip(made.parents, made.spans, strict=True)
            ]
            if (read, seen.new_offset) != (named, made.position):
                raise Broken("a call reads other parents, or elsewhere", f"{made.call!r}: {read}")
            if seen.tokens != made.tokens[: len(seen.tokens)]:
                raise Broken("a call has other tokens", f"{made.call!r}: {seen.tokens}")
            if not made.is_decode:
                return
        completion, num_generated = output.outputs[0], len(output.outputs[0].token_ids)
        num_header = len(made.header) if made else len(output.prompt_token_ids)
        rows = seen.logprobs[num_header - 1 :][:num_generated]
        if len(rows) < num_generated:
            raise Broken("a call has stored fewer tokens than it has read", made or output)
        is_greedy = made is None or made.call.seed is None
        _compare_rows(completion, rows, is_greedy, made or output, READ_TOLERANCE)

    def _read_by(self, made: Made) -> list[Parent] | None:
        """What a call reads; None: nobody can tell."""
        if any(parent.encoded is None for parent, _ in made.parents):
            return None
        truth, adapter, rule = self._truth, made.call.adapter, made.rule
        listed = [
            Parent(parent.encoded, offset, start, stop)
            for (parent, _), (start, stop, offset) in zip(made.parents, made.spans, strict=True)
        ]
        if made.call.exact:
            return truth.exact(adapter, listed)
        if rule is None or isinstance(rule, Reweighted):
            return listed
        if isinstance(truth, StateTruth):
            return truth.repaired(adapter, listed, self._runs(rule, made))
        assert isinstance(truth, Truth), "others are not repaired"
        if isinstance(rule, ByLayers):
            if rule.ranges == ((0, truth.num_layers),):
                return truth.repaired(adapter, listed, self._runs(AllTokens(), made))
            return truth.by_layers(adapter, listed, [range(*ends) for ends in rule.ranges])
        if isinstance(rule, ByAttention):
            if not rule.share:
                return listed
            runs = truth.runs_by_attention(
                adapter,
                made.header,
                listed,
                made.position,
                rule.share,
                self._ledger.num_unchanged(made),
            )
            if runs is None:
                return None
            self._ledger.link(made, runs)
            return truth.repaired(adapter, listed, runs)
        return truth.repaired(adapter, listed, self._runs(rule, made))

    def _runs(self, rule: Any, made: Made) -> Any:
        """What a rule has a call encode anew of its parents."""
        seen = [Seen(start, stop) for start, stop, _ in made.spans]
        return rule.runs(seen, self._ledger.limits.block_size)

    def _check_contents(self) -> None:
        """The keys and values of all messages that lie in the pool are those of the oracle.

        Of those in 8 bits the witness knows what they have to be.
        """
        store, truth = self._core.scheduler.store, self._truth
        if not isinstance(truth, Truth):
            return  # it knows texts, not keys
        runner = self._core.model_executor.driver_worker.worker
        for session in TENANTS:
            for made in self._ledger.of_session(session).values():
                message = store.find(session, made.id)
                if made.encoded is None or made.state != "made" or message is None:
                    continue
                own = message.own
                if not own.is_resident:
                    continue
                groups = groups_of_layers(self._core.scheduler.kv_cache_config)
                for layer, name in enumerate(runner.runner.layers):
                    self._check_content(made, own, layer, groups[name], runner)

    def _check_content(self, made: Made, own: Any, layer: int, group: int, runner: Any) -> None:
        """Compare a layer's keys and values, where there is no gap, with those of the oracle."""
        truth, size = self._truth, self._ledger.limits.block_size
        assert isinstance(truth, Truth)
        ids = [[block.block_id for block in of_group] for of_group in own.blocks]
        is_there = torch.tensor([bool(ids[group][n // size]) for n in range(own.num_tokens)])
        keys = truth.rotated_keys(made.encoded, layer, own.stored_position)
        for part, expected in ((0, keys), (1, made.encoded.values[layer])):
            parts = (2 * layer + part, 2 * layer + part + 1)
            data = np.frombuffer(runner.choreo_read_kv(ids, parts, 0, own.num_tokens), np.float32)
            rows = expected.transpose(0, 1).flatten(1)
            found = torch.from_numpy(data.copy()).view(rows.shape)
            if bool(is_there.any()):
                difference = float((found - rows)[is_there].abs().max())
                if not difference < CONTENT_TOLERANCE:
                    what = ("keys", "values")[part]
                    detail = f"{made.call!r}: {what} of layer {layer} by {difference:.1e}"
                    raise Broken("a message lies in the pool with other keys and values", detail)


def _compare(completion: Any, encoded: Any, num_header: int, is_greedy: bool, what: Any) -> None:
    """Generated tokens and their log-probabilities against the oracle's."""
    rows = encoded.logprobs()[num_header - 1 : -1]
    _compare_rows(completion, rows, is_greedy, what, LOGPROB_TOLERANCE)


def _compare_rows(
    completion: Any, rows: torch.Tensor, is_greedy: bool, what: Any, tolerance: float
) -> None:
    tokens, reported = completion.token_ids, completion.logprobs
    if not len(tokens) == len(reported) == len(rows):
        raise Broken("as many log-probabilities as tokens", what)
    for index, (token, row, entries) in enumerate(zip(tokens, rows, reported, strict=True)):
        if is_greedy and float(row.max() - row[token]) >= max(TIE_MARGIN, 2 * tolerance):
            detail = f"token {index} is {token}, not {int(row.argmax())}: {what!r}"
            raise Broken("an answer has another token than the oracle's", detail)
        for other, entry in entries.items():
            difference = abs(float(row[other]) - entry.logprob)
            if not difference < tolerance:
                detail = f"token {index} by {difference:.1e}: {what!r}"
                raise Broken("an answer has other log-probabilities than the oracle's", detail)


def _compare_header(reported: Any, encoded: Any, tokens: Sequence[int], made: Made) -> None:
    """Log-probabilities of a call's own tokens against the oracle's; the first one has none."""
    if reported is None or len(reported) != len(tokens) or reported[0] is not None:
        raise Broken("as many log-probabilities as own tokens, but for the first", f"{made.call!r}")
    rows = encoded.logprobs()[: len(tokens) - 1]
    for token, row, entries in zip(tokens[1:], rows, reported[1:], strict=True):
        if token not in entries or len(entries) < made.call.scores:
            raise Broken("own tokens are told their log-probabilities", f"{made.call!r}")
        for other, entry in entries.items():
            difference = abs(float(row[other]) - entry.logprob)
            if not difference < LOGPROB_TOLERANCE:
                detail = f"{token} by {difference:.1e}: {made.call!r}"
                raise Broken("a header has other log-probabilities than the oracle's", detail)
