"""Conversations of a soak that come from a trace."""

import json
from itertools import chain
from pathlib import Path

import pytest

from bench.router.replay import Arrival
from bench.soak.__main__ import main
from bench.soak.record import Recorder, Run, Settings, read
from bench.soak.report import markdown
from bench.soak.traced import MOST_OUTPUT, MOST_PROMPT, TracedConversations, conversations_of, joined
from bench.soak.workload import CONTEXT, conversation, messages, num_tokens

SYSTEM, BLOCK = 0, 512
FIRST = Arrival(0.0, 3 * BLOCK + 9, 200, (SYSTEM, 1, 2, 3))
ANSWERED = Arrival(60.0, 5 * BLOCK + 7, 100, (SYSTEM, 1, 2, 4, 5, 6))
"""Continues the first one."""
BRANCH = Arrival(70.0, 4 * BLOCK + 1, 100, (SYSTEM, 1, 2, 7, 8))
"""Has its beginning, which was continued already."""
OTHER = Arrival(9.0, 2 * BLOCK + 1, 40, (SYSTEM, 9, 10))
LAST = Arrival(240.0, 6 * BLOCK, 30, (SYSTEM, 1, 2, 4, 5, 11))
"""Continues the answered one."""
SHORT = Arrival(241.0, BLOCK + 3, 20, (SYSTEM, 12))
ONE = '{"hash_ids": [1], "timestamp": 0, "input_length": 3, "output_length": 4}\n'
ARRIVALS = (FIRST, OTHER, ANSWERED, BRANCH, LAST, SHORT)


def write_trace(path: Path) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    rows = [(1000 * row.at_s, row.input_tokens, row.output_tokens, row.blocks) for row in ARRIVALS]
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def test_requests_join_by_the_blocks_they_continue() -> None:
    assert joined(ARRIVALS) == [[FIRST, ANSWERED, LAST], [OTHER], [BRANCH], [SHORT]]


def test_lengths_and_gaps_keep_their_proportions() -> None:
    talks = [TracedConversations(7, ARRIVALS)(number) for number in range(4)]
    assert [len(talk.turns) for talk in talks] == [3, 1, 1, 1]
    first, second, third = talks[0].turns
    assert third.pause_s == pytest.approx(3 * second.pause_s) and first.pause_s == 0.0
    prompts = [len(talk.system) + len(talk.turns[0].text) for talk in talks]
    whole = [FIRST.input_tokens, OTHER.input_tokens, BRANCH.input_tokens, SHORT.input_tokens]
    assert [size / prompts[0] for size in prompts] == pytest.approx([size / whole[0] for size in whole], rel=0.01)
    assert [turn.fields["max_tokens"] for turn in talks[0].turns] == [200, 100, 30]


def test_equal_blocks_are_equal_text() -> None:
    talks = [TracedConversations(7, ARRIVALS)(number) for number in range(4)]
    size = len(talks[0].system)
    assert len({talk.system for talk in talks}) == 1
    assert talks[0].turns[0].text[: 2 * size] == talks[2].turns[0].text[: 2 * size] != talks[1].turns[0].text[: 2 * size]
    assert talks[0].turns[0].text[2 * size :] != talks[2].turns[0].text[2 * size : len(talks[0].turns[0].text)]
    assert len({turn.text for turn in talks[0].turns}) == 3


def test_trace_repeats_with_other_behaviour() -> None:
    of = TracedConversations(7, ARRIVALS)
    assert of(5) == TracedConversations(7, ARRIVALS)(5) != TracedConversations(8, ARRIVALS)(5)
    again = [(of(number), of(number + 4 * times)) for number in range(4) for times in range(1, 20)]
    assert all(messages(one, []) == messages(other, []) for one, other in again)
    assert all(a.fields == b.fields for one, other in again for a, b in zip(one.turns, other.turns, strict=True))
    assert {turn.behaviour for turn in chain.from_iterable(other.turns for _, other in again)} == {
        "reads",
        "reads slowly",
        "cancels",
    }


def test_long_requests_fit_into_the_context() -> None:
    long = [Arrival(float(number), 90_000 if number % 9 == 0 else 900, 3000, tuple(range(200))) for number in range(50)]
    of = TracedConversations(1, long)
    talk = of(0)
    first = talk.turns[0]
    assert len(talk.system) + len(first.text) <= MOST_PROMPT and first.fields["max_tokens"] <= MOST_OUTPUT
    assert num_tokens(messages(talk, [])) + first.fields["max_tokens"] < CONTEXT


def test_settings_choose_the_conversations(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    assert conversations_of(Settings("engines", 7, 3, 6, 20.0, trace=str(trace)))(2) == TracedConversations(7, ARRIVALS)(2)
    assert conversations_of(Settings("engines", 7, 3, 6, 20.0))(2) == conversation(7, 2)


def test_record_keeps_the_trace(tmp_path: Path) -> None:
    settings = Settings("engines", 7, 3, 6, 20.0, trace="/traces/a.jsonl")
    recorder = Recorder(tmp_path)
    recorder.add(settings)
    recorder.close()
    run = read(tmp_path)
    assert run is not None and run.settings == settings
    assert "trace /traces/a.jsonl: 0 minutes" in markdown(run, [], 0.0)
    assert "trace" not in markdown(Run(Settings("engines", 7, 3, 6, 20.0)), [], 0.0)


@pytest.mark.parametrize(
    ("content", "flags", "reason"),
    [
        ("", [], "No such file"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n", [], "no hash_ids"),
        (ONE, ["--target", "fleet"], "draws its requests"),
    ],
)
def test_useless_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, flags: list[str], reason: str
) -> None:
    trace = tmp_path / ("trace.jsonl" if content[:1] == "{" else "trace.csv")
    if content:
        trace.write_text(content)
    with pytest.raises(SystemExit):
        main(["--folder", str(tmp_path / "run"), "--trace", str(trace), *flags])
    assert reason in capsys.readouterr().err and not (tmp_path / "run").exists()
