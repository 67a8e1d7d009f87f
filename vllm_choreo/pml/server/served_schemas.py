# SPDX-License-Identifier: Apache-2.0
"""The schemas of prompts that a server keeps: each tenant's own, and those of its operator.

A tenant's schemas are its own: no other one is told of them or shares what is encoded. Those of the
operator serve all tenants, and their modules are encoded once for all: as the operator's messages,
in every session that reads them. What a tenant adds to a prompt is the tenant's.
"""

from __future__ import annotations

import time
from collections import ChainMap, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vllm.logger import init_logger

from vllm_choreo.errors import ChoreoError, LimitError, NameTakenError, UnknownSchemaError
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.layout import Tokens
from vllm_choreo.pml.language.markup import parse, parse_schema
from vllm_choreo.pml.language.registered import RegisteredSchema, registered
from vllm_choreo.pml.language.schema_book import SchemaBook
from vllm_choreo.pml.language.tree import Schema
from vllm_choreo.pml.server.session_prompts import OPERATOR, SessionPrompts
from vllm_choreo.server.errors import PATH_NAME
from vllm_choreo.server.sessions import OpenSession, Sessions

if TYPE_CHECKING:
    from vllm.renderers.online_renderer import OnlineRenderer

logger = init_logger("vllm.choreo.server")

_FOREVER = 10 * 365 * 86_400.0  # in seconds


@dataclass(frozen=True)
class ServedSchema:
    """A schema, its owner, and when it was registered; `created` in seconds since 1970."""

    registered: RegisteredSchema
    is_operators: bool
    created: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        return self.registered.name


class ServedSchemas:
    """Every schema of a server.

    Args:
        sessions: open sessions of the server.
        online_renderer: vLLM's renderer, which knows the model's chat template and tokenizer.
    """

    def __init__(self, sessions: Sessions, online_renderer: OnlineRenderer) -> None:
        tokenizer = online_renderer.renderer.get_tokenizer()
        self._sessions = sessions
        self._tokens = Tokens(tokenizer)
        self._chat = ChatTemplate(tokenizer, online_renderer.chat_template)
        self._max_chars: int = sessions.config.max_tokens_per_schema * tokenizer.max_chars_per_token
        self._max_prompt_chars = sessions.max_model_len * tokenizer.max_chars_per_token
        self._operators: dict[str, RegisteredSchema] = {}
        self._own: dict[str, dict[str, RegisteredSchema]] = defaultdict(dict)
        self._about: dict[RegisteredSchema, ServedSchema] = {}
        self._prompts: WeakKeyDictionary[OpenSession, SessionPrompts] = WeakKeyDictionary()

    # -- of tenants --------------------------------------------------------------------------

    async def register(self, tenant: str, markup: str, context: str) -> ServedSchema:
        """Add a schema of a tenant; one that it has is answered as it is.

        Raises:
            PmlError: it is none; says at which line and column.
            NameTakenError: another one of this name, of the tenant or of the operator.
            LimitError: it is too large, or there are too many.
        """
        if len(markup) > self._max_chars:
            raise self._too_large(f"{len(markup)} characters")
        made = await self._sessions.work.run(tenant, self._laid_out, markup, context)
        own = self._own[tenant]
        found = own.get(made.name) or self._operators.get(made.name)
        if found is not None:
            if found.layout == made.layout and found.context == context:
                return self._about[found]
            raise NameTakenError(
                "another schema has this name: delete it, or choose another name",
                parameter="schema",
                value=made.name,
            )
        if len(own) >= (limit := self._sessions.config.max_schemas_per_tenant):
            raise LimitError(
                f"a tenant may have {limit} schemas: delete one, or raise the server's setting "
                "choreo.server.max_schemas_per_tenant",
                parameter="max_schemas_per_tenant",
                value=len(own) + 1,
            )
        own[made.name] = made
        self._about[made] = ServedSchema(made, is_operators=False)
        return self._about[made]

    def _laid_out(self, markup: str | Schema, context: str) -> RegisteredSchema:
        schema = parse_schema(markup) if isinstance(markup, str) else markup
        made = registered(schema, self._tokens, self._chat, context=context)
        if made.layout.num_tokens > self._sessions.config.max_tokens_per_schema:
            raise self._too_large(f"{made.layout.num_tokens} tokens")
        return made

    def _too_large(self, size: str) -> LimitError:
        limit = self._sessions.config.max_tokens_per_schema
        return LimitError(
            f"a schema may have {limit} tokens: divide it, or raise the server's setting "
            "choreo.server.max_tokens_per_schema",
            parameter="max_tokens_per_schema",
            value=size,
        )

    def listed(self, tenant: str) -> list[ServedSchema]:
        """Schemas that a tenant can name: the operator's first."""
        found = [*self._operators.values(), *self._own.get(tenant, {}).values()]
        return [self._about[schema] for schema in found]

    def named(self, tenant: str, name: str) -> ServedSchema:
        """Find a schema that a tenant can name.

        Raises:
            UnknownSchemaError: the tenant can name none so.
        """
        found = self._own.get(tenant, {}).get(name) or self._operators.get(name)
        if found is None:
            raise UnknownSchemaError(
                "no schema of yours has this name", parameter=PATH_NAME, value=name
            )
        return self._about[found]

    async def delete(self, tenant: str, name: str) -> None:
        """Forget a schema of a tenant, and free its messages in all sessions.

        Raises:
            UnknownSchemaError: the tenant has none of this name.
        """
        if self.named(tenant, name).is_operators:
            raise UnknownSchemaError(
                "this schema is the operator's: it is there as long as the server",
                parameter=PATH_NAME,
                value=name,
            )
        del self._about[self._own[tenant].pop(name)]
        for session, prompts in list(self._prompts.items()):
            if session.tenant == tenant:
                await prompts.forget(name)

    def of_session(self, session: OpenSession) -> SessionPrompts:
        """The prompts of a session."""
        if session not in self._prompts:
            schemas = ChainMap(self._own[session.tenant], self._operators)
            mode = session.choreography.mode
            book = SchemaBook(self._tokens, self._chat, mode, schemas)
            self._prompts[session] = SessionPrompts(
                session, book, self._operators, self._sessions.work, self._max_prompt_chars
            )
        return self._prompts[session]

    # -- of the operator ---------------------------------------------------------------------

    async def start_operators(self, files: Sequence[str]) -> None:
        """Register the schemas of files for all tenants, and encode them.

        Raises:
            ChoreoError: a file cannot be read, or holds something else.
        """
        for file in files:
            for schema in _schemas_of(file):
                made = self._laid_out(schema, "modules")
                if made.name in self._operators:
                    raise ChoreoError(f"{file}: another schema is named {made.name}")
                self._operators[made.name] = made
                self._about[made] = ServedSchema(made, is_operators=True)
        if self._operators:
            session = self._sessions.open(OPERATOR, is_limited=False, is_journalled=False)
            session.enter()  # for good
            prompts = self.of_session(session)
            for name in self._operators:
                count = await prompts.encode(name)
                logger.info("schema %s: %d messages encoded for all tenants", name, count)
                try:
                    await prompts.pin(name, ttl=_FOREVER)
                except LimitError as error:
                    logger.warning("schema %s is not pinned: %s", name, error)


def _schemas_of(file: str) -> list[Schema]:
    """The schemas of a file; its prompts are left out.

    Raises:
        ChoreoError: it cannot be read, or is none.
    """
    try:
        documents = parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ChoreoError) as error:
        raise ChoreoError(f"{file}: {error}", parameter="--choreo-schema", value=file) from None
    return [document for document in documents if isinstance(document, Schema)]
