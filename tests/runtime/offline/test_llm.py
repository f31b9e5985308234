"""The offline engine against transformers on one rank and several; errors, restarts and shutdown."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx_runtime
from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta, KeepAlive
from phalanx_runtime import LLM, SamplingParams, llm
from phalanx_runtime.engine.backend import LocalBackend
from phalanx_runtime.errors import ModelError
from phalanx_runtime.llm import GenerationError, Prompt
from phalanx_runtime.offline.group import GroupEnded, LocalGroup
from phalanx_runtime.offline.records import CompletionOutput, StructuredOutputsParams, make_body, make_settings
from phalanx_runtime.server.supervision.supervisor import LeaderSupervisor
from tests.polling import wait_until
from tests.runtime.pods import is_alive
from tests.runtime.tiny import EOS_ID, save_tiny

ROOT = Path(__file__).parents[3]
PROMPTS = ["The king", "a", "Ünïcode, too: é", "several words that make a longer prompt"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
OPTIONS: dict[str, Any] = {"dtype": "float64", "kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 64}

SPLIT: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("offline") / "model")


@pytest.fixture(scope="module", params=["one", pytest.param("several", marks=pytest.mark.system)])  # six more starts of torch
def engines(folder: Path, request: pytest.FixtureRequest) -> Iterator[list[LLM]]:
    """One rank without and with lag; or one, two with lag, and two stages of two ranks. Their outputs are equal."""
    os.environ["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("crds", "runtime"))
    with ExitStack() as stack:
        lagged: dict[str, Any] = {"async_scheduling": True}
        options = [{}, lagged] if request.param == "one" else [{}, {"tensor_parallel_size": 2, **lagged}, SPLIT]
        yield [stack.enter_context(LLM(str(folder), **more, **OPTIONS)) for more in options]


@pytest.fixture(scope="module")
def transformer(folder: Path) -> Any:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float64).eval()


def only(output: Any) -> CompletionOutput:
    [completion] = output.outputs
    assert isinstance(completion, CompletionOutput)
    return completion


@torch.inference_mode()
def continued(transformer: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Returns the greedy tokens of transformers, up to and with the end of sequence."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens and (len(tokens) == len(prompt) or tokens[-1] != EOS_ID):
        tokens.append(int(transformer(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_outputs_are_those_of_transformers(engines: list[LLM], transformer: Any) -> None:
    for engine in engines:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.prompt for output in outputs] == PROMPTS
        assert [bytes(output.prompt_token_ids).decode() for output in outputs] == PROMPTS
        assert len({output.request_id for output in outputs}) == len(PROMPTS)
        for output in outputs:
            expected = continued(transformer, output.prompt_token_ids, 12)
            assert only(output).token_ids == expected
            assert only(output).finish_reason == ("stop" if expected[-1] == EOS_ID else "length")
            assert only(output).logprobs is None and output.prompt_logprobs is None


@torch.inference_mode()
def test_embeddings_are_mean_states_of_transformers(engines: list[LLM], transformer: Any) -> None:
    for engine in engines:
        outputs = engine.embed(PROMPTS)
        assert [bytes(output.prompt_token_ids).decode() for output in outputs] == PROMPTS
        for output in outputs:
            states = transformer.model(torch.tensor([output.prompt_token_ids]), use_cache=False).last_hidden_state[0]
            expected = torch.nn.functional.normalize(states.mean(0), dim=0)
            assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-5)
        assert engine.embed(list(b"The king"))[0].outputs == engine.embed("The king")[0].outputs
    with pytest.raises(ValueError, match="input 1 is empty"):
        engines[0].embed(["a", ""])
    assert engines[0].embed([]) == []


def test_seeds_give_equal_outputs_for_any_parallelism(engines: list[LLM]) -> None:
    several = [
        SamplingParams(seed=seed, max_tokens=10, n=3, top_k=40, presence_penalty=0.3, ignore_eos=True) for seed in range(4)
    ]
    whole = [[only_ids(output) for output in engine.generate(PROMPTS, several)] for engine in engines]
    assert all(outputs == whole[0] for outputs in whole)
    assert len({tuple(ids) for outputs in whole[0] for ids in outputs}) == 12
    alone = [SamplingParams(seed=one.seed, max_tokens=10, top_k=40, presence_penalty=0.3, ignore_eos=True) for one in several]
    first = [only(engines[0].generate(prompt, one)[0]).token_ids for prompt, one in zip(PROMPTS, alone, strict=True)]
    assert first == [outputs[0] for outputs in whole[0]]


def test_cached_prompt_tokens_are_reported(engines: list[LLM]) -> None:
    prompt = "a prompt that is sent several times, longer than a page or two of the cache"
    params_list = [
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=0.0, allowed_token_ids=[ord("x")], max_tokens=9, stop="xx"),
    ]
    for engine in engines:
        [first] = engine.generate(prompt, params_list[0])
        again = [engine.generate(prompt, params)[0] for params in params_list]
        assert first.num_cached_tokens < 16
        assert [output.num_cached_tokens for output in again] == [len(first.prompt_token_ids) // 16 * 16] * 2
        assert only(again[1]).stop_reason == "xx"


def only_ids(output: Any) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def test_prompt_may_be_ids_and_parameters_may_be_omitted(engines: list[LLM]) -> None:
    ids = list(b"The king")
    both: list[Prompt] = [ids, "The king"]
    by_ids, by_text = engines[0].generate(both, GREEDY)
    assert by_ids.prompt is None and by_ids.prompt_token_ids == by_text.prompt_token_ids
    assert only(by_ids).token_ids == only(by_text).token_ids
    [alone] = engines[0].generate(ids)
    assert 1 <= len(only(alone).token_ids) <= 16
    assert engines[0].generate([]) == []


def test_logprobs_are_those_of_transformers(engines: list[LLM], transformer: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=0, repetition_penalty=1.4, ignore_eos=True)
    for engine in engines:
        [output] = engine.generate(PROMPTS[3], params)
        completion, prompt = only(output), output.prompt_token_ids
        with torch.inference_mode():
            expected = transformer(torch.tensor([prompt + completion.token_ids]), use_cache=False).logits[0].log_softmax(-1)
        assert completion.logprobs is not None and output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for place, logprobs in enumerate(output.prompt_logprobs[1:], 1):
            assert logprobs is not None and list(logprobs) == [prompt[place]]
            assert logprobs[prompt[place]].logprob == pytest.approx(float(expected[place - 1, prompt[place]]), abs=1e-5)
        total = 0.0
        for place, (token, logprobs) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            row = expected[len(prompt) - 1 + place]
            assert set(logprobs) == {token, *row.topk(3).indices.tolist()} and next(iter(logprobs)) == token
            for id, one in logprobs.items():
                assert one.logprob == pytest.approx(float(row[id]), abs=1e-5)
                assert one.rank == 1 + int((row > row[id]).sum())
            total += logprobs[token].logprob
        assert completion.cumulative_logprob == pytest.approx(total)


def test_outputs_obey_stops_and_grammars(engines: list[LLM]) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    params_list = [
        SamplingParams(seed=1, max_tokens=60, structured_outputs=StructuredOutputsParams(json=schema)),
        SamplingParams(seed=2, max_tokens=60, structured_outputs=StructuredOutputsParams(regex="[a-c]{4}")),
        SamplingParams(seed=3, max_tokens=60, structured_outputs=StructuredOutputsParams(choice=["left", "right"])),
        SamplingParams(temperature=0.0, allowed_token_ids=[ord("x")], max_tokens=9, stop="xxx"),
        SamplingParams(
            temperature=0.0, allowed_token_ids=[ord("x")], max_tokens=9, stop=["xxx"], include_stop_str_in_output=True
        ),
        SamplingParams(temperature=0.0, logit_bias={ord("y"): 100.0}, bad_words=["yy"], max_tokens=None, stop_token_ids=[EOS_ID]),
    ]
    one, *others = ([only(output) for output in engine.generate(["a"] * len(params_list), params_list)] for engine in engines)
    for two in others:
        assert [(out.text, out.token_ids) for out in one] == [(out.text, out.token_ids) for out in two]
    json_, regex, choice, stopped, shown, long = one
    assert set(json.loads(json_.text)) == {"ok"}
    assert len(regex.text) == 4 and set(regex.text) <= set("abc")
    assert choice.text in ("left", "right")
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason, len(stopped.token_ids)) == ("", "stop", "xxx", 3)
    assert shown.text == "xxx"
    assert "y" in long.text and "yy" not in long.text


WRONG: dict[str, tuple[Any, Any, str]] = {
    "temperature": ("a", SamplingParams(temperature=-1.0), "temperature"),
    "too long": (list(range(250)) * 2, SamplingParams(), "maximum context length"),
    "empty": ([[]], SamplingParams(), "no tokens"),
    "unknown token": ([[5000]], SamplingParams(), "prompt"),
    "grammar": ("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")), "structured_outputs"),
    "bias": ("a", SamplingParams(logit_bias={5000: 1.0}), "logit_bias"),
    "two kinds": ("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", grammar="b")), "structured_outputs"),
    "ids and a text": ([1, 2, "x"], SamplingParams(), "prompts mixes token ids with"),
    "number of parameters": (["a", "b"], [SamplingParams()], "1 sampling_params for 2 prompts"),
}


@pytest.mark.parametrize(("prompts", "params", "reason"), WRONG.values(), ids=WRONG.keys())
def test_impossible_request_is_a_value_error(engines: list[LLM], prompts: Any, params: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        engines[0].generate(prompts, params)
    assert len(engines[0].generate("a", GREEDY)) == 1


def test_more_prompts_than_run_concurrently_are_all_answered(engines: list[LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "MAX_CONCURRENT", 3)
    prompts = [f"prompt {number}" for number in range(20)]
    outputs = engines[0].generate(prompts, SamplingParams(max_tokens=2, temperature=0.0))
    assert [output.prompt for output in outputs] == prompts


def test_full_queue_is_awaited_and_closed_engine_raises(folder: Path) -> None:
    with LLM(str(folder), max_num_seqs=1, max_num_queued_reqs=1, **OPTIONS) as engine:
        engine.group.backend = full = FullBackend(engine.group.backend)  # type: ignore[assignment]
        assert len(engine.generate(["a"] * 6, GREEDY)) == 6
        assert len(full.rejected) == 6
        errors: list[BaseException] = []

        def work() -> None:
            try:
                engine.group.run(asyncio.sleep(3600))
            except GroupEnded as error:
                errors.append(error)

        caller = threading.Thread(target=work, daemon=True)
        caller.start()
        time.sleep(0.1)
        engine.close()
        caller.join(30)
        assert [str(error) for error in errors] == ["the engine was closed"]


class BrokenSupervisor(LeaderSupervisor):
    async def run(self) -> None:
        await asyncio.sleep(0.2)
        raise RuntimeError("a bug")


def test_supervisor_failure_raises_its_reason(folder: Path) -> None:
    own = LocalGroup.__new__(LocalGroup)
    with pytest.raises(RuntimeError, match="a bug"):
        own.__init__(make_settings(str(folder), OPTIONS, {}), supervisor=BrokenSupervisor)  # type: ignore[misc]
    with pytest.raises(GroupEnded, match="the engine ended: a bug"):
        own.run(asyncio.sleep(1))


class FullBackend:
    """A backend that rejects the first attempt of each request with a full queue."""

    def __init__(self, inner: LocalBackend) -> None:
        self.rejected: list[str] = []
        self._inner = inner

    def assets(self) -> wire.Assets:
        return self._inner.assets()

    async def generate(self, request: wire.Request) -> AsyncGenerator[Delta | KeepAlive, None]:
        if request.id not in self.rejected:
            self.rejected.append(request.id)
            raise BackendError(429, "queue_full", "the queue is full")
        async with aclosing(self._inner.generate(request)) as deltas:
            async for delta in deltas:
                yield delta


@pytest.mark.system  # two more starts of torch
def test_lost_rank_ends_the_call_and_the_engine_recovers(folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as engine:
        [pid] = ranks_of(os.getpid())[-1:]
        timer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        timer.start()
        long = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
        with pytest.raises(GenerationError, match="rank 0 was killed"):
            for _ in range(1000):
                engine.generate(["a"] * 8, long)
        wait_until(lambda: can_generate(engine))
        ranks = ranks_of(os.getpid())
    assert not is_alive(ranks[-1])
    with pytest.raises(GenerationError, match="closed"):
        engine.generate("a", GREEDY)
    engine.close()


def can_generate(engine: LLM) -> bool:
    """Returns whether the engine has recovered from a lost rank."""
    try:
        return len(engine.generate("a", GREEDY)) == 1
    except GenerationError:
        return False


def ranks_of(pid: int) -> list[int]:
    """Returns the rank processes of this process, latest last. Ids start again at 1 after the largest."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split() if b"phalanx_runtime.rank" in words else []
            if stat and int(stat[1]) == pid:
                found.append((int(stat[19]), int(entry.name)))  # by the time of its start
        except OSError:
            continue
    return [rank for _, rank in sorted(found)]


