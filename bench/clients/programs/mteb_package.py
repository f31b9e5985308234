"""`mteb`: one small task, similarities of sentence pairs that are in this file, because no data set is downloaded."""

from typing import Any

import mteb
import numpy as np
from datasets import Dataset, DatasetDict
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.abs_encoder import AbsEncoder
from openai import OpenAI

from bench.clients.programs.checks import expect, run_checks, server

SERVER = server()
PAIRS = [
    ("A man plays a guitar.", "A man is playing a guitar.", 5.0),
    ("The ship left the harbour.", "The boat sailed out of the port.", 4.0),
    ("A child eats an apple.", "A child eats a pear.", 3.0),
    ("The sun rises early.", "The night is long in winter.", 1.5),
    ("She wrote a letter.", "The bridge is made of steel.", 0.0),
    ("Two dogs run in a field.", "Bread is baked from flour.", 0.0),
]


class Pairs(AbsTaskSTS):  # type: ignore[misc]
    """A task as in mteb's guide, with its data in memory."""

    min_score, max_score = 0, 5
    metadata = TaskMetadata(
        name="Pairs",
        dataset={"path": "none/none", "revision": "1"},
        description="Similarity of sentence pairs.",
        type="STS",
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman",
    )

    def load_data(self, **_: Any) -> None:
        first, second, scores = zip(*PAIRS, strict=True)
        columns = {"sentence1": list(first), "sentence2": list(second), "score": list(scores)}
        self.dataset = DatasetDict(test=Dataset.from_dict(columns))
        self.data_loaded = True


class Served(AbsEncoder):  # type: ignore[misc]
    """Embeds with the `openai` package: mteb's own wrapper of it downloads a tokenizer of OpenAI's models."""

    def __init__(self) -> None:
        self.client = OpenAI(base_url=f"{SERVER.url}/v1", api_key=SERVER.key)

    def encode(self, inputs: Any, **_: Any) -> Any:
        texts = [text for batch in inputs for text in batch["text"]]
        answer = self.client.embeddings.create(model=SERVER.model, input=texts)
        return np.array([item.embedding for item in answer.data])


def similarity() -> None:
    result = mteb.evaluate(Served(), tasks=[Pairs()], cache=None, show_progress_bar=False)
    score = result.task_results[0].get_score()
    expect(-1 <= score <= 1, score)


run_checks({"an STS task": similarity})
