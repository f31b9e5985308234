"""Paths of vLLM and of Cohere's client beside those of OpenAI."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from phalanx_frontend.app import NOT_SERVED
from phalanx_frontend.auth.caller import TRACED_PATHS
from phalanx_frontend.errors import OTHER_PATHS
from phalanx_frontend.openai.schemas import RerankRequest
from tests.frontend.fakes import FakeBackend
from tests.frontend.posting import client_of, post

DOCUMENTS: list[Any] = ["upon", {"text": "a time"}, "once"]
BODIES: dict[str, dict[str, Any]] = {
    "/score": {"text_1": "once", "text_2": ["upon", "a time"]},
    "/rerank": {"query": "once", "documents": DOCUMENTS, "top_n": 2},
    "/v2/rerank": {"model": "tiny", "query": "once", "documents": DOCUMENTS, "top_n": 2, "return_documents": False},
    "/classify": {"input": "once"},
}


@pytest.mark.parametrize("path", OTHER_PATHS)
async def test_other_paths_answer_like_the_first(path: str) -> None:
    answers = []
    async with client_of(FakeBackend()) as client:
        for one in (path, OTHER_PATHS[path]):
            answer = await client.post(one, json=BODIES[path])
            answers.append((answer.status_code, {**answer.json(), "id": ""}))
    assert answers[0] == answers[1] and answers[0][0] == (400 if path == "/classify" else 200)
    assert path in TRACED_PATHS


async def test_ranking_has_the_form_of_cohere() -> None:
    answer = (await post(FakeBackend(), "/v2/rerank", **BODIES["/v2/rerank"])).json()
    assert answer["id"] and answer["results"][0] == {"index": 2, "relevance_score": pytest.approx(1)}
    assert len(answer["results"]) == 2 and RerankRequest.model_validate(BODIES["/rerank"]).documents[1] == "a time"
    refused = await post(FakeBackend(), "/v2/rerank", **BODIES["/v2/rerank"], max_tokens_per_doc=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens_per_doc")


async def test_ping_and_version_are_answered() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    async with client_of(FakeBackend()) as client:
        assert (await client.get("/ping")).status_code == 200
        assert (await client.get("/version")).json() == {"version": project["version"]}


@pytest.mark.parametrize(
    "path", ["/pooling", "/load", "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/collective_rpc"]
)
async def test_paths_without_an_implementation_say_why(path: str) -> None:
    async with client_of(FakeBackend()) as client:
        for answer in (await client.get(path), await client.post(path, json={})):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "not_found") and NOT_SERVED[path] in error["message"]
