# SPDX-License-Identifier: Apache-2.0
"""Agents of other frameworks as they are, over a server: client side of the wire, without vLLM.

    conversations   which messages of a chat the server has, and what it is told of the others
    openai_http     the HTTP clients that ask it, for OpenAI's SDK and all that is built on it
    langchain       `ChatChoreo`, for LangChain and LangGraph
    ag2             `choreo_config`, for AG2 (AutoGen)

Each module needs the package that it is named after, and none of them is imported with this one.
"""
