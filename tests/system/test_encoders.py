"""Runtimes with a cross-encoder of each kind and with a model as Qwen3-Reranker, and routers: scores, rankings, refusals."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from bench.frame.programs import Program, running
from phalanx_frontend.openai.embedding.judged import AFTER, BEFORE, INSTRUCTION
from tests.runtime.encoders import save_encoder
from tests.runtime.model.reference import transformer
from tests.runtime.tiny import save_classifier, save_tiny
from tests.system.runtimes import router_flags, runtime

pytestmark = pytest.mark.system
ANSWERS = {"yes": 300, "no": 301}
DOCUMENTS = ["a ship on the sea", "bread", "a boat"]


@pytest.fixture(scope="module", params=["bert", "qwen3"])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Program]]:
    """Serve an encoder, or a decoder, with a head of one label."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    folder = tmp_path_factory.mktemp("encoders")
    (folder / "token").write_text("a-service-token")
    if request.param == "bert":
        save_encoder(folder / "model", "bert", 1)
    else:
        save_classifier(folder / "model", request.param, 1)
    with runtime("runtime", folder / "model", "--dtype", "float32") as leader:
        flags = router_flags([leader], folder / "token")
        with running("router", "phalanx_router", flags, folder) as router:
            yield {"runtime": leader, "router": router}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """A model that generates, whose tokenizer has yes and no."""
    folder = tmp_path_factory.mktemp("judge")
    (folder / "token").write_text("a-service-token")
    save_tiny(folder / "model", "qwen3", max_position_embeddings=2048)
    document = json.loads((folder / "model" / "tokenizer.json").read_text())
    for word, token in ANSWERS.items():
        document["model"]["vocab"][word] = document["model"]["vocab"].pop(f"<unused{token}>")
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        document["added_tokens"].append({"id": token, "content": word, **plain})
    (folder / "model" / "tokenizer.json").write_text(json.dumps(document))
    with runtime("runtime", folder / "model", "--dtype", "float32", "--reranker", "qwen3") as program:
        yield program


def test_reranker_compares_yes_with_no(judge: Program) -> None:
    folder, scores = judge.log.parent, list[float]()
    tokenizer, model = Tokenizer.from_file(str(folder / "model" / "tokenizer.json")), transformer(folder / "model", torch.float32)
    for document in DOCUMENTS:
        asked = f"<Instruct>: {INSTRUCTION}\n<Query>: a boat\n<Document>: {document}"
        ids = tokenizer.encode(BEFORE, add_special_tokens=False).ids + tokenizer.encode(asked, add_special_tokens=False).ids
        ids += tokenizer.encode(AFTER, add_special_tokens=False).ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(float(logits[list(ANSWERS.values())].softmax(-1)[0]))
    with httpx.Client(base_url=judge.base_url, timeout=60) as client:
        answer = client.post("/v1/score", json={"text_1": "a boat", "text_2": DOCUMENTS}).json()
        assert [item["score"] for item in answer["data"]] == pytest.approx(scores, abs=1e-5)
        assert client.post("/v1/completions", json={"prompt": "once", "max_tokens": 1}).status_code == 200


def test_scored_prompt_has_the_logprobs_of_transformers(judge: Program) -> None:
    prompts = [[5, 300, 7, 7, 12], list(range(20, 60))]
    model = transformer(judge.log.parent / "model", torch.float32)
    with httpx.Client(base_url=judge.base_url, timeout=60) as client:
        body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = client.post("/v1/completions", json=body).json()
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        found = choice["logprobs"]["token_logprobs"]
        assert found[0] is None
        assert found[1:] == pytest.approx([float(row[token]) for row, token in zip(logprobs, prompt[1:], strict=True)], abs=1e-4)
    assert answer["usage"]["completion_tokens"] == 0


def expected(folder: Path) -> list[float]:
    """Returns the scores by definition."""
    import transformers

    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    auto: Any = transformers.AutoModelForSequenceClassification
    model, scores = auto.from_pretrained(folder / "model", dtype=torch.float32).eval(), list[float]()
    for document in DOCUMENTS:
        pair = tokenizer.encode("a boat", document)
        inputs = {"input_ids": torch.tensor([pair.ids])}
        if getattr(model.config, "type_vocab_size", 0):
            inputs["token_type_ids"] = torch.tensor([pair.type_ids])
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
