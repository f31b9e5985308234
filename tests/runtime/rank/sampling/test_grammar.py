"""Constrained output matches its grammar with any model; an unusable grammar ends only its request."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx_api import wire
from phalanx_frontend.text.grammar import INDENTATION, GrammarError
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.step_plan import NewRow
from phalanx_runtime.rank.sampling import grammar as module
from phalanx_runtime.rank.sampling.grammar import RankGrammars, read_tokenizer
from phalanx_runtime.rank.sampling.logits_processors import NOTHING_LEFT
from phalanx_runtime.rank.sampling.sampler import TorchSampler
from tests.runtime.lag import lagging
from tests.runtime.rank.sampling.sampled import SampleRequest, run
from tests.runtime.ranks import Build, on_ranks
from tests.runtime.served import Served, serve
from tests.runtime.tiny import EOS_ID, VOCAB_SIZE, save_tiny, save_tokenizer

LIMITS = Limits(max_model_len=250, max_num_seqs=8, max_num_batched_tokens=64)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "b", 3, None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "minItems": 1, "maxItems": 3},
        "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False},
    },
    "required": ["name", "kind", "sizes", "inner"],
    "additionalProperties": False,
}
REGEX = r"(yes|no)-[a-f]{2,5}\.[0-9]{1,3}"
LARK = 'start: item ("," item)~0..3\nitem: /[a-z]{1,4}/ "=" NUMBER\nNUMBER: /[1-9][0-9]{0,2}/'
GRAMMARS = {
    "json": wire.Grammar("json_schema", json.dumps(SCHEMA)),
    "regex": wire.Grammar("regex", REGEX),
    "lark": wire.Grammar("lark", LARK),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("grammar") / "model")


@pytest.fixture
def grammars(tmp_path: Path) -> RankGrammars:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    return RankGrammars(partial(read_tokenizer, tmp_path, VOCAB_SIZE), VOCAB_SIZE)


def text_of(tokens: list[int]) -> str:
    """Returns the text of byte tokens, with the tokenizer's unused ids by name."""
    parts = [bytes([token]) if token < 256 else b"" if token == EOS_ID else f"<unused{token}>".encode() for token in tokens]
    return b"".join(parts).decode()


def check(kind: str, text: str) -> None:
    """Checks that the text matches the grammar."""
    if kind == "regex":
        assert re.fullmatch(REGEX, text), text
    elif kind == "lark":
        assert re.fullmatch(r"[a-z]{1,4}=[1-9][0-9]{0,2}(,[a-z]{1,4}=[1-9][0-9]{0,2}){0,3}", text), text
    else:
        check_json(json.loads(text), SCHEMA)


def check_json(value: Any, schema: dict[str, Any]) -> None:
    """Checks the keywords that SCHEMA uses."""
    if "enum" in schema:
        assert any(value == one and type(value) is type(one) for one in schema["enum"])
    match schema.get("type"):
        case "object":
            assert set(schema["required"]) <= set(value) <= set(schema["properties"])
            for name, inner in value.items():
                check_json(inner, schema["properties"][name])
        case "array":
            assert schema["minItems"] <= len(value) <= schema["maxItems"]
            for item in value:
                check_json(item, schema["items"])
        case "integer":
            assert type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            assert type(value) is str and len(value) <= schema["maxLength"]
        case "boolean":
            assert type(value) is bool


def make_request(kind: str, seed: int, temperature: float, **more: Any) -> wire.Request:
    fields: dict[str, Any] = {"stop_token_ids": [EOS_ID], "grammar": GRAMMARS[kind], **more}
    sampling = wire.Sampling(max_tokens=240, seed=seed, temperature=temperature, **fields)
    return wire.Request(id=f"{kind}-{seed}", epoch=1, prompt=[seed, 7, 9], delivered=[], sampling=sampling)


