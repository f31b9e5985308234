"""Lines of a batch's input: `{"custom_id", "method", "url", "body"}`, and of its outputs.

`take` and functions with a path use the disk: call them in a thread.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import orjson

from phalanx_router.batches.records import RESPONSES, Problem

MAX_LINES, MAX_WITH_EMPTY = 50_000, 100_000
MAX_LINE_BYTES = 1 << 20
MAX_ID_CHARS = 512
URGENCY = ("priority", "ttft_target_ms", "tpot_target_ms", "deadline_ms")
"""Fields that are ignored: all requests of batches are the least urgent."""
MAX_PROBLEMS = 20
"""Problems that a failed batch lists."""
CHUNK_LINES, CHUNK_BYTES = 64, 4 << 20
"""Of requests that one call reads; the last one may exceed the bytes."""


class InputLine(msgspec.Struct, frozen=True):
    """One request of a batch."""

    number: int
    """From 1."""
    custom_id: str
    body: bytes
    """JSON object."""


class InvalidLine(ValueError):
    """Why a line is no request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def parse_line(text: bytes, number: int, endpoint: str) -> InputLine:
    """Returns the request of a line. Raises InvalidLine."""
    if len(text) > MAX_LINE_BYTES:
        raise InvalidLine("line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        line = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidLine("invalid_json_line", f"the line is no JSON: {error}") from error
    if not isinstance(line, dict):
        raise InvalidLine("invalid_json_line", "the line is no JSON object")
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        raise InvalidLine("invalid_custom_id", f"custom_id is no text of 1 to {MAX_ID_CHARS} characters", "custom_id")
    if line.get("method") != "POST":
        raise InvalidLine("invalid_method", "method is not POST", "method")
    if line.get("url") != endpoint:
        raise InvalidLine("mismatched_url", f"url is not {endpoint}, the endpoint of the batch", "url")
    if not isinstance(body, dict):
        raise InvalidLine("invalid_body", "body is no JSON object", "body")
    if body.get("stream"):
        raise InvalidLine("invalid_body", "requests of a batch are not streamed", "body.stream")
    if body.get("background"):
        raise InvalidLine("invalid_body", "a batch runs in the background already: leave background out", "body.background")
    for name in URGENCY:
        body.pop(name, None)
    if endpoint == RESPONSES:
        body["store"] = False  # the answer is in the output
    try:
        return InputLine(number, custom_id, orjson.dumps(body))
    except TypeError as error:
        raise InvalidLine("invalid_body", f"body: {error}", "body") from error


def physical_lines(file: BinaryIO, must_stop: Callable[[], bool] = lambda: False) -> Iterator[bytes]:
    """Yields the lines of a file until it must stop; a part of an overlong one is the last."""
    while not must_stop() and (text := file.readline(MAX_LINE_BYTES + 1)):
        yield text
        if len(text) > MAX_LINE_BYTES:
            return


def read_lines(lines: Iterable[bytes], endpoint: str) -> Iterator[InputLine | Problem]:
    """Yields a request or a problem for each line that is not empty. Ids are unique."""
    ids: set[str] = set()
    for number, text in enumerate(lines, 1):
        if number > MAX_WITH_EMPTY:
            yield Problem("too_many_lines", f"a file has at most {MAX_WITH_EMPTY} lines, empty ones included", number)
            return
        if not text.strip():
            continue
        try:
            line = parse_line(text, number, endpoint)
            if line.custom_id in ids:
                raise InvalidLine("duplicate_custom_id", "another line has the same custom_id", "custom_id")
            ids.add(line.custom_id)
            yield line
        except InvalidLine as error:
            yield Problem(error.code, str(error), number, error.param)


def check_lines(lines: Iterable[bytes], endpoint: str) -> tuple[int, list[Problem]]:
    """Returns the number of requests and the first problems; a batch with problems does not start."""
    total, problems = 0, list[Problem]()
    for line in read_lines(lines, endpoint):
        if isinstance(line, Problem):
            problems.append(line)
        else:
            total += 1
        if len(problems) >= MAX_PROBLEMS:
            break
        if total > MAX_LINES:
            problems.append(Problem("too_many_requests", f"a batch has at most {MAX_LINES} requests"))
            break
    if not total and not problems:
        problems.append(Problem("empty_file", "the input file has no requests"))
    return total, problems


def answer_line(id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Returns the output line of an answered request."""
    response: dict[str, Any] = {"status_code": status, "request_id": request_id, "body": _embedded(body)}
    return orjson.dumps({"id": id, "custom_id": custom_id, "response": response, "error": None}) + b"\n"


def _embedded(body: bytes) -> object:
    """Returns valid JSON as it is, as orjson reads more levels than it writes, but without line ends between its values."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")
    return orjson.Fragment(body.translate(None, b"\r\n"))


def failure_line(id: str, custom_id: str, code: str, message: str) -> bytes:
    """Returns the output line of a request without an answer."""
    error = {"code": code, "message": message}
    return orjson.dumps({"id": id, "custom_id": custom_id, "response": None, "error": error}) + b"\n"


def answered_ids(lines: Iterable[bytes]) -> set[str]:
    """Returns the custom ids in an output file, without its last line if a crash cut it short."""
    ids: set[str] = set()
    for text in lines:
        try:
            ids.add(str(orjson.loads(text)["custom_id"]))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            continue
    return ids


def check_file(path: Path, endpoint: str, must_stop: Callable[[], bool]) -> tuple[int, list[Problem]]:
    """Returns what `check_lines` does, or part of it once it must stop."""
    with path.open("rb") as file:
        return check_lines(physical_lines(file, must_stop), endpoint)


def requests(path: Path, endpoint: str) -> Iterator[InputLine]:
    """Yields the requests of an input."""
    with path.open("rb") as file:
        yield from (line for line in read_lines(physical_lines(file), endpoint) if isinstance(line, InputLine))


def take(lines: Iterator[InputLine]) -> list[InputLine]:
    """Returns the next requests, none at the end."""
    taken, size = list[InputLine](), 0
    while len(taken) < CHUNK_LINES and size < CHUNK_BYTES and (line := next(lines, None)) is not None:
        taken.append(line)
        size += len(line.body)
    return taken


def open_lines(path: Path) -> tuple[BinaryIO, set[str]]:
    """Returns the file to append to, without a last line that a crash cut short, and the ids in it."""
    file = path.open("a+b")
    file.seek(0)
    ids, end = set[str](), 0
    for text in file:
        if not text.endswith(b"\n"):
            break
        ids |= answered_ids([text])
        end += len(text)
    file.truncate(end)
    return file, ids
