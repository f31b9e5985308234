"""A runtime with a cross-encoder, and a router in front of it: classes, scores, rankings, and what is refused."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from bench.frame.programs import Program, running
from tests.runtime.encoders import encoder, save_encoder
from tests.system.runtimes import router_flags, runtime

pytestmark = pytest.mark.system
DOCUMENTS = ["a ship on the sea", "bread", "a boat"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Program]]:
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    folder = tmp_path_factory.mktemp("encoders")
    (folder / "token").write_text("a-service-token")
    save_encoder(folder / "model", "bert", 1)
    with runtime("runtime", folder / "model", "--dtype", "float32") as leader:
        flags = router_flags([leader], folder / "token")
        with running("router", "phalanx_router", flags, folder) as router:
            yield {"runtime": leader, "router": router}


def expected(folder: Path) -> list[float]:
    """Returns the scores by definition."""
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    model, scores = encoder("bert", 1), list[float]()
    for document in DOCUMENTS:
        pair = tokenizer.encode("a boat", document)
        inputs = {"input_ids": torch.tensor([pair.ids]), "token_type_ids": torch.tensor([pair.type_ids])}
        with torch.no_grad():
            scores.append(float(model(**inputs).logits[0, 0].sigmoid()))
    return scores


@pytest.mark.parametrize("name", ["runtime", "router"])
def test_scores_are_those_of_transformers(programs: dict[str, Program], name: str) -> None:
    scores = expected(programs["runtime"].log.parent)
    with httpx.Client(base_url=programs[name].base_url, timeout=60) as client:
        body = {"text_1": "a boat", "text_2": DOCUMENTS}
        assert [item["score"] for item in client.post("/v1/score", json=body).json()["data"]] == pytest.approx(scores, abs=1e-5)
        ranked = client.post("/v1/rerank", json={"query": "a boat", "documents": DOCUMENTS}).json()["results"]
        assert [item["index"] for item in ranked] == sorted(range(3), key=lambda index: -scores[index])
        [item] = client.post("/v1/classify", json={"input": "a boat"}).json()["data"]
        assert item["label"] == "LABEL_0" and 0 <= item["probs"][0] <= 1


@pytest.mark.parametrize("name", ["runtime", "router"])
def test_tokens_and_embeddings_are_refused(programs: dict[str, Program], name: str) -> None:
    requests = [
        ("/v1/completions", {"prompt": "once", "max_tokens": 2}, "no_generation"),
        ("/v1/completions", {"prompt": "once", "max_tokens": 2, "stream": True}, "no_generation"),
        ("/v1/generate", {"prompt": "once", "max_tokens": 2}, "no_generation"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "once"}]}, "no_generation"),
        ("/v1/responses", {"input": "once"}, "no_generation"),
        ("/v1/embeddings", {"input": "once"}, "no_embeddings"),
    ]
    with httpx.Client(base_url=programs[name].base_url, timeout=60) as client:
        for path, body, code in requests:
            answer = client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), (path, answer.text)
