"""Prompts with images: tokens equal those of `transformers`, also under chunks, shared prefixes, preemption and on two ranks."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

from phalanx_api import wire
from phalanx_frontend.images.decoding import decode
from phalanx_frontend.images.spans import prompt_images, with_placeholders
from phalanx_frontend.text.tokenizer import TextTokenizer
from phalanx_runtime.checkpoint.assets import read_assets
from phalanx_runtime.checkpoint.vision import read_vision
from phalanx_runtime.collective.protocol import SoloCollective
from phalanx_runtime.core.admission import Limits, check_images
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.rank.loader import load_rank
from phalanx_runtime.rank.process.cgroup import System
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.equality.groups import groups
from tests.runtime.moving_engines import running_groups
from tests.runtime.moving_requests import TOKENS, moved_back_and_forth, undisturbed
from tests.runtime.pods import make_spec, with_settings
from tests.runtime.ranks import PAGE_SIZE, Build, on_ranks
from tests.runtime.served import CountingRunner, Served, serve
from tests.runtime.tiny import WINDOW
from tests.runtime.tiny_vision import IMAGE_TOKEN, KINDS, MORE, VisionKind, picture, png, processor, save_tiny_vision

NUM_TOKENS = 12
ROOMY = Limits(max_model_len=256, max_num_seqs=8, max_num_batched_tokens=512)
IN_TURN = Limits(max_model_len=256, max_num_seqs=1, max_num_batched_tokens=512)
SHAPES = {
    "together": ROOMY,
    "chunks of 7": Limits(max_model_len=256, max_num_seqs=7, max_num_batched_tokens=7),
    "one by one": Limits(max_model_len=256, max_num_seqs=1, max_num_batched_tokens=11),
}
FIRST, SECOND = picture(1), picture(2, 50, 70)
PROMPTS: dict[str, tuple[str, list[Image.Image]]] = {
    "one image": (f"what is in {IMAGE_TOKEN}?", [FIRST]),
    "two images": (f"{IMAGE_TOKEN} {IMAGE_TOKEN} differ in", [FIRST, SECOND]),
    "text alone": ("nothing to see here", []),
    "another image": (f"what is in {IMAGE_TOKEN}?", [SECOND]),
}


@dataclass(frozen=True)
class Tiny:
    """A checkpoint, its requests, and the tokens of `transformers`."""

    folder: Path
    requests: list[wire.Request]
    expected: list[list[int]]


def request(folder: Path, text: str, images: Sequence[Image.Image]) -> wire.Request:
    """Returns a greedy request, as the API server makes it."""
    vision = read_vision(folder)
    assert vision is not None
    pictures = [decode(png(image), vision.input.among(len(images)), 10**6, "messages") for image in images]
    text = with_placeholders(text, vision.input, pictures) if pictures else text
    tokens = TextTokenizer((folder / "tokenizer.json").read_bytes()).encode(text, False)
    sampling = wire.Sampling(max_tokens=NUM_TOKENS, seed=1, temperature=0.0)
    prompt_parts = prompt_images(tokens, vision.input, pictures) if pictures else []
    return wire.Request(id=text[:9], epoch=0, prompt=tokens, delivered=[], sampling=sampling, images=prompt_parts)


def reference(folder: Path, kind: VisionKind, texts: Sequence[tuple[str, list[Image.Image]]]) -> list[list[int]]:
    """Returns the greedy tokens of `transformers`, in fp32."""
    import transformers

    auto: Any = transformers.AutoModelForImageTextToText
    model, prepare = auto.from_pretrained(folder, dtype=torch.float32).eval(), processor(folder, kind)
    outputs = []
    for text, images in texts:
        inputs = prepare(text=text, images=images or None, return_tensors="pt")
        if not kind.startswith("gemma3"):
            inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            whole = model.generate(**inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False)
        outputs.append(whole[0, inputs["input_ids"].shape[1] :].tolist())
    return outputs


@pytest.fixture(scope="module", params=KINDS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    kind: VisionKind = request.param
    seed = 6 if kind == "gemma3_crops" else 0  # with others the long text decides alone
    folder = save_tiny_vision(tmp_path_factory.mktemp(kind), kind, seed)
    return Tiny(folder, [make(folder, *one) for one in PROMPTS.values()], reference(folder, kind, list(PROMPTS.values())))


make = request


def run(
    tiny: Tiny,
    submitted: Sequence[wire.Request],
    limits: Limits = ROOMY,
    *,
    pods: Sequence[int] = (1,),
    stages: int = 1,
    num_pages: int = 200,
    caching: bool = True,
) -> tuple[list[Served], CountingRunner]:
    def work(runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
        counter = CountingRunner(runner)
        return serve(counter, submitted, limits, SchedulerConfig(prefix_caching=caching)), counter

    return on_ranks(tiny.folder, list(pods), Build(torch.float32, num_pages=num_pages, stages=stages), work)


def fitting(tiny: Tiny, limits: Limits) -> Limits:
    """Returns limits with room for an image that one step computes, with shares as small."""
    if not any(image.attends_within for one in tiny.requests for image in one.images):
        return limits
    share = limits.max_num_batched_tokens
    return replace(limits, max_num_batched_tokens=max(share, 64), long_prefill_tokens=share if share < 64 else 0)


def tokens_of(answers: Sequence[Served]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("limits", SHAPES.values(), ids=SHAPES.keys())
def test_tokens_equal_those_of_transformers(tiny: Tiny, limits: Limits) -> None:
    assert tokens_of(run(tiny, tiny.requests, fitting(tiny, limits))[0]) == tiny.expected
    assert tiny.expected[0] != tiny.expected[3], "the image decides the tokens"


@pytest.mark.parametrize("tiny", MORE, indirect=True)
def test_more_models_equal_those_of_transformers(tiny: Tiny) -> None:
    """In chunks on two ranks, then with shared pages."""
    limits = replace(fitting(tiny, SHAPES["chunks of 7"]), max_model_len=400)
    assert tokens_of(run(tiny, tiny.requests, limits, pods=[2])[0]) == tiny.expected
    assert tiny.expected[0] != tiny.expected[3], "the image decides the tokens"
    served = run(tiny, [*tiny.requests[:2], tiny.requests[0]], replace(IN_TURN, max_model_len=400))[0]
    assert tokens_of(served) == [*tiny.expected[:2], tiny.expected[0]]
    assert served[2].cached_tokens > tiny.requests[0].images[0].start


@groups
def test_ranks_and_stages_change_no_token(tiny: Tiny, pods: list[int], stages: int) -> None:
    assert tokens_of(run(tiny, tiny.requests, fitting(tiny, SHAPES["chunks of 7"]), pods=pods, stages=stages)[0]) == tiny.expected


def test_preempted_requests_keep_their_images(tiny: Tiny) -> None:
    both = [tiny.requests[0], tiny.requests[3]]
    num_pages = sum(-(-len(one.prompt) // PAGE_SIZE) for one in both) + 1
    served, counter = run(tiny, both, num_pages=num_pages, caching=False)
    assert len(counter.admitted) > len(both), "a request was preempted"
    assert tokens_of(served) == [tiny.expected[0], tiny.expected[3]]


@pytest.mark.parametrize("num_parts", [9, 14])
@pytest.mark.parametrize("tiny", ["gemma3"], indirect=True)
def test_layers_with_a_window_compute_whole_images(tiny: Tiny, num_parts: int) -> None:
    """Prompts wait for the parts that an image needs, or compute tokens again that have theirs."""
    build = Build(torch.float32, num_pages=200, window=WINDOW, num_parts=num_parts)
    limits = fitting(tiny, SHAPES["chunks of 7"])
    served = on_ranks(tiny.folder, [1], build, lambda runner: serve(CountingRunner(runner), tiny.requests * 3, limits))
    assert tokens_of(served) == tiny.expected * 3


@pytest.mark.parametrize("tiny", ["qwen2_5_vl"], indirect=True)
def test_draft_tokens_follow_the_positions_of_images(tiny: Tiny) -> None:
    longer = wire.Sampling(max_tokens=3 * NUM_TOKENS, seed=1, temperature=0.0)
    submitted = [
        msgspec.structs.replace(one, delivered=(own * 2)[: NUM_TOKENS + 3], sampling=longer)  # so that the last ones repeat
        for one, own in zip(tiny.requests, tiny.expected, strict=True)
    ]
    config = SchedulerConfig(speculation=SpeculationConfig(method="ngram", num_tokens=3, is_adaptive=False))

    def work(speculation: SchedulerConfig) -> tuple[list[Served], CountingRunner]:
        def serve_all(runner: ModelRunner) -> tuple[list[Served], CountingRunner]:
            counter = CountingRunner(runner)
            return serve(counter, submitted, ROOMY, speculation), counter

        return on_ranks(tiny.folder, [1], Build(torch.float32, num_pages=200), serve_all)

    (plain, _), (drafted, counter) = work(SchedulerConfig()), work(config)
    assert counter.num_proposed and tokens_of(drafted) == tokens_of(plain)


@pytest.mark.parametrize("tiny", ["gemma3"], indirect=True)
def test_a_group_says_why_it_takes_no_images(tiny: Tiny, tmp_path: Path) -> None:
    def obstacle(folder: Path = tiny.folder, **settings: Any) -> str:
        spec = with_settings(make_spec(folder), dtype="float32", kv_cache_memory_bytes=1 << 20, **settings)
        return load_rank(spec, SoloCollective(), torch.device("cpu"), System())[1].image_obstacle

    assert obstacle() == "" and "--model-impl" in obstacle(model_impl="transformers")
    assert "--max-num-batched-tokens must be at least 56" in obstacle(max_num_seqs=8, max_num_batched_tokens=55)
    shallow = save_tiny_vision(tmp_path / "shallow", "qwen3_vl", num_hidden_layers=1)
    assert "needs at least 2 layers" in obstacle(shallow)
    assets = read_assets(tiny.folder, ["tiny"], None, image_obstacle="none today")
    assert msgspec.json.decode(assets.files[wire.IMAGES_FILE], type=wire.ImageInput).obstacle == "none today"


def test_steps_without_room_for_images_are_an_obstacle() -> None:
    whole = wire.Image(digest=b"", num_tiles=1, height=1, width=1, pixels=b"", spans=[(3, 256)], attends_within=True)
    small = Limits(max_model_len=999, max_num_seqs=64, max_num_batched_tokens=300)
    refusal = check_images([whole], small)
    assert refusal is not None and "--max-num-batched-tokens must be at least 352" in refusal.message
    assert check_images([whole], replace(small, max_num_batched_tokens=352)) is None
    assert check_images([msgspec.structs.replace(whole, attends_within=False)], small) is None


def test_pages_are_shared_by_the_same_image(tiny: Tiny) -> None:
    one, _, _, other = tiny.requests
    served = run(tiny, [one, one, other], IN_TURN)[0]
    assert tokens_of(served) == [tiny.expected[0], tiny.expected[0], tiny.expected[3]]
    first, again, another = (answer.cached_tokens for answer in served)
    assert first == 0 and again > one.images[0].start
    assert another <= one.images[0].start, "the text before the image alone"


def test_replays_with_delivered_tokens_continue(tiny: Tiny) -> None:
    half = NUM_TOKENS // 2
    replays = [msgspec.structs.replace(one, delivered=own[:half]) for one, own in zip(tiny.requests, tiny.expected, strict=True)]
    assert tokens_of(run(tiny, replays)[0]) == [own[half:] for own in tiny.expected]


def test_moved_requests_keep_their_images(tiny: Tiny) -> None:
    """With their pages, and once without."""
    longer = wire.Sampling(max_tokens=TOKENS, seed=1, temperature=0.0)
    submitted = [msgspec.structs.replace(one, sampling=longer) for one in tiny.requests]
    with running_groups(tiny.folder, [[1], [1]], Build(torch.float64, num_pages=200)) as field:
        router = field.mover
        plain = undisturbed(router, submitted)
        assert moved_back_and_forth(router, submitted, plain) > 0
        stream = router.submit(submitted[0])
        router.until(lambda: len(stream.tokens) >= 2)
        router.commit(stream, router.prepare(stream, 1), 1)
        router.until(lambda: stream.finish is not None)
        assert stream.tokens == plain[0].tokens, "the target recomputes the image"
        router.settle()


def test_a_tower_that_is_not_supported_leaves_the_text(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(tiny.folder, folder)
    (folder / "preprocessor_config.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": {"model_type": "other", "patch_size": 0}}))
    assets = read_assets(folder, ["tiny"], None)
    assert msgspec.json.decode(assets.files[wire.IMAGES_FILE], type=wire.ImageInput).obstacle
    assert tokens_of(run(replace(tiny, folder=folder), tiny.requests[2:3])[0]) == tiny.expected[2:3]
