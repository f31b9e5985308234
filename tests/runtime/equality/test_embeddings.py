"""Vectors of pooled requests are those of `transformers`, whatever shares their steps."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.errors import Unsupported
from phalanx_runtime.model.source import open_model
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.equality.groups import groups
from tests.runtime.equality.requests import ROOMY, assert_equal, requests
from tests.runtime.model.reference import transformer
from tests.runtime.ranks import PAGE_SIZE, Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.short_memory import ShortMemory
from tests.runtime.tiny import FAMILIES, VOCAB_SIZE, save_classifier, save_tiny

POOLINGS: tuple[wire.Pooling, ...] = get_args(wire.Pooling)
LENGTHS = (1, 2, 7, 8, 9, 40)
WHOLE = Limits(max_model_len=120, max_num_seqs=32, max_num_batched_tokens=1024)
CHUNKS = Limits(max_model_len=120, max_num_seqs=7, max_num_batched_tokens=7)
BUILD = Build(num_pages=200)
GENERIC = Build(torch.float64, num_pages=200, level="transformers")
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": None}


def pooled(prompt: Sequence[int], pooling: wire.Pooling, **more: object) -> wire.Request:
    fields: dict[str, object] = {"id": f"{pooling} {len(prompt)}", "epoch": 0, "delivered": [], **more}
    return wire.Request(prompt=list(prompt), pooling=pooling, sampling=wire.Sampling(max_tokens=0, seed=0), **fields)  # type: ignore[arg-type]


@cache
def prompts() -> list[list[int]]:
    chance = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB_SIZE, (size,), generator=chance).tolist() for size in LENGTHS]


def embedding_requests() -> list[wire.Request]:
    return [pooled(prompt, pooling) for prompt in prompts() for pooling in POOLINGS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("embeddings") / "model", "qwen2", num_hidden_layers=4)


@torch.inference_mode()
def expected(folder: Path, request: wire.Request) -> NDArray[np.float32]:
    """Returns the vector by definition, from the hidden states of `transformers`."""
    model = transformer(folder, torch.float32)
    states = model.base_model(torch.tensor([request.prompt]), use_cache=False).last_hidden_state[0]
    by_definition = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}
    vector: NDArray[np.float32] = by_definition[request.pooling or "mean"].numpy()
    return vector


@torch.inference_mode()
def expected_logits(folder: Path, prompt: Sequence[int]) -> NDArray[np.float32]:
    """Returns the logits of the classification head of `transformers`, at the last token."""
    import transformers

    auto: Any = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()
    model.config.get_text_config().pad_token_id = None  # it is a token of these prompts
    logits: NDArray[np.float32] = model(torch.tensor([list(prompt)]), use_cache=False).logits[0].numpy()
    return logits


def vector_of(answer: Served) -> NDArray[np.float32]:
    assert (answer.finish, answer.tokens) == ("stop", [])
    return np.frombuffer(answer.vector, "<f4")


def check(folder: Path, submitted: Sequence[wire.Request], answers: Sequence[Served]) -> None:
    for request, answer in zip(submitted, answers, strict=True):
        np.testing.assert_allclose(vector_of(answer), expected(folder, request), atol=2e-5, err_msg=request.id)


@pytest.mark.parametrize("limits", [WHOLE, CHUNKS], ids=["whole prompts", "chunks of 7"])
@groups
def test_vectors_are_those_of_transformers(folder: Path, pods: list[int], stages: int, limits: Limits) -> None:
    def work(runner: ModelRunner) -> tuple[list[Served], int]:
        counter = CountingRunner(runner)
        return serve(counter, embedding_requests(), limits), counter.num_chunks

    answers, num_chunks = on_ranks(folder, pods, Build(num_pages=200, stages=stages), work)
    assert (num_chunks > len(answers)) == (limits is CHUNKS), "prompts were cut"
    check(folder, embedding_requests(), answers)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_families_give_the_vectors_of_transformers(tmp_path: Path, family: str) -> None:
    folder = save_tiny(tmp_path / "model", family)
    answers = on_ranks(folder, [1], BUILD, lambda runner: serve(runner, embedding_requests(), CHUNKS))
    check(folder, embedding_requests(), answers)


@pytest.mark.parametrize("limits", [WHOLE, CHUNKS], ids=["whole prompts", "chunks of 7"])
@groups
def test_models_of_transformers_give_the_same_vectors(folder: Path, pods: list[int], stages: int, limits: Limits) -> None:
    build = replace(GENERIC, stages=stages)
    check(folder, embedding_requests(), on_ranks(folder, pods, build, lambda runner: serve(runner, embedding_requests(), limits)))


@pytest.mark.parametrize(("family", "fields"), [("gpt2", GPT2), ("mixtral", {}), ("gemma2", {})])
def test_generic_families_compute_embeddings_beside_tokens(tmp_path: Path, family: str, fields: dict[str, int]) -> None:
    folder = save_tiny(tmp_path / "model", family, **fields)
    plain = on_ranks(folder, [1], GENERIC, lambda runner: serve(runner, requests(), ROOMY))
    mixed = on_ranks(folder, [1], GENERIC, lambda runner: serve(runner, [*requests(), *embedding_requests()], CHUNKS))
    assert_equal(mixed[: len(plain)], plain)
    check(folder, embedding_requests(), mixed[len(plain) :])


def test_checkpoint_without_head_and_prefix_gives_the_same_vectors(tmp_path: Path) -> None:
    """sentence-transformers stores tied models so."""
    folder = save_tiny(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    answers = on_ranks(folder, [1], BUILD, lambda runner: serve(runner, embedding_requests(), WHOLE))
    check(folder, embedding_requests(), answers)
    for path in folder.glob("*.safetensors"):
        tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}
        save_file(tensors, path, {"format": "pt"})
    assert on_ranks(folder, [1], BUILD, lambda runner: serve(runner, embedding_requests(), WHOLE)) == answers
    compare = Build(num_pages=200, stages=2)
    check(folder, embedding_requests(), on_ranks(folder, [2], compare, lambda runner: serve(runner, embedding_requests(), WHOLE)))


@pytest.mark.parametrize("limits", [ROOMY, CHUNKS], ids=["together", "chunks of 7"])
@groups
def test_embeddings_leave_the_tokens_of_others_unchanged(folder: Path, pods: list[int], stages: int, limits: Limits) -> None:
    build = Build(torch.float64, num_pages=200, stages=stages)
    plain = on_ranks(folder, [1], Build(torch.float64, num_pages=200), lambda runner: serve(runner, requests(), ROOMY))
    embedded = embedding_requests()
    mixed = [one for pair in zip(requests(), embedded, strict=False) for one in pair] + embedded[len(requests()) :]

    def work(runner: ModelRunner) -> tuple[list[Served], bool]:
        recorder = PlanRecorder(runner)
        answers = serve(recorder, mixed, limits)
        return answers, any(0 < len(plan.draws) < len(plan.rows) for plan in recorder.plans)

    answers, shared = on_ranks(folder, pods, build, work)
    assert shared, "a step had requests of both kinds"
    assert_equal([one for one, request in zip(answers, mixed, strict=True) if request.pooling is None], plain)
    own = [(request, one) for request, one in zip(mixed, answers, strict=True) if request.pooling is not None]
    check(folder, [request for request, _ in own], [one for _, one in own])


def test_prompt_logprobs_beside_embeddings_are_unchanged(folder: Path) -> None:
    asked = requests(prompt_logprobs=2)[1:4]
    plain = on_ranks(folder, [1], BUILD, lambda runner: serve(runner, asked, ROOMY))
    mixed = on_ranks(folder, [1], BUILD, lambda runner: serve(runner, [*asked, *embedding_requests()], ROOMY))
    for one, other in zip(plain, mixed, strict=False):
        assert one.prompt_details.keys() == other.prompt_details.keys() and one.prompt_details
        for at, detail in one.prompt_details.items():
            assert detail.logprob == pytest.approx(other.prompt_details[at].logprob, abs=1e-5)
    check(folder, embedding_requests(), mixed[len(asked) :])


class PlanRecorder(CountingRunner):
    """Keeps the plans."""

    def __init__(self, inner: ModelRunner) -> None:
        super().__init__(inner)
        self.plans: list[StepPlan] = []

    def start(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().start(plan)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_preempted_embedding_starts_again(folder: Path, pooling: wire.Pooling) -> None:
    """Generating requests take the pages of an embedding that is computed a token per step."""
    sampling = wire.Sampling(max_tokens=24, seed=0)
    first = [wire.Request(id=str(i), epoch=0, prompt=[i] * PAGE_SIZE, delivered=[], sampling=sampling) for i in range(4)]
    embedded = pooled(prompts()[-1], pooling)
    limits = Limits(max_model_len=72, max_num_seqs=8, max_num_batched_tokens=64, long_prefill_tokens=1)

    def work(runner: ModelRunner) -> tuple[list[Served], list[int]]:
        recorder = PlanRecorder(runner)
        answers = serve(recorder, [*first, embedded], limits)
        row_of = [(plan, new.row) for plan in recorder.plans for new in plan.admitted if new.pooling is not None]
        return answers, [plan.starts[plan.rows.index(row)] for plan, row in row_of]

    answers, starts = on_ranks(folder, [1], Build(num_pages=14), work)
    assert len(starts) > 1, "the embedding was preempted"
    assert pooling == "last" or not any(starts)
    check(folder, [embedded], answers[len(first) :])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_only_last_token_pooling_reads_cached_pages(folder: Path, pooling: wire.Pooling) -> None:
    prompt = prompts()[-1]

    def work(runner: ModelRunner) -> list[Served]:
        narrow = Limits(max_model_len=120, max_num_seqs=1, max_num_batched_tokens=64)
        return serve(runner, [pooled(prompt, "mean"), pooled(prompt, pooling), pooled(prompt, "last")], narrow)

    answers = on_ranks(folder, [1], BUILD, work)
    cached = len(prompt) - 1
    assert [answer.cached_tokens for answer in answers] == [0, cached if pooling == "last" else 0, cached]
    assert cached > PAGE_SIZE
    check(folder, [pooled(prompt, "mean"), pooled(prompt, pooling), pooled(prompt, "last")], answers)


@pytest.mark.parametrize("operator", ["aten::addmm_", "aten::sum.dim_IntList", "aten::add.Tensor", "aten::stack"])
def test_embeddings_survive_a_step_without_memory(folder: Path, operator: str) -> None:
    """In the model, and while vectors are pooled."""

    def answers(memory: ShortMemory) -> list[Served]:
        def work(runner: ModelRunner) -> list[Served]:
            with memory:
                return serve(runner, embedding_requests(), CHUNKS)

        return on_ranks(folder, [1], BUILD, work)

    whole = ShortMemory(operator)
    check(folder, embedding_requests(), answers(whole))
    for call in (1, whole.num_calls // 2, whole.num_calls - 1):
        memory = ShortMemory(operator, call)
        check(folder, embedding_requests(), answers(memory))
        assert memory.num_raised == 1


def test_input_may_fill_the_whole_context(folder: Path) -> None:
    limits = Limits(max_model_len=40, max_num_seqs=2, max_num_batched_tokens=64)
    sizes = [pooled(prompts()[-1], "mean"), pooled([*prompts()[-1], 1], "mean"), pooled([], "mean")]
    whole, longer, empty = on_ranks(folder, [1], BUILD, lambda runner: serve(runner, sizes, limits))
    check(folder, sizes[:1], [whole])
    assert longer.refused is not None and longer.refused.code == "context_length_exceeded"
    assert empty.refused is not None and empty.refused.code == "empty_prompt"


def check_classes(folder: Path, pods: list[int], stages: int) -> None:
    submitted = [pooled(prompt, "last") for prompt in prompts()]
    build = replace(BUILD, stages=stages)
    answers = on_ranks(folder, pods, build, lambda runner: serve(runner, [*submitted, *submitted], CHUNKS))
    for request, answer in zip([*submitted, *submitted], answers, strict=True):
        np.testing.assert_allclose(vector_of(answer), expected_logits(folder, request.prompt), atol=2e-5, err_msg=request.id)


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_of_decoders_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    num_labels = 1 + FAMILIES.index(family) % 3
    check_classes(save_classifier(tmp_path, family, num_labels), [1], 1)


@groups
def test_classes_are_equal_on_several_ranks(tmp_path: Path, pods: list[int], stages: int) -> None:
    folder = save_classifier(tmp_path, "qwen3", 3, num_hidden_layers=4)
    check_classes(folder, pods, stages)


def test_classifiers_are_refused_where_tokens_are_needed(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, "llama", 2)
    with pytest.raises(Unsupported, match="generates no tokens"):
        open_model(folder)
    with pytest.raises(Unsupported, match="only the fused decoder computes classes"):
        open_model(folder, "transformers", may_classify=True)
