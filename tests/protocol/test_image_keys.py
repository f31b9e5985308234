"""Page keys of prompts with images, equal at router and group."""

import random

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_router.routing.equality import computation_key, conversation_key, output_key
from phalanx_router.routing.prefixes import KeySpace, prompt_keys

PAGE = 8
ROOT = root_key("model")


def image(name: bytes, start: int, count: int = 10) -> wire.Image:
    return wire.Image(digest=name.ljust(16, b"\0"), num_tiles=1, height=1, width=1, pixels=b"abc", spans=[(start, count)])


def request(*images: wire.Image, tokens: int = 40) -> wire.Request:
    sampling = wire.Sampling(max_tokens=1, seed=0, temperature=0.0)
    return wire.Request(id="a", epoch=0, prompt=[7] * tokens, delivered=[], sampling=sampling, images=list(images))


def keys(one: wire.Request) -> list[bytes]:
    return PrefixKeys(ROOT, PAGE, one.page_marks).extend(one.prompt)


def shared(one: wire.Request, other: wire.Request) -> int:
    pairs = list(zip(keys(one), keys(other), strict=True))
    return next((page for page, (mine, theirs) in enumerate(pairs) if mine != theirs), len(pairs))


def test_text_has_the_same_keys_as_before_images() -> None:
    assert keys(request()) == PrefixKeys(ROOT, PAGE).extend([7] * 40)


def test_pages_before_an_image_are_shared() -> None:
    for start in range(30):
        assert shared(request(image(b"a", start)), request(image(b"b", start))) == start // PAGE
        assert shared(request(image(b"a", start)), request()) == start // PAGE
        assert shared(request(image(b"a", start)), request(image(b"a", start))) == 5


def test_the_place_within_a_page_counts() -> None:
    assert shared(request(image(b"a", 9)), request(image(b"a", 10))) == 1


def test_a_prompt_cut_within_an_image_has_leading_keys() -> None:
    whole = request(image(b"a", 12), image(b"b", 26))
    cut = request(image(b"a", 12), image(b"b", 26), tokens=20)
    assert keys(cut) == keys(whole)[:2]


def test_routers_compute_the_keys_of_groups() -> None:
    one = request(image(b"a", 12))
    assert list(prompt_keys(one).keys(KeySpace("model", PAGE))) == keys(one)


def test_requests_with_other_images_are_not_equal() -> None:
    one, same, other, none = request(image(b"a", 3)), request(image(b"a", 3)), request(image(b"b", 3)), request()
    for key in (output_key, computation_key):
        assert key(one) == key(same) and len({key(one), key(other), key(none)}) == 3
    contexts = [conversation_key(r, (), "r", True, context=b"", max_tokens=1, space="s") for r in (one, same, other, none)]
    assert contexts[0] == contexts[1] and len(set(contexts)) == 3


def test_placeholders_have_numbers_of_their_image() -> None:
    rng = random.Random(1)
    first, second = (wire.placeholder_numbers([image(rng.randbytes(16), 4)]) for _ in range(2))
    assert list(first) == list(range(4, 14)) and len(set(first.values())) == 2
    assert not set(first.values()) & set(second.values())
    assert all(1 << 32 < number < 1 << 63 for number in first.values()), "no token ids, and integers of 64 bits"


def test_requests_with_images_survive_the_wire() -> None:
    one = request(image(b"a", 3))
    assert wire.decode_to_engine(wire.encode(wire.Submit(1, one))) == wire.Submit(1, one)
