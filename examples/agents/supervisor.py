# SPDX-License-Identifier: Apache-2.0
"""LangGraph: a supervisor plans, three workers read the same documents at once, it sums up."""

from __future__ import annotations

import operator
import time
from typing import Annotated, Any, TypedDict
from uuid import UUID

from both_ways import Way, compare
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from pydantic import SecretStr

from vllm_choreo.integrations.langchain import ChatChoreo

WORKERS = {
    "clerk": "You are a clerk. You list the numbers.",
    "writer": "You are a writer. You describe the house.",
    "critic": "You are a critic. You say what is missing.",
}
SUPERVISOR = SystemMessage("You lead a clerk, a writer and a critic.")


class FirstTokens(BaseCallbackHandler):
    """How long each call took to its first token."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds
        self.started: dict[UUID, float] = {}

    def on_chat_model_start(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        self.started[run_id] = time.perf_counter()

    def on_llm_new_token(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        if run_id in self.started:
            self.seconds.append(time.perf_counter() - self.started.pop(run_id))


class Task(TypedDict):
    documents: list[HumanMessage]


class State(Task):
    plan: AIMessage
    findings: Annotated[list[AIMessage], operator.add]
    report: AIMessage


def run(way: Way) -> None:
    """A supervisor with three workers over shared documents."""
    llm = ChatChoreo(
        base_url=way.base_url, api_key=SecretStr(way.api_key), model=way.model, temperature=0,
        max_completion_tokens=way.max_tokens, streaming=True, conversations=way.conversations,
        callbacks=[FirstTokens(way.first_tokens)],
    )  # fmt: skip

    def plan(state: State) -> dict[str, Any]:
        task = HumanMessage("What is each of you to look for?")
        return {"plan": llm.invoke([SUPERVISOR, *state["documents"], task])}

    def worker(role: str) -> Any:
        def work(state: State) -> dict[str, Any]:
            read = [SystemMessage(role), *state["documents"], state["plan"]]
            return {"findings": [llm.invoke([*read, HumanMessage("Do your part.")])]}

        return work

    def report(state: State) -> dict[str, Any]:
        task = HumanMessage("Sum up what was found.")
        read = [SUPERVISOR, *state["documents"], *state["findings"]]
        return {"report": llm.invoke([*read, task])}

    graph = StateGraph(State, input_schema=Task)
    graph.add_node("plan", plan)
    graph.add_node("report", report)
    graph.add_edge(START, "plan")
    for name, role in WORKERS.items():
        graph.add_node(name, worker(role))
        graph.add_edge("plan", name)
        graph.add_edge(name, "report")
    graph.add_edge("report", END)
    documents = [HumanMessage(text) for text in way.documents()]
    state = graph.compile().invoke({"documents": documents})
    way.said += [message.text for message in (*state["findings"], state["report"])]
    llm.end_session()


if __name__ == "__main__":
    compare(run)
