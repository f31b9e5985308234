"""Speculation settings of a request: passed on, or refused by field."""

from typing import Any

import pytest

from phalanx_api.speculation import Speculation, Tree
from phalanx_frontend.backend import BackendError
from tests.frontend.fakes import FakeBackend, text_script
from tests.frontend.posting import post, scripted

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/generate": {"prompt": "x"},
}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_every_endpoint_passes_it_on(path: str) -> None:
    wishes = {
        None: Speculation(),
        "ngram": Speculation("ngram", 4),
        "none": Speculation("none"),
        "draft": Speculation("draft", None, Tree([3, 2], "static")),
    }
    for method, expected in wishes.items():
        backend = FakeBackend(text_script("a"))
        more: dict[str, dict[str, Any]] = {"ngram": {"num_tokens": 4}, "draft": {"tree": {"widths": [3, 2], "shape": "static"}}}
        settings = {} if method is None else {"speculative": {"method": method} | more.get(method, {})}
        answer = await post(backend, path, **ENDPOINTS[path], **settings)
        assert answer.status_code == 200, answer.text
        assert [request.speculation for request in backend.requests] == [expected]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"method": "oracle"}, "speculative.method"),
        ({"num_tokens": 0}, "speculative.num_tokens"),
        ({"num_tokens": 17}, "speculative.num_tokens"),
        ({"num_tokens": "4"}, "speculative.num_tokens"),
        ({"depth": 4}, "speculative.depth"),
        ({"tree": {"shape": "static"}}, "speculative.tree.widths"),
        ({"tree": {"widths": [3, 9]}}, "speculative.tree.widths[1]"),
        ({"tree": {"widths": [1] * 17}}, "speculative.tree.widths"),
        ({"tree": {"widths": [2], "shape": "round"}}, "speculative.tree.shape"),
        ("ngram", "speculative"),
    ],
)
async def test_invalid_speculation_is_refused_by_field(path: str, wish: object, param: str) -> None:
    backend = FakeBackend(text_script("a"))
    answer = await post(backend, path, **ENDPOINTS[path], speculative=wish)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert backend.requests == []


async def test_unavailable_method_is_refused_by_field() -> None:
    backend = scripted(BackendError(400, "unsupported_speculation", "speculative.method draft is not offered here"))
    answer = await post(backend, speculative={"method": "draft"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "speculative.method", "unsupported_speculation")