def test_unloadable_model_raises_its_reason(tmp_path: Path) -> None:
    save = {"architectures": ["GPT2LMHeadModel"], "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(save))
    with pytest.raises(ModelError, match=r"tokenizer\.json|GPT2"):
        LLM(str(tmp_path))
    with pytest.raises(ValueError, match="no such file or folder"):
        LLM(str(tmp_path / "nothing"))


def test_options_are_flags() -> None:
    settings = make_settings(".", {"max_num_seqs": 3, "enable_prefix_caching": False, "max_model_len": None}, {}).engine
    assert (settings.max_num_seqs, settings.enable_prefix_caching, settings.max_model_len) == (3, False, None)
    assert make_settings(".", {"served_model_name": ["a", "b"]}, {}).model.served_names == ["a", "b"]
    for options, reason in (({"max_num_seqs": 0}, "max-num-seqs"), ({"nonsense": 1}, "nonsense"), ({"dtype": "int3"}, "int3")):
        with pytest.raises(ValueError, match=reason):
            make_settings(".", options, {})
    with pytest.raises(ValueError, match="one machine"):
        make_settings(".", {"nnodes": 2, "tensor_parallel_size": 2, "token_file": __file__}, {})


def test_parameters_equal_their_http_fields() -> None:
    body = make_body("a", SamplingParams(logit_bias={7: 1.0}, stop=("x", "y"), top_k=-1, structured_outputs=None))
    assert body.logit_bias == {7: 1.0} and body.stop == ["x", "y"] and body.top_k == -1
    assert body.max_tokens == 16 and body.temperature == 1.0


def test_importing_the_package_or_its_classes_loads_no_torch() -> None:
    code = (
        "import sys, phalanx_runtime; assert 'phalanx_runtime.llm' not in sys.modules; "
        "from phalanx_runtime import LLM, SamplingParams; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("crds", "runtime"))}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = phalanx_runtime.nonsense
