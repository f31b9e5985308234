"""Texts that SmolLM2-135M-Instruct writes: `python -m tests.frontend.text.recording` makes recorded_calls.json of them.

So small a model begins no well-formed call by itself: three examples and the begin of a call are given, and no grammar.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("recorded_calls.json")
BEGIN = '<tool_call>\n{"name": "'
OFFERED: dict[str, dict[str, Any]] = {"get_weather": {}, "add": {}, "search": {}}
"""Schemas of the functions: any arguments."""
TOOLS = 'get_weather: {"city": string}\nadd: {"a": number, "b": number}\nsearch: {"query": string, "limit": number}'
EXAMPLES = [
    ("Weather in Madrid?", 'get_weather", "arguments": {"city": "Madrid"}}'),
    ("Add 7 and 5.", 'add", "arguments": {"a": 7, "b": 5}}'),
    ("Find two papers about bees.", 'search", "arguments": {"query": "papers about bees", "limit": 2}}'),
]
QUESTIONS = [
    "What is the weather in Paris?", "Add 2 and 40.", "Weather in Oslo and in Rome, please.", "Find three songs about rain.",
    "What is 3.5 plus -4?", "Search for \"quoted words\".", "Is it cold in São Paulo?", "Name a fruit.",
]  # fmt: skip


def prompt(question: str) -> str:
    turns = [f"<|im_start|>system\nYou call functions:\n{TOOLS}<|im_end|>\n"]
    for asked, call in EXAMPLES:
        turns.append(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{BEGIN}{call}\n</tool_call><|im_end|>\n")
    return "".join(turns) + f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{BEGIN}"


def record() -> list[str]:
    """Returns the answers, greedy ones and sampled ones."""
    from phalanx_runtime import LLM, SamplingParams
    from tests.cluster import real_model

    prompts, answers = [prompt(question) for question in QUESTIONS], list[str]()
    with LLM(str(real_model.folder() / real_model.NAME), dtype="float32") as llm:
        for temperature in (0.0, 0.9):
            params = SamplingParams(max_tokens=80, temperature=temperature, seed=3)
            answers += [BEGIN + output.outputs[0].text for output in llm.generate(prompts, params)]
    return answers


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), indent=0, ensure_ascii=False) + "\n")
