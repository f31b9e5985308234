"""The check of grammars before a backend receives them."""

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx_api.wire import Grammar
from phalanx_frontend.errors import ApiError
from phalanx_frontend.openai.structured import MAX_WAITING, GrammarCheck
from phalanx_frontend.text.grammar_process import TOO_COSTLY, GrammarProcess, GrammarProcessError
from tests.frontend.fakes import tiny_tokenizer_json

CHECK = GrammarCheck(tiny_tokenizer_json())
GOOD = [
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    Grammar("json_schema", '{"x-guidance": {"whitespace_pattern": " "}, "type": "array"}'),
    Grammar("regex", "(yes|no)[0-9]{3}"),
    Grammar("lark", 'start: "a" [b]\nb: /[bc]+/'),
]
BAD = {
    "not json": (Grammar("json_schema", "{"), "cannot be read"),
    "no object": (Grammar("json_schema", "7"), "int|number|schema|object"),
    "unknown type": (Grammar("json_schema", '{"type": "nonsense"}'), "nonsense"),
    "regex": (Grammar("regex", "("), "unclosed group"),
    "lark": (Grammar("lark", "start: missing"), "missing"),
}


@pytest.mark.parametrize("grammar", GOOD, ids=lambda grammar: grammar.kind)
async def test_grammars_that_compile_pass(grammar: Grammar) -> None:
    await CHECK.check("form", grammar)


@pytest.mark.parametrize(("grammar", "why"), BAD.values(), ids=BAD.keys())
async def test_others_are_refused_with_the_reason_in_one_line(grammar: Grammar, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refused:
        await CHECK.check("form", grammar)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "form", "invalid_grammar")
    assert "\n" not in refused.value.message


def chain(length: int) -> Grammar:
    """A grammar whose rules each name the next one."""
    rules = [f"r{number}: r{number + 1}" for number in range(length)]
    return Grammar("lark", "\n".join(["start: r0", *rules, f'r{length}: "a"']))


def linked(length: int) -> Grammar:
    """A schema whose definitions each refer to the next one."""
    links = ",".join(f'"a{number}": {{"$ref": "#/$defs/a{number + 1}"}}' for number in range(length))
    return Grammar("json_schema", f'{{"$defs": {{{links}, "a{length}": {{}}}}, "$ref": "#/$defs/a0"}}')


@pytest.mark.parametrize("make", [chain, linked])
async def test_grammar_that_overflows_the_stack_is_refused(make: Callable[[int], Grammar]) -> None:
    await CHECK.check("form", make(100))
    with pytest.raises(ApiError, match="too many nested rules") as refused:
        await CHECK.check("form", make(3000))
    assert (refused.value.status, refused.value.code) == (400, "invalid_grammar")
    await CHECK.check("form", make(101))


def test_grammar_without_an_end_is_refused_after_its_time() -> None:
    process = GrammarProcess(tiny_tokenizer_json(), cpu_s=0)
    assert process.problem(Grammar("json_schema", '{"type": "integer", "multipleOf": 99999989}')) == TOO_COSTLY
    assert process.problem(GOOD[2]) == ""
    process.close()


def killed(times: int, folder: Path, number: int = 9) -> GrammarProcess:
    """A process that ends itself by a signal, at each of its first starts."""
    script = f"""
import os, pathlib, runpy
starts = pathlib.Path({str(folder)!r}) / "starts"
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (count + 1))
if count < {times}:
    os.kill(os.getpid(), {number})
runpy.run_module("phalanx_frontend.text.grammar_process", run_name="__main__")
"""
    return GrammarProcess(tiny_tokenizer_json(), command=(sys.executable, "-c", script))


def test_bounds_count_only_in_a_new_process(tmp_path: Path) -> None:
    """What former grammars left behind is not the next client's fault."""
    process = GrammarProcess(tiny_tokenizer_json(), cpu_s=0)
    assert process.problem(GOOD[2]) == ""
    assert process.problem(Grammar("json_schema", '{"type": "integer", "multipleOf": 99999989}')) == TOO_COSTLY
    process.close()


def test_process_killed_from_outside_is_started_again(tmp_path: Path) -> None:
    process = killed(1, tmp_path)
    assert process.problem(GOOD[2]) == ""
    assert (tmp_path / "starts").read_text() == "xx"
    process.close()


def crashing(folder: Path, answer: bytes) -> GrammarProcess:
    """A process that reads the tokenizer, writes `answer`, reads a message and ends itself."""
    script = f"""
import os, pathlib, sys
(pathlib.Path({str(folder)!r}) / "starts").open("a").write("x")
read = lambda: sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(4), "little"))
read()
os.write(1, {answer!r})
if {answer!r}:
    read()
os.abort()
"""
    return GrammarProcess(b"{}", command=(sys.executable, "-c", script))


