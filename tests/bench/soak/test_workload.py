"""Conversations, faults, gauges and /proc of a soak."""

import os
from collections import Counter

import pytest

from bench.frame.resuming import Answer, difference
from bench.soak.faults import KINDS as FAULTS
from bench.soak.faults import kind_of
from bench.soak.gauges import GROUP_GAUGES, gauges, held, leaks
from bench.soak.processes import children, module_of, parse_memory, parse_stat, parse_status, start_of, use_of
from bench.soak.workload import KINDS, conversation, messages

PAGE = """# TYPE phalanx_num_requests_running gauge
phalanx_num_requests_running{model_name="tiny"} 2.0
# TYPE phalanx_page_leaks counter
phalanx_page_leaks_total{model_name="tiny"} 1.0
# TYPE other gauge
other{a="1"} 5.0
other{a="2"} 5.0
"""


def test_conversation_follows_from_seed_and_number() -> None:
    assert conversation(3, 9) == conversation(3, 9)
    assert conversation(3, 9) != conversation(4, 9)


def test_conversations_share_prefixes_and_come_back() -> None:
    talks = [conversation(1, number) for number in range(400)]
    texts = Counter(talk.system + talk.turns[0].text for talk in talks)
    assert len({talk.system for talk in talks}) < 10
    assert 50 < sum(count - 1 for count in texts.values()) < 200
    turns = [turn for talk in talks for turn in talk.turns]
    assert {turn.kind for turn in turns} == set(KINDS)
    assert {turn.behaviour for turn in turns} == {"reads", "reads slowly", "cancels"}


def test_prompt_of_a_turn_has_the_answers_before_it() -> None:
    talk = next(talk for number in range(50) if len((talk := conversation(1, number)).turns) > 2)
    first, second = messages(talk, []), messages(talk, ["yes"])
    assert second[: len(first)] == first
    assert second[2:] == [{"role": "assistant", "content": "yes"}, {"role": "user", "content": talk.turns[1].text}]


def test_every_fault_comes_once_first() -> None:
    assert sorted(kind_of(5, number)[0] for number in range(len(FAULTS))) == sorted(FAULTS)
    assert kind_of(5, 99)[0] == kind_of(5, 99)[0]
    assert {kind_of(5, number)[0] for number in range(len(FAULTS), 300)} == set(FAULTS)


def test_gauges_sum_series_and_count_all() -> None:
    found = gauges(PAGE, GROUP_GAUGES)
    assert found == {"running": 2.0, "page_leaks": 1.0, "series": 4.0}
    assert held({"group a": found}) == ["group a has running = 2"]
    assert leaks({"group a": found, "router a": {}}) == ["group a: 1 page leaks"]


WHOLE = Answer("abc", [1, 2, 3], "stop")


@pytest.mark.parametrize(
    ("answer", "is_equal"),
    [
        (Answer("abc", [1, 2, 3], "stop"), True),
        (Answer("ab", [1, 2]), True),
        (Answer(), True),
        (Answer("abd", [1, 2, 4], "stop"), False),
        (Answer("abc", [1, 2, 3], "length"), False),
        (Answer("ab", [1, 2], "stop"), False),
        (Answer("ab?", [1, 2, 3], "stop"), False),
        (Answer("b", [2]), False),
    ],
)
def test_difference_finds_changed_answers(answer: Answer, is_equal: bool) -> None:
    assert (difference(answer, WHOLE) is None) == is_equal


def test_memory_of_a_process_is_parsed() -> None:
    rollup = "55-7f ---p 0 00:00 0 [rollup]\nRss:  119596 kB\nPss:   86435 kB\nPss_Anon: 7 kB\nAnonymous:   77708 kB\n"
    assert parse_memory(rollup) == {"rss_kib": 119596.0, "pss_kib": 86435.0, "anonymous_kib": 77708.0}
    assert parse_status("Name:\tx\nVmRSS:\t 12 kB\nThreads:\t3\n") == {"threads": 3.0, "rss_kib": 12.0}
    assert parse_status("Name:\tx\nState:\tZ (zombie)\n") == {}


@pytest.mark.parametrize(("state", "started"), [("S", "77"), ("Z", "")])
def test_zombie_has_no_start_time(state: str, started: str) -> None:
    assert parse_stat(f"5 (a ) b) {state} 4 " + "0 " * 17 + "77 0") == (4, started)


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (b"/usr/bin/python\0-m\0phalanx_runtime.rank\0", "rank"),
        (b"python\0-m\0phalanx_frontend.text.grammar_process\x005\0", "grammar_process"),
        (b"/usr/bin/python3.11\0/usr/local/bin/phalanx-router\0serve\0", "phalanx-router"),
        (b"/bin/sh\0-c\0true\0", "sh"),
        (b"python3\0", "python3"),
        (b"", ""),
    ],
)
def test_child_is_named_by_its_module(command: bytes, module: str) -> None:
    assert module_of(command) == module


def test_own_process_is_read() -> None:
    found = use_of(os.getpid())
    assert found is not None and found["rss_kib"] > 1000 and found["descriptors"] > 2 and found["threads"] >= 1
    assert os.getpid() in [child.pid for child in children(os.getppid())]
    assert start_of(os.getpid()) and start_of(2**22 + 1) is None and use_of(2**22 + 1) is None
