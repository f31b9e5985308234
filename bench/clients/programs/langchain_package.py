"""`langchain-openai`: chat models over chat completions and responses, tools, structured output, embeddings."""

from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

from bench.clients.programs.checks import expect, run_checks, server

SERVER = server()
ADDRESS = {"base_url": f"{SERVER.url}/v1", "api_key": SERVER.key, "model": SERVER.model}
chat = ChatOpenAI(**ADDRESS, max_tokens=80, temperature=0)
responses = ChatOpenAI(**ADDRESS, max_tokens=40, use_responses_api=True)


class Answer(BaseModel):
    """An answer."""

    fruit: Literal["apple", "pear"]
    is_sweet: bool


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Weather of a city."""
    return f"Rain in {city}"


def invoke() -> None:
    answer = chat.invoke("Name a fruit.")
    expect(answer.content and answer.usage_metadata["output_tokens"], answer)


async def streamed() -> None:
    chunks = [chunk async for chunk in chat.astream("Name a fruit.")]
    expect("".join(chunk.content for chunk in chunks), chunks)


def tools() -> None:
    answer = chat.bind_tools([tool(weather)], tool_choice="weather").invoke("How is the weather in Rome?")
    expect(answer.tool_calls[0]["args"].get("city") is not None, answer)


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        expect(isinstance(chat.with_structured_output(Answer, method=method).invoke("Name a fruit."), Answer), method)


def over_responses() -> None:
    expect(responses.invoke("Name a fruit.").text, "no text")
    expect([chunk for chunk in responses.stream("Name a fruit.") if chunk.text], "no text")


def embeddings() -> None:
    embedder = OpenAIEmbeddings(**ADDRESS, check_embedding_ctx_length=False)
    expect(len(embedder.embed_documents(["a boat", "a ship"])) == 2 and embedder.embed_query("a boat"), "no vectors")


run_checks(
    {
        "chat": invoke,
        "streamed chat": streamed,
        "tools": tools,
        "structured output": structured,
        "responses": over_responses,
        "embeddings": embeddings,
    }
)
