"""LlamaIndex: a chat model, function calls, embeddings, and a question over an index of documents."""

from typing import Any, Literal

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

from bench.clients.programs.checks import expect, run_checks, server

SERVER = server()
ADDRESS: dict[str, Any] = {"api_base": f"{SERVER.url}/v1", "api_key": SERVER.key}
llm = OpenAILike(
    **ADDRESS,
    model=SERVER.model,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
    max_tokens=40,
    temperature=0,
)
embedder = OpenAILikeEmbedding(**ADDRESS, model_name=SERVER.model)
MESSAGES = [ChatMessage(role="user", content="Name a fruit.")]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Weather of a city."""
    return f"Rain in {city}"


def chat() -> None:
    expect(llm.chat(MESSAGES).message.content, "no text")
    expect(llm.complete("Name a fruit.").text, "no text")


async def streamed() -> None:
    parts = [part async for part in await llm.astream_chat(MESSAGES)]
    expect(parts[-1].message.content, parts[-1])


def tools() -> None:
    called = llm.chat_with_tools(
        [FunctionTool.from_defaults(weather)], user_msg="How is the weather in Rome?", tool_required=True
    )
    expect(llm.get_tool_calls_from_response(called)[0].tool_name == "weather", called)


def embeddings() -> None:
    expect(len(embedder.get_text_embedding_batch(["a boat", "a ship"])) == 2, "no vectors")


def index() -> None:
    documents = [Document(text="The keeper found a boat."), Document(text="Bread is baked of flour.")]
    answer = VectorStoreIndex.from_documents(documents, embed_model=embedder).as_query_engine(llm=llm).query("Who found a boat?")
    expect(str(answer) and answer.source_nodes, answer)


run_checks({"chat": chat, "streamed chat": streamed, "tools": tools, "embeddings": embeddings, "question over an index": index})
