"""LangGraph: its tool loop, in which the model calls a tool, the graph runs it, and the model answers with its result."""

from typing import Any, Literal

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from bench.clients.programs.checks import expect, run_checks, server

SERVER = server()
CALLED: list[str] = []


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Weather of a city."""
    CALLED.append(city)
    return f"It rains in {city}."


TOOLS = [tool(weather)]


def model(**options: Any) -> Any:
    return ChatOpenAI(
        base_url=f"{SERVER.url}/v1", api_key=SERVER.key, model=SERVER.model, max_tokens=300, temperature=0, **options
    )


def graph(chat: Any) -> Any:
    """Returns the loop of the documentation; the first answer must call a tool, since a small model may not choose to."""
    forced, free = chat.bind_tools(TOOLS, tool_choice="any", parallel_tool_calls=False), chat

    def answer(state: Any) -> Any:
        has_result = any(isinstance(message, ToolMessage) for message in state["messages"])
        return {"messages": [(free if has_result else forced).invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("chatbot", answer)
    builder.add_node("tools", ToolNode(TOOLS))
    builder.add_edge(START, "chatbot")
    builder.add_conditional_edges("chatbot", tools_condition)
    builder.add_edge("tools", "chatbot")
    return builder.compile(checkpointer=InMemorySaver())


QUESTION = {"messages": [("user", "How is the weather in Rome?")]}


def loop(**options: Any) -> None:
    CALLED.clear()
    end = graph(model(**options)).invoke(QUESTION, {"configurable": {"thread_id": "1"}})
    kinds = [message.type for message in end["messages"]]
    calls = len(CALLED)  # of the first answer, at least one
    expect(calls and kinds == ["human", "ai", *["tool"] * calls, "ai"], kinds)
    expect(end["messages"][-1].text, end["messages"][-1])


def loop_over_responses() -> None:
    loop(use_responses_api=True)


async def streamed() -> None:
    config = {"configurable": {"thread_id": "2"}}
    parts = [part async for part in graph(model()).astream(QUESTION, config, stream_mode="messages")]
    expect({metadata["langgraph_node"] for _, metadata in parts} == {"chatbot", "tools"}, len(parts))


run_checks({"tool loop": loop, "streamed tool loop": streamed, "tool loop over responses": loop_over_responses})
