"""Copies of a prefix whose prompt has images: the warm-up at the target has whole images only, and ends."""

import msgspec
import pytest

from phalanx_api import wire
from phalanx_router.migration.warmup import pages_of_whole_images, warmup_request
from phalanx_runtime.core.admission import Refusal
from tests.runtime.core.scheduling.planned_engine import SIZE, Engine, prompt
from tests.runtime.fake_runner import make_request


def image(start: int, count: int, attends_within: bool = True) -> wire.Image:
    return wire.Image(
        digest=bytes([start]) * 16,
        num_tiles=1,
        height=1,
        width=1,
        pixels=b"abc",
        spans=[(start, count)],
        attends_within=attends_within,
    )


@pytest.mark.parametrize("attends_within", [True, False])
@pytest.mark.parametrize("places", [[(8, 20), (28, 3)], [(0, 6), (9, 1), (17, 8)]], ids=str)
def test_warmup_of_each_prefix_ends(places: list[tuple[int, int]], attends_within: bool) -> None:
    images = [image(*place, attends_within) for place in places]
    replay = msgspec.structs.replace(make_request(prompt(0, 40), 2), images=images)
    for planned in range(10):
        fitting = [
            pages
            for pages in range(planned + 1)
            if not any(one.start < pages * SIZE + 1 < one.stop for one in images) or not pages
        ]
        num_pages = pages_of_whole_images(images, planned, SIZE)
        assert num_pages == fitting[-1]
        if num_pages:
            request, engine = warmup_request(replay, replay.prompt[: num_pages * SIZE + 1]), Engine(64, 0)
            assert request.images == [one for one in images if one.stop <= len(request.prompt)]
            assert [len(tokens) for tokens in engine.run(request)] == [1]


@pytest.mark.parametrize("attends_within", [True, False])
def test_image_that_ends_after_the_prompt_is_refused(attends_within: bool) -> None:
    request = msgspec.structs.replace(make_request(prompt(0, 17), 1), images=[image(8, 20, attends_within)])
    refusal = Engine(64, 0).scheduler.submit(0, request)
    assert isinstance(refusal, Refusal) and (refusal.status, refusal.code) == (400, "no_images")
