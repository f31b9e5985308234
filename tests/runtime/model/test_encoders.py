"""Encoders give what `transformers` gives for each text alone, whatever shares their batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from phalanx_api import wire
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.encoder.model import MAX_PADDING, padded_batches
from phalanx_runtime.rank.encoder_loading import load_encoder_rank
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.runner import ModelRunner
from phalanx_runtime.rank.step.pipeline import Pipeline
from phalanx_runtime.rank_spec import RankReady
from tests.runtime.encoders import KINDS, encoder, save_encoder
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import VOCAB_SIZE

LENGTHS = (1, 2, 7, 9, 40, 100)
TOLERANCE = 2e-6
"""Of the largest number of all vectors, in float32."""
CPU = torch.device("cpu")


def load(folder: Path, **settings: Any) -> tuple[ModelRunner, RankReady]:
    spec = with_settings(make_spec(folder), dtype="float32", **settings)
    return load_encoder_rank(spec, Pipeline(SoloCollective()), CPU, System())


def requests() -> list[wire.Request]:
    chance = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=chance).tolist() for length in LENGTHS]
    poolings: tuple[wire.Pooling, ...] = ("mean", "cls", "last")
    return [
        wire.Request(
            id=f"{pooling} {len(prompt)}",
            epoch=0,
            prompt=prompt,
            delivered=[],
            sampling=wire.Sampling(max_tokens=0, seed=0),
            pooling=pooling,
            pair_start=start,
        )
        for prompt in prompts
        for pooling in poolings
        for start in {0, len(prompt) // 2}
    ]


@torch.inference_mode()
def expected(model: Any, request: wire.Request) -> NDArray[np.float32]:
    """Returns the vector by definition, from the text alone."""
    inputs = {"input_ids": torch.tensor([request.prompt])}
    if (getattr(model.config, "type_vocab_size", None) or 0) > 1:
        types = torch.zeros_like(inputs["input_ids"])
        types[0, request.pair_start or len(request.prompt) :] = 1
        inputs["token_type_ids"] = types
    output = model(**inputs)
    if "logits" in output:
        logits: NDArray[np.float32] = output.logits[0].numpy()
        return logits
    states = output.last_hidden_state[0]
    vector: NDArray[np.float32] = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[request.pooling or ""].numpy()
    return vector


def check(model: Any, submitted: Sequence[wire.Request], answers: Sequence[Served]) -> None:
    vectors = [np.frombuffer(answer.vector, "<f4") for answer in answers]
    wanted = [expected(model, request) for request in submitted]
    np.testing.assert_allclose(np.stack(vectors), np.stack(wanted), rtol=0, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("num_labels", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(tmp_path: Path, kind: str, num_labels: int) -> None:
    folder, submitted = save_encoder(tmp_path / kind, kind, num_labels), requests()
    runner, ready = load(folder)
    limits = Limits(max_model_len=ready.max_model_len, max_num_seqs=7, max_num_batched_tokens=130, is_encoder=True)
    counter = CountingRunner(runner)
    answers = serve(counter, submitted, limits)
    check(encoder(kind, num_labels), submitted, answers)
    assert counter.num_chunks == len(submitted), "each prompt is computed in one step"
    assert ready.served.is_encoder and ready.served.embedding_size == (num_labels or 32)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert"])
def test_masked_language_models_embed_without_their_head(tmp_path: Path, kind: str) -> None:
    """Names have the prefix of the base model there."""
    import transformers

    auto: Any = transformers.AutoModelForMaskedLM
    config = encoder(kind).config
    torch.manual_seed(0)
    whole = auto.from_config(config).eval()
    save_encoder(tmp_path, kind)
    whole.save_pretrained(tmp_path)
    runner, ready = load(tmp_path)
    limits = Limits(max_model_len=ready.max_model_len, max_num_seqs=7, max_num_batched_tokens=130, is_encoder=True)
    check(whole.base_model, requests(), serve(runner, requests(), limits))


def test_requests_for_tokens_are_refused_by_name(tmp_path: Path) -> None:
    runner, ready = load(save_encoder(tmp_path, "bert"))
    request = wire.Request(id="a", epoch=0, prompt=[5], delivered=[], sampling=wire.Sampling(max_tokens=2, seed=0))
    limits = Limits(max_model_len=ready.max_model_len, max_num_seqs=7, max_num_batched_tokens=130, is_encoder=True)
    [answer] = serve(runner, [request], limits)
    assert answer.refused is not None and (answer.refused.status, answer.refused.code) == (400, "no_generation")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"quantization": "int8"}, "--quantization"),
        ({"world_size": 2}, "more than one rank"),
        ({"max_model_len": 4000}, "130 positions"),
    ],
)
def test_flags_without_meaning_are_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load(save_encoder(tmp_path, "bert"), **settings)


def test_loader_chooses_the_encoder_by_its_config(tmp_path: Path) -> None:
    spec = with_settings(make_spec(save_encoder(tmp_path / "bert", "bert")), dtype="float32")
    assert load_rank(spec, SoloCollective(), CPU, System())[1].served.is_encoder


def test_checkpoint_without_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_encoder(tmp_path, "bert", 2)
    tensors = load_file(folder / "model.safetensors")
    del tensors["classifier.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"classifier\.weight"):
        load(folder)


@pytest.mark.parametrize("lengths", [[5], [1, 100], [8, 9, 10, 10], [512] * 3 + [3] * 40, list(range(1, 90))])
def test_batches_have_little_padding(lengths: list[int]) -> None:
    batches = padded_batches(lengths)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        total = len(batch) * max(lengths[index] for index in batch)
        assert sum(lengths[index] for index in batch) >= (1 - MAX_PADDING) * total
