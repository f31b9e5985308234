"""Lines of a batch: each is a request or a problem with its number, whatever it has."""

import io
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_router.batches.lines import (
    CHUNK_BYTES,
    MAX_LINE_BYTES,
    MAX_WITH_EMPTY,
    InputLine,
    answer_line,
    answered_ids,
    check_lines,
    failure_line,
    physical_lines,
    read_lines,
    requests,
    take,
)
from phalanx_router.batches.records import Problem

CHAT = "/v1/chat/completions"
DEEP = b"[" * 300 + b"]" * 300
VALID: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}}


def text(**changes: object) -> bytes:
    return json.dumps(VALID | changes).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{\n", "invalid_json_line", None),
        (b"[]\n", "invalid_json_line", None),
        (b'"' + b"x" * MAX_LINE_BYTES + b'"', "line_too_long", None),
        (text(custom_id=5), "invalid_custom_id", "custom_id"),
        (text(custom_id=""), "invalid_custom_id", "custom_id"),
        (text(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (text(method="GET"), "invalid_method", "method"),
        (text(url="/v1/completions"), "mismatched_url", "url"),
        (text(body=[]), "invalid_body", "body"),
        (text(body={"stream": True}), "invalid_body", "body.stream"),
        (text(body={"background": True}), "invalid_body", "body.background"),
        (b'{"custom_id": "b", "method": "POST", "url": "%s", "body": {"x": %s}}' % (CHAT.encode(), DEEP), "invalid_body", "body"),
        (text(), "duplicate_custom_id", "custom_id"),
    ],
)
def test_a_wrong_line_is_named(line: bytes, code: str, param: str | None) -> None:
    total, problems = check_lines([text(), b"\n", line, text(custom_id="b")], CHAT)
    assert [(problem.code, problem.line, problem.param) for problem in problems] == [(code, 3, param)]
    assert total == 2


def test_a_line_is_read_up_to_its_bound() -> None:
    file = io.BytesIO(text() + b"x" * (3 * MAX_LINE_BYTES))
    _, problems = check_lines(physical_lines(file), CHAT)
    assert [(problem.code, problem.line) for problem in problems] == [("line_too_long", 2)]
    assert file.tell() <= len(text()) + MAX_LINE_BYTES + 1


def test_empty_lines_are_bounded() -> None:
    file = io.BytesIO(b"\n" * (MAX_WITH_EMPTY + 2))
    assert [problem.code for problem in check_lines(physical_lines(file), CHAT)[1]] == ["too_many_lines"]
    assert file.tell() == MAX_WITH_EMPTY + 1
    assert list(physical_lines(io.BytesIO(b"\n\n"), lambda: True)) == []


def test_few_large_lines_are_taken_at_once(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"".join(text(custom_id=str(number), body={"x": "y" * (1 << 19)}) for number in range(20)))
    lines = requests(path, CHAT)
    sizes = [len(taken) for taken in iter(lambda: take(lines), [])]
    assert sum(sizes) == 20 and max(sizes) * (1 << 19) <= CHUNK_BYTES


def test_a_file_without_requests_is_no_batch() -> None:
    assert check_lines([b"\n"], CHAT) == (0, [Problem("empty_file", "the input file has no requests")])


@given(st.lists(st.one_of(st.binary(max_size=60), st.builds(text, custom_id=st.text(max_size=3), body=st.just({})))))
def test_every_line_is_a_request_or_a_problem(lines: list[bytes]) -> None:
    found = list(read_lines(lines, CHAT))
    assert len(found) == sum(bool(line.strip()) for line in lines)
    ids = [line.custom_id for line in found if isinstance(line, InputLine)]
    assert len(set(ids)) == len(ids)


@given(st.lists(st.tuples(st.text(min_size=1), st.booleans()), unique_by=lambda pair: pair[0]), st.integers(0, 50))
def test_answers_are_found_after_a_cut(answers: list[tuple[str, bool]], cut: int) -> None:
    lines = [
        answer_line("r", id, 200, "r", b"{}") if is_answered else failure_line("r", id, "batch_expired", "late")
        for id, is_answered in answers
    ]
    whole = b"".join(lines)
    kept = whole[: len(whole) - min(cut, len(whole))].splitlines(keepends=True)
    found = answered_ids(kept)
    assert found <= {id for id, _ in answers} and len(found) >= len(answers) - 1 - cut // 20


def test_requests_have_no_urgency_of_their_own() -> None:
    urgent = {"priority": -5, "ttft_target_ms": 1, "tpot_target_ms": 1, "deadline_ms": 1}
    [line] = read_lines([text(body=urgent | {"n": 1})], CHAT)
    assert isinstance(line, InputLine) and json.loads(line.body) == {"n": 1}


def test_responses_of_a_batch_are_not_stored() -> None:
    [line] = read_lines([text(url="/v1/responses", body={"store": True})], "/v1/responses")
    assert isinstance(line, InputLine) and json.loads(line.body) == {"store": False}


def test_a_deep_answer_stays_as_it_is() -> None:
    line = answer_line("r", "a", 200, "r", b'{"x":\r\n%s}' % DEEP)
    assert line.count(b"\n") == 1 and b'"body":{"x":%s}' % DEEP in line
    assert answered_ids([line]) == {"a"}


def test_an_answer_that_is_no_json_stays_text() -> None:
    line = orjson.loads(answer_line("r", "a", 500, "r", b"\xff broken"))
    assert line["response"]["body"] == "\ufffd broken" and line["response"]["status_code"] == 500