def test_grammar_that_exceeds_its_bounds_is_not_repeated(tmp_path: Path) -> None:
    assert crashing(tmp_path, bytes(4)).problem(GOOD[2]) == TOO_COSTLY
    assert (tmp_path / "starts").read_text() == "x"


async def test_tokenizer_read_once_is_no_obstacle_later(tmp_path: Path) -> None:
    """A node without memory ends processes before they read it."""
    script = f"""
import os, pathlib, runpy
starts = pathlib.Path({str(tmp_path)!r}) / "starts"
count = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (count + 1))
if count in (1, 2):
    os.abort()
runpy.run_module("phalanx_frontend.text.grammar_process", run_name="__main__")
"""
    process = GrammarProcess(tiny_tokenizer_json(), command=(sys.executable, "-c", script))
    assert process.problem(GOOD[0]) == ""
    process.close()
    with pytest.raises(GrammarProcessError, match="return code -6"):
        process.problem(GOOD[1])
    assert process.problem(GOOD[1]) == ""
    process.close()


async def test_tokenizer_that_crashes_the_library_is_named(tmp_path: Path) -> None:
    check = GrammarCheck(b"", crashing(tmp_path, b"").problem)
    for grammar in GOOD[:2]:
        with pytest.raises(ApiError, match=r"no structured outputs: .* its tokenizer \(return code -6") as refused:
            await check.check("form", grammar)
        assert (refused.value.status, refused.value.param, refused.value.code) == (400, "form", "grammars_unsupported")
    assert (tmp_path / "starts").read_text() == "xx", "later grammars start no process"


async def test_unusable_tokenizer_is_named(tmp_path: Path) -> None:
    check = GrammarCheck(b"{}")
    for grammar in GOOD[:2]:
        with pytest.raises(ApiError, match=r"no structured outputs: its tokenizer cannot be used .*Model missing") as refused:
            await check.check("form", grammar)
        assert (refused.value.status, refused.value.code) == (400, "grammars_unsupported")


async def test_process_killed_twice_is_a_503_not_kept(tmp_path: Path) -> None:
    check = GrammarCheck(b"", killed(2, tmp_path).problem)
    with pytest.raises(ApiError, match="return code -9") as failed:
        await check.check("form", GOOD[2])
    assert (failed.value.status, failed.value.code) == (503, "grammar_check_failed")
    assert failed.value.retry_after_s
    await check.check("form", GOOD[2])


def test_program_that_does_not_start_is_reported(tmp_path: Path) -> None:
    process = GrammarProcess(b"", command=(str(tmp_path / "absent"),))
    with pytest.raises(GrammarProcessError, match="does not start"):
        process.problem(GOOD[2])


async def test_kept_result_returns_while_another_compiles() -> None:
    compiled: list[str] = []
    opened = threading.Event()

    def compile(grammar: Grammar) -> str:
        if grammar.text != "kept":
            opened.wait()
        compiled.append(grammar.text)
        return ""

    check = GrammarCheck(b"", compile)
    kept, costly = Grammar("regex", "kept"), [Grammar("regex", str(number)) for number in range(1 + MAX_WAITING)]
    await check.check("form", kept)
    waiting = [asyncio.create_task(check.check("form", grammar)) for grammar in [*costly, *costly]]
    await asyncio.sleep(0)
    try:
        await check.check("form", kept)
        with pytest.raises(ApiError) as refused:
            await check.check("form", Grammar("regex", "one more"))
        assert (refused.value.status, refused.value.code) == (429, "too_many_grammars")
        assert refused.value.retry_after_s
        waiting[0].cancel()
    finally:
        opened.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [answer for answer in answers[1:] if answer is not None] == []
    assert compiled == ["kept", *(grammar.text for grammar in costly)], "equal grammars are compiled once"


async def test_caller_with_many_grammars_delays_others_by_one() -> None:
    compiled: list[str] = []
    opened = threading.Event()

    def compile(grammar: Grammar) -> str:
        opened.wait()
        compiled.append(grammar.text)
        return ""

    check = GrammarCheck(b"", compile)
    many = [asyncio.create_task(check.check("f", Grammar("regex", str(number)), "greedy")) for number in range(1 + MAX_WAITING)]
    await asyncio.sleep(0)
    other = [asyncio.create_task(check.check("f", Grammar("regex", text), "other")) for text in ("first", "0", "1")]
    await asyncio.sleep(0)
    opened.set()
    assert await asyncio.gather(*other) == [None] * 3
    assert compiled[:3] in (["0", "1", "first"], ["0", "first", "1"])
    answers = await asyncio.gather(*many, return_exceptions=True)
    refused = [answer for answer in answers if answer is not None]
    assert [answer.code for answer in refused if isinstance(answer, ApiError)] == ["too_many_grammars"]
    assert answers[-1:] == refused, "the newest of the caller with the most, and none for a grammar that already waits"
