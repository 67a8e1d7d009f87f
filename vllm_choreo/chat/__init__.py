# SPDX-License-Identifier: Apache-2.0
"""Chats as text and as messages: their templates, and parts that are new or found; for either side.

    template        a model's template as its tokenizer runs it, and one of two texts
    turns           what the model's template writes around one turn that stands by itself
    marks           what the model's template writes around the contents of a chat
    parts           where the tokens of a rendered chat are cut
    message_table   which messages hold which tokens: least recently used go first
    matching        the parts of a chat that are known, and those to be encoded
    forecast        what all that would save on a recorded conversation, without an engine

A cut never changes a token: the parts of a chat and what follows them are its prompt, whatever the
template does. A cut at an odd place finds nothing again, and that is all that it can do.
"""
