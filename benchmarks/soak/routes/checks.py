# SPDX-License-Identifier: Apache-2.0
"""What holds of every answer, whatever was asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
from jsonschema.validators import validator_for  # type: ignore[import-untyped]

from benchmarks.soak.routes.tenant import Request, Tenant
from vllm_choreo import errors

# Of errors that vLLM, or the framework below it, answers before we are asked.
_BEFORE_US = (401, 404, 405)
_MAX_ERROR_BYTES = 4000
_TYPES = {name for name in vars(errors) if name.endswith("Error")}


class Checks:
    """
    Args:
        document: the server's own description.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._validators: dict[str, Any] = {}

    def problems(self, request: Request, answer: httpx.Response, other: Tenant) -> Iterator[str]:
        """What is wrong with an answer; `other` is who did not send the request."""
        status, content = answer.status_code, answer.content
        if status >= 500:
            yield f"status {status}"
        for secret in (other.marker, other.session, other.key):
            if secret.encode() in content and secret not in request.sent:
                yield "a word of the other tenant"
        if f"/{other.session}" in request.path and status < 400:
            yield "a foreign session is answered"
        if b"Traceback" in content or b"site-packages" in content:
            yield "what is inside the server"
        if request.path.startswith("/v1/choreo"):
            yield from self._of_ours(request, answer)

    def _of_ours(self, request: Request, answer: httpx.Response) -> Iterator[str]:
        if answer.status_code >= 400:
            yield from _of_error(answer)
        elif answer.headers["Content-Type"].startswith("text/event-stream"):
            yield from _of_events(answer.text)
        elif answer.headers["Content-Type"] == "application/json":
            validator = self._validator(request.operation)
            if validator is not None and not validator.is_valid(answer.json()):
                yield "an answer that is not as described"

    def _validator(self, operation: str) -> Any:
        """Of the answers 200 of an operation; None: nothing is said of them."""
        if operation not in self._validators:
            method, _, path = operation.partition(" ")
            described = self._document["paths"][path][method.lower()]["responses"]["200"]
            schema = described.get("content", {}).get("application/json", {}).get("schema")
            # A `$ref` is a path in the whole document.
            whole = {**schema, "components": self._document["components"]} if schema else None
            kind = validator_for(whole or {}, jsonschema.Draft202012Validator)
            self._validators[operation] = whole and kind(whole)
        return self._validators[operation]


def _of_error(answer: httpx.Response) -> Iterator[str]:
    if len(answer.content) > _MAX_ERROR_BYTES:
        yield "an error of many bytes"
    try:
        error = answer.json()["error"]
        fields = (error["message"], error["type"] in _TYPES, error["code"] == answer.status_code)
        if not all(fields):
            yield "an error that says too little"
    except (ValueError, KeyError, TypeError):
        if answer.status_code not in _BEFORE_US:
            yield "an error that is not of the documented form"


def _of_events(text: str) -> Iterator[str]:
    """A stream that was read to its end."""
    lines = [line for line in text.splitlines() if line]
    if not lines or lines[-1] != "data: [DONE]":
        yield "a stream without an end"
        return
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        if event["object"] == "error" and event["error"]["type"] not in _TYPES:
            yield "a stream's error that says too little"
