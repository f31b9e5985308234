"""Requirements on /v1/embeddings of every OpenAI server of Phalanx, checked with the real client."""

import base64
import math
import struct
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.frontend.openai_target import PROMPT, Target, metric, metric_reaches


async def embed(client: AsyncOpenAI, target: Target, input: Any, **fields: Any) -> list[list[float]]:
    """Returns the vectors, in order; by default through base64, which the client requests and decodes."""
    answer = await client.embeddings.create(model=target.model, input=input, **fields)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    assert (answer.object, {item.object for item in answer.data}, answer.model) == ("list", {"embedding"}, target.model)
    return [item.embedding for item in answer.data]


class EmbeddingSuite:
    """Needs a `target` fixture."""

    async def test_embedding_is_the_same_in_both_encodings(self, target: Target, client: AsyncOpenAI) -> None:
        async with target.http() as http:
            body = {"model": target.model, "input": PROMPT}
            shown = (await http.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]
            encoded = (await http.post("/v1/embeddings", json={**body, "encoding_format": "base64"})).json()
        raw = base64.b64decode(encoded["data"][0]["embedding"])
        assert list(struct.unpack(f"<{len(shown)}f", raw)) == pytest.approx(shown, abs=1e-6)
        assert (await embed(client, target, PROMPT))[0] == pytest.approx(shown, abs=1e-6)
        assert math.fsum(number**2 for number in shown) == pytest.approx(1, abs=1e-4)

    async def test_inputs_have_vectors_in_their_order(self, target: Target, client: AsyncOpenAI) -> None:
        texts = ["a", "several words", PROMPT, "a"]
        together = await embed(client, target, texts)
        for text, vector in zip(texts, together, strict=True):
            assert (await embed(client, target, text))[0] == pytest.approx(vector, abs=1e-3)
        assert together[0] == pytest.approx(together[3], abs=1e-3) and together[0] != pytest.approx(together[1], abs=1e-3)

    async def test_token_ids_have_the_vectors_of_their_text(self, target: Target, client: AsyncOpenAI) -> None:
        async with target.http() as http:
            ids = (await http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
        [of_text] = await embed(client, target, PROMPT)
        [of_ids] = await embed(client, target, ids)
        assert of_ids == pytest.approx(of_text, abs=1e-3)
        assert (await embed(client, target, [ids, ids[:2]]))[0] == pytest.approx(of_text, abs=1e-3)

    async def test_dimensions_cut_and_normalise_vectors(self, target: Target, client: AsyncOpenAI) -> None:
        [whole] = await embed(client, target, PROMPT)
        [cut] = await embed(client, target, PROMPT, dimensions=3)
        length = math.sqrt(math.fsum(number**2 for number in whole[:3]))
        assert cut == pytest.approx([number / length for number in whole[:3]], abs=1e-3)
        with pytest.raises(openai.BadRequestError) as refused:
            await embed(client, target, PROMPT, dimensions=len(whole) + 1)
        assert refused.value.param == "dimensions"

    async def test_usage_and_metrics_count_embedded_tokens(self, target: Target, client: AsyncOpenAI) -> None:
        name = f"{target.metrics_prefix}_prompt_tokens_total"
        before = await metric(target, name)
        answer = await client.embeddings.create(model=target.model, input=[[5, 6, 7], [8, 9]])
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5, 5)
        await metric_reaches(target, before + 5, name)
