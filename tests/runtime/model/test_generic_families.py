"""Model code of `transformers` with sinks, slopes, own attention or own positions: against `transformers`, and under every
schedule."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.generic import indexed
from phalanx_runtime.model.generic.check import find_block
from phalanx_runtime.model.generic.families import FAMILIES
from phalanx_runtime.model.generic.layers import probe_mask
from phalanx_runtime.model.generic.part import stage_layers
from phalanx_runtime.model.partition import Stage
from phalanx_runtime.model.protocol import LoadOptions
from phalanx_runtime.model.source import open_model
from tests.architectures.tiny import save_model
from tests.runtime.equality.schedules import Disturbance, compare_runs
from tests.runtime.model.equal import compare
from tests.runtime.model.reference import NUM_TOKENS, chosen_after, generate, prompts, reference
from tests.runtime.moving_engines import running_groups
from tests.runtime.moving_requests import KINDS, make_request, moved_back_and_forth, undisturbed
from tests.runtime.ranks import Build, Driver, DriverRequest, on_ranks

Models = Callable[[str], Path]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "slopes of 4 heads": ("bloom", {}),
    "slopes of 6 heads": ("bloom", {"n_head": 6, "hidden_size": 96}),
    "other slopes of 6 heads": ("mpt", {"n_heads": 6, "d_model": 96}),
    "clipped with a scale": ("mpt", {"attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.4}}),
    "shared key head": ("falcon", {}),
    "shared key heads": ("falcon", {"new_decoder_architecture": True}),
    "slopes in the logits": ("falcon", {"alibi": True, "multi_query": False, "num_kv_heads": 4}),
    "sinks and windows": ("granite_swa", {}),
    "sinks in some layers": ("mimo_v2_flash", {}),
    "unscaled local layers": ("gpt_neo", {"window_size": 9}),
    "transposed keys": ("openai-gpt", {}),
    "float32 rotation": ("codegen", {}),
    "rotation": ("gptj", {}),
    "rotation by module": ("roformer", {}),
    "rotated values": ("roformer", {"rotary_value": True}),
    "own projections": ("xglm", {}),
    "positions after padding": ("roberta", {"pad_token_id": 4, "initializer_range": 0.6}),
    "counted positions": ("bart", {"init_std": 0.6}),
    "sinusoids of counted positions": ("pegasus", {}),
    "logits of all tokens": ("trocr", {}),
    "blocks of tokens": ("llama4_text", {"attention_chunk_size": 9, "layer_types": ["chunked_attention", "full_attention"]}),
    "bias of each key": ("doge", {"sliding_window": 9, "keep_window_size": 200}),
    "choice of more blocks": ("minimax_m3_vl_text", {}),
    "choice of all blocks": ("minimax_m3_vl_text", {"index_block_size": 7, "index_topk_blocks": 8}),
    "choice of keys": ("deepseek_v32", {"index_topk": 8}),
    "choice of keys, shared": ("glm_moe_dsa", {"index_topk": 8, "index_topk_pattern": "FSF", "num_hidden_layers": 3}),
    "mask without causal flag": ("bigbird_pegasus", {}),
}
OWN_CODE = {"slopes in the logits": "sdpa"}
"""Eager Falcon adds its slopes twice."""
MECHANISMS = (
    "slopes of 6 heads",
    "sinks and windows",
    "unscaled local layers",
    "positions after padding",
    "counted positions",
    "blocks of tokens",
    "choice of all blocks",
)
SELECTING: dict[str, tuple[dict[str, int], int, str]] = {
    "minimax_m3_vl_text": (
        {"index_block_size": 5, "index_topk_blocks": 3, "index_local_blocks": 1},
        15,
        "index_topk_blocks * index_block_size",
    ),
    "qwen4_exp_text": (
        {"indexer_budget": 12, "indexer_compress_ratio": 4},
        15,
        "indexer_budget + indexer_compress_ratio - 1",
    ),
}
"""Fields, the longest request whose queries select all keys, and the name of the limit."""
GENERIC = Build(level="transformers", stages=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    def save(form: str) -> Path:
        family, changes = FORMS[form]
        return save_model(tmp_path_factory.mktemp("tiny"), family, **changes)

    return cache(save)


@pytest.mark.parametrize("form", FORMS)
def test_two_stages_give_the_tokens_of_transformers(models: Models, form: str) -> None:
    outputs = generate(models(form), [2], GENERIC, chunk=7)
    outcome = compare(reference(models(form), outputs, attention=OWN_CODE.get(form, "eager")), outputs)
    assert outcome.holds, outcome


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model_type", SELECTING)
def test_queries_select_all_keys_to_the_limit_alone(tmp_path: Path, model_type: str, ranks: int) -> None:
    """Tokens after prompts of that length equal those of `transformers`; after prompts of one token more some differ."""
    folder, limit = save_model(tmp_path / "model", model_type, **SELECTING[model_type][0]), SELECTING[model_type][1]

    def holds(size: int) -> bool:
        chance = torch.Generator().manual_seed(size)
        prompts = [torch.randint(3, 256, (size,), generator=chance).tolist() for _ in range(16)]
        requests = [DriverRequest(prompt) for prompt in prompts]
        build = Build(level="transformers")
        outputs = on_ranks(folder, [ranks], build, lambda runner: Driver(runner).generate(requests, 1, chunk=4))
        return compare([chosen_after(folder, *pair) for pair in zip(prompts, outputs, strict=True)], outputs).holds

    assert open_model(folder).max_position == limit
    assert holds(limit) and not holds(limit + 1)


@pytest.mark.parametrize("model_type", SELECTING)
def test_a_request_beyond_all_keys_is_refused(tmp_path: Path, model_type: str) -> None:
    fields, limit, name = SELECTING[model_type]
    save_model(tmp_path, model_type, **fields)
    options = LoadOptions(dtype=torch.float32, device=torch.device("cpu"), kernels=Build().kernels, positions=limit + 1)
    message = (
        f"max_model_len {limit + 1} is more than the {limit} keys that a query selects ({name}), and the runtime chooses none"
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        open_model(tmp_path).load(SoloCollective(), options)


def test_a_config_without_the_selected_keys_is_refused(tmp_path: Path) -> None:
    path = save_model(tmp_path, "qwen4_exp_text") / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in config.items() if not name.startswith("indexer_")}))
    with pytest.raises(ModelError, match=re.escape("lacks a number of keys that a query selects: indexer_budget + indexer")):
        open_model(tmp_path)


def test_layers_that_select_no_keys_limit_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model(tmp_path, "minimax_m3_vl_text", index_topk_blocks=1, layer_types=["full_attention"] * 2)
    options = LoadOptions(dtype=torch.float32, device=torch.device("cpu"), kernels=Build().kernels, positions=256)
    open_model(tmp_path).load(SoloCollective(), options)
    assert open_model(tmp_path).max_position == 256 and "does not choose keys" not in caplog.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_moves_among_selected_keys_change_no_token(models: Models, ranks: int) -> None:
    build = Build(dtype=torch.float64, num_pages=120, level="transformers")
    with running_groups(models("choice of more blocks"), [[ranks], [ranks]], build) as field:
        submitted = [make_request(kind, **KINDS[kind]) for kind in ("greedy", "seeded")]
        plain = undisturbed(field.mover, submitted)
        assert moved_back_and_forth(field.mover, submitted, plain) > 0


@pytest.mark.parametrize("form", MECHANISMS)
def test_chunks_prefixes_and_preemptions_change_no_token(models: Models, form: str) -> None:
    """In float64, without near-ties."""
    build = Build(level="transformers", dtype=torch.float64, num_pages=40)
    disturbance = Disturbance(budget=7, lag=2, thief=5)
    scheduler = on_ranks(models(form), [1], build, partial(compare_runs, disturbance))
    assert scheduler.num_preemptions > 0 and scheduler.sharing.hit_tokens > 0


@pytest.mark.parametrize("form", MECHANISMS)
def test_a_zeroed_page_changes_the_tokens(models: Models, form: str) -> None:
    def tokens(spoil: bool) -> list[list[int]]:
        def work(runner: Any) -> list[list[int]]:
            driver = Driver(runner)
            driver.generate([DriverRequest(prompts()[-1])], 1)
            for layer in runner.caches if spoil else []:
                layer.k[driver.pages[0][2]] = layer.v[driver.pages[0][2]] = 0
            return driver.resume(12)

        return on_ranks(models(form), [1], Build(level="transformers"), work)

    assert tokens(spoil=False) != tokens(spoil=True)


def test_zeroed_index_keys_change_the_tokens(models: Models) -> None:
    def tokens(spoil: bool) -> list[list[int]]:
        def work(runner: Any) -> list[list[int]]:
            driver = Driver(runner)
            driver.generate([DriverRequest(prompts()[-1])], 1)
            for layer in runner.caches[::2] if spoil else []:
                layer.k[driver.pages[0][:4]] = 0
            return driver.resume(12)

        return on_ranks(models("choice of keys"), [1], Build(level="transformers"), work)

    assert tokens(spoil=False) != tokens(spoil=True)


def test_keys_are_chosen_in_tiles_too(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    build, form = Build(level="transformers", dtype=torch.float64), models("choice of keys, shared")
    whole = generate(form, [1], build, chunk=13)
    monkeypatch.setattr(indexed, "SCORE_BYTES", 4 * 40 * (3 * 32 + 128) * 3)
    assert generate(form, [1], build, chunk=13) == whole


def test_index_keys_have_the_dtype_of_pages(tmp_path: Path) -> None:
    """dots3 rotates them in float32."""
    save_model(tmp_path / "model", "dots3_note_text", index_topk=8)
    outputs = generate(tmp_path / "model", [1], Build(level="transformers", dtype=torch.bfloat16), chunk=7)
    assert [len(output) for output in outputs] == [NUM_TOKENS] * len(prompts())


def test_the_first_of_equal_keys_are_chosen() -> None:
    """As by a stable sort, also where fewer keys are visible."""
    scores = torch.randint(0, 5, (200, 30), generator=torch.Generator().manual_seed(0)).double() / 4
    scores[:20] = 0
    scores.masked_fill_(torch.arange(30) > torch.arange(200)[:, None], float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(indexed.chosen_keys(scores, 8), torch.zeros_like(scores).bool().scatter(-1, best, True))
    assert indexed.chosen_keys(scores, 30).all()


@pytest.mark.parametrize(
    ("count", "kinds", "starts"),
    [(2, "FFFF", [0, 2]), (2, "FFSS", [0, 1]), (2, "FSSF", [0, 3]), (2, "FFS", [0, 1]), (3, "FSFSSF", [0, 2, 5])],
)
def test_stages_begin_at_layers_that_choose_keys(count: int, kinds: str, starts: list[int]) -> None:
    names = ["full" if kind == "F" else "shared" for kind in kinds]
    spans = [stage_layers(Stage(index, count), len(kinds), names) for index in range(count)]
    assert [span.start for span in spans] == starts
    assert [span.stop for span in spans] == [*starts[1:], len(kinds)]


def test_a_first_layer_without_own_choice_is_refused() -> None:
    with pytest.raises(ModelError, match="indexer_types begins with shared"):
        stage_layers(Stage(0, 2), 3, ["shared", "full", "full"])


def test_more_stages_than_choices_of_keys_are_refused() -> None:
    with pytest.raises(ModelError, match=re.escape("stages begin at layers that choose keys, here [0]")):
        stage_layers(Stage(0, 2), 3, ["full", "shared", "shared"])


def test_offset_and_choice_of_keys_shorten_the_longest_request(models: Models) -> None:
    assert open_model(models("positions after padding")).max_position == 256 - 5
    assert open_model(models("counted positions")).max_position == 256
    assert open_model(models("bias of each key")).max_position == 200
    assert open_model(models("choice of keys")).max_position == 256


def test_the_choice_of_keys_is_named_as_limit(models: Models, caplog: pytest.LogCaptureFixture) -> None:
    limit = "200 keys that a query selects (keep_window_size), and the runtime chooses none"
    options = LoadOptions(dtype=torch.float32, device=torch.device("cpu"), kernels=Build().kernels, positions=201)
    with pytest.raises(ModelError, match=re.escape(f"max_model_len 201 is more than the {limit}")):
        open_model(models("bias of each key")).load(SoloCollective(), options)
    with pytest.raises(ModelError, match="max_model_len 257 is more than the 256 positions of the model"):
        open_model(models("rotation")).load(SoloCollective(), replace(options, positions=257))
    assert not caplog.records
    open_model(models("bias of each key")).load(SoloCollective(), replace(options, positions=200))
    (record,) = [record for record in caplog.records if "does not choose keys" in record.message]
    assert vars(record)["limit"] == limit


@pytest.mark.parametrize(
    ("sees", "block"),
    [
        (lambda query, key: query // 9 == key // 9, 9),
        (lambda query, key: query // 20 == key // 20, 20),
        (lambda query, key: query - key < 9, None),
        (lambda query, key: (query // 9 == key // 9) | (key == 1), None),
        (lambda query, key: key >= 0, None),
    ],
    ids=["9", "all but the last", "window", "and one more", "causal"],
)
def test_blocks_are_found_in_the_rule_of_a_mask(sees: Callable[[Any, Any], Any], block: int | None) -> None:
    mask = probe_mask(1, 8, 8, lambda _, __, query, key: (key <= query) & sees(query, key))
    assert find_block(mask, 21) == block


def test_blocks_of_another_attention_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "big_bird", attention_type="block_sparse")
    with pytest.raises(ModelError, match="does not go through AttentionInterface"):
        generate(tmp_path, [1], Build(level="transformers"))


def test_families_are_model_types_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    assert set(FAMILIES) <= set(CONFIG_MAPPING.keys()) and list(FAMILIES) == sorted(FAMILIES)
