# SPDX-License-Identifier: Apache-2.0
"""LangGraph over HTTP: two specialists read one brief at once, an editor reads both.

vllm serve MODEL --plugin choreo --api-key secret
python examples/langgraph_team.py --model MODEL --api-key secret

The nodes name no messages: `ChatChoreo` finds the messages that the server has seen before.
"""

from __future__ import annotations

import argparse
import operator
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from pydantic import SecretStr

from vllm_choreo.integrations.conversations import Conversations
from vllm_choreo.integrations.langchain import ChatChoreo

BRIEF = "A village of forty houses has a green shed, a mill and no school. What is to be built?"
TEAM = {
    "mason": "You are a mason. You say what it takes to build.",
    "banker": "You are a banker. You say what it costs.",
}


class State(TypedDict):
    brief: HumanMessage
    findings: Annotated[list[AIMessage], operator.add]
    report: AIMessage


def team(llm: ChatChoreo) -> Any:
    """Graph of the specialists, who work at once, and the editor behind them."""

    def specialist(role: str) -> Any:
        def work(state: State) -> dict[str, Any]:
            task = HumanMessage("Name one thing.")
            return {"findings": [llm.invoke([SystemMessage(role), state["brief"], task])]}

        return work

    def edit(state: State) -> dict[str, Any]:
        task = HumanMessage("Sum up in one sentence.")
        # The findings are read as they were generated: they are not encoded again.
        read = [SystemMessage("You are an editor."), state["brief"], *state["findings"], task]
        return {"report": llm.invoke(read)}

    graph = StateGraph(State)
    graph.add_node("editor", edit)
    for name, role in TEAM.items():
        graph.add_node(name, specialist(role))
        graph.add_edge(START, name)
        graph.add_edge(name, "editor")
    graph.add_edge("editor", END)
    return graph.compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="secret")
    parser.add_argument("--model", required=True, help="the name by which it is served")
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()
    conversations = Conversations("choreo")
    llm = ChatChoreo(
        base_url=args.base_url, api_key=SecretStr(args.api_key), model=args.model, temperature=0,
        max_completion_tokens=args.max_tokens, conversations=conversations,
    )  # fmt: skip
    state = team(llm).invoke({"brief": HumanMessage(BRIEF), "findings": []})
    llm.end_session()
    print(f"{state['report'].text!r}\n  {conversations.encoded_tokens} tokens encoded in all")


if __name__ == "__main__":
    main()