def outputs(answers: list[Served]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def test_random_model_obeys_grammars_on_one_or_two_ranks(folder: Path) -> None:
    """With and without lag."""
    requests = [make_request(kind, seed, 1.0 if seed else 0.0) for seed in range(6) for kind in GRAMMARS]
    requests += [make_request("json", 40 + seed, 0.9, top_p=0.9, repetition_penalty=1.1) for seed in range(2)]

    def served(pods: list[int]) -> list[Served]:
        return on_ranks(folder, pods, Build(num_pages=400), lambda runner: serve(runner, requests, LIMITS))

    answers = served([1])
    assert [answer.finish for answer in answers] == ["stop"] * len(requests)
    for request, answer in zip(requests, answers, strict=True):
        check(request.id.split("-")[0], text_of(answer.tokens))
    assert len({tuple(tokens) for tokens in outputs(answers)}) > len(requests) / 2, "outputs differ"
    assert outputs(served([2])) == outputs(answers)
    with lagging(1):
        assert outputs(served([1])) == outputs(answers)


def test_replayed_from_any_point_the_output_is_the_same(grammars: RankGrammars) -> None:
    for kind in GRAMMARS:
        request = SampleRequest([1, 2], make_request(kind, 3, 1.0).sampling)
        (output,), failures = run(TorchSampler(VOCAB_SIZE, grammars), [request], 240)
        assert failures == {}
        check(kind, text_of(output))
        for cut in [*range(0, len(output) - 1, 3), len(output)]:
            assert run(TorchSampler(VOCAB_SIZE, grammars), [request], 240, [output[:cut]])[0] == [output], (kind, cut)


def test_complete_grammar_ends_the_request(grammars: RankGrammars) -> None:
    sampler = TorchSampler(VOCAB_SIZE, grammars)
    sampler.admit(NewRow(0, wire.Sampling(max_tokens=9, seed=0, grammar=wire.Grammar("regex", "ab"))))
    import torch

    logits = torch.zeros(1, VOCAB_SIZE)
    first, second = sampler.sample(logits, [(0, 0)]), sampler.sample(logits, [(0, 1)])
    assert (first.tokens, first.ended) == ([ord("a")], [])
    assert (second.tokens, second.ended) == ([ord("b")], [0])


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_complete_grammar_ends_a_replay_before_min_tokens(grammars: RankGrammars, min_tokens: int) -> None:
    sampling = wire.Sampling(max_tokens=9, seed=0, temperature=0.0, min_tokens=min_tokens, grammar=wire.Grammar("regex", "(a|b)"))
    request = SampleRequest([1], msgspec.structs.replace(sampling, stop_token_ids=[EOS_ID]))
    output, failures = run(TorchSampler(VOCAB_SIZE, grammars), [request], 9)
    assert len(output[0]) == 1
    assert run(TorchSampler(VOCAB_SIZE, grammars), [request], 9, [list(output[0])]) == (output, failures) == (output, {})


def test_blanks_between_json_tokens_are_bounded(grammars: RankGrammars) -> None:
    for blanks in ("\n" + " " * INDENTATION, "\r\n" + "\t" * 10, " "):
        matcher = grammars.matcher(wire.Grammar("json_schema", '{"type": "array", "maxItems": 1, "items": {"enum": [1]}}'))
        matcher.accept([ord(letter) for letter in "[" + blanks])
        assert sorted(matcher.allowed().nonzero()[0].tolist()) == [ord("1"), ord("]")]


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "does not compile": ({"grammar": wire.Grammar("regex", "(")}, "grammar: .*unclosed group"),
    "no schema": ({"grammar": wire.Grammar("json_schema", "{")}, "grammar: the JSON schema cannot be read"),
    "nothing left": ({"allowed_token_ids": [ord("z")]}, re.escape(NOTHING_LEFT)),
}


@pytest.mark.parametrize(("more", "why"), FAILING.values(), ids=FAILING.keys())
def test_unsampleable_row_ends_only_its_request(folder: Path, more: dict[str, Any], why: str) -> None:
    requests = [make_request("regex", 0, 0.0), make_request("regex", 1, 1.0, **more), make_request("json", 2, 1.0)]
    answers = on_ranks(folder, [1], Build(), lambda runner: serve(runner, requests, LIMITS))
    bad = answers[1].refused
    assert bad is not None and (bad.status, bad.code, bad.epoch) == (400, "nothing_to_draw", 1)
    assert re.match(why, bad.message), bad.message
    assert answers[1].tokens == []
    for answer, kind in ((answers[0], "regex"), (answers[2], "json")):
        assert answer.finish == "stop"
        check(kind, text_of(answer.tokens))


def test_delivered_tokens_outside_the_grammar_fail_the_request(grammars: RankGrammars) -> None:
    request = SampleRequest([1], make_request("regex", 0, 0.0).sampling)
    _, failures = run(TorchSampler(VOCAB_SIZE, grammars), [request], 9, [[ord("q")]])
    assert "doesn't satisfy the grammar" in failures[0]


def test_missing_grammar_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    broken = RankGrammars(partial(read_tokenizer, tmp_path, 10), 10)
    with pytest.raises(GrammarError, match="tokenizer supports no grammars"):
        broken.matcher(GRAMMARS["regex"])
    _, failures = run(TorchSampler(10), [SampleRequest([1], wire.Sampling(max_tokens=3, seed=0, grammar=GRAMMARS["regex"]))], 3)
    assert "without grammars" in failures[0]


def test_a_grammar_is_compiled_once_while_it_is_kept(grammars: RankGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED_GRAMMARS", 2)
    a, b, c = (wire.Grammar("regex", letter) for letter in "abc")
    for one in (a, b, a, a, b, a):
        grammars.matcher(one)
    assert grammars.num_compiled == 2
    grammars.matcher(c)  # b was used longest ago
    grammars.matcher(a)
    assert grammars.num_compiled == 3
    grammars.matcher(b)
    assert grammars.num_compiled == 4
    assert grammars.matcher(wire.Grammar("lark", "start: /a/")).allowed()[ord("a")]


def test_grammar_in_use_is_not_compiled_again(grammars: RankGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED_GRAMMARS", 1)
    a, b = (wire.Grammar("regex", letter) for letter in "ab")
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(grammars.compile, a).result()
    for one in (b, a, b, a):
        grammars.matcher(one)
    assert grammars.num_compiled == 3, "b was evicted each time"
    assert grammars.find(a) is held and grammars.find(b) is None
    assert sorted(grammars.matcher(a).allowed().nonzero()[0].tolist()) == [ord("a")]


def test_logits_beyond_the_tokenizer_are_masked(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, 256]}))
    for vocab_size in (VOCAB_SIZE + 13, VOCAB_SIZE, VOCAB_SIZE - 40):
        wide = RankGrammars(partial(read_tokenizer, tmp_path, vocab_size), vocab_size)
        matcher = wide.matcher(wire.Grammar("regex", "a*"))
        allowed = matcher.allowed()
        assert allowed.shape == (vocab_size,)
        assert allowed.nonzero()[0].tolist() == [ord("a"), 256, EOS_ID]
        assert matcher.accept([ord("a"), 256])
