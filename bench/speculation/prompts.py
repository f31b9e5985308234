"""Prompts of four kinds that differ in how well drafts predict them, 4 of each.

All models with a window of more than 256 positions get the same prompts; others get a shorter report and class.
"""

from collections.abc import Mapping

STORY = [
    "Once upon a time there was a little fox who lived under an old oak tree. One morning the fox",
    "Lily had a red kite. She took it to the hill behind the house, where the wind was strong, and",
    "The old baker opened his shop before the sun was up. On this day a small bird sat at his window and",
    "Tom and his dog found a map in a bottle on the beach. The map showed a cave, so they",
]
CHAT = [
    "How do I keep basil alive on a windowsill in winter? Give me a few clear steps.",
    "Explain the difference between weather and climate to a ten year old child.",
    "What should I take along for two days of hiking in the mountains in October?",
    "My neighbour plays loud music at night. How do I talk to him without making him angry?",
]
_BRIDGE = (
    "The town council met on Tuesday evening to talk about the bridge over the river Senn. The bridge was built in 1931 and has "
    "carried lorries of up to thirty tonnes since it was made wider in 1968. Engineers who looked at it in spring found rust in "
    "four of the nine main beams and cracks in the northern pier. "
)
_PRICE = (
    "They advise the council to close the bridge to lorries at once "
    "and to all cars by the end of next year, unless the beams are replaced. New beams would cost 2.4 million, a new bridge 11 "
    "million. The mayor said that the town cannot pay for a new bridge alone, and that the region has promised to pay one third "
    "of it. Shop owners on the eastern bank said that a closed bridge would cost them half of their customers. "
)
_VOTE = (
    "The council voted "
    "to close the bridge to lorries from the first of the month and to ask for offers for new beams. It meets again in six weeks."
)


def _on_report(report: str) -> list[str]:
    return [
        f"Summarise the following report in three sentences.\n\n{report}",
        f"List the facts with numbers in the following report, one per line.\n\n{report}",
        f"Repeat the most important sentences of this report word for word.\n\n{report}",
        f"What did the council decide, and why? Quote the report.\n\n{report}",
    ]


_ACCOUNT = '''class Account:
    """Money of one customer, in cents."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        self.history.append(("deposit", amount))
'''
_WITHDRAW = """
    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        self.history.append(("withdraw", amount))

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)
"""


def _on_code(code: str) -> list[str]:
    return [
        f"Here is a Python class. Write it again with the attribute `balance` renamed to `cents`.\n\n```python\n{code}```",
        f"Here is a Python class. Write the whole class again with type hints on every method.\n\n```python\n{code}```",
        f"Here is a Python class. Write the whole class again and add a method `close`.\n\n```python\n{code}```",
        f"Here is a Python class. Copy it without the docstring.\n\n```python\n{code}```",
    ]


KINDS = {
    "story": STORY,
    "chat": CHAT,
    "summarising": _on_report(_BRIDGE + _PRICE + _VOTE),
    "editing": _on_code(_ACCOUNT + _WITHDRAW),
}
SHORT_KINDS = KINDS | {"summarising": _on_report(_BRIDGE + _VOTE), "editing": _on_code(_ACCOUNT)}
SHORT_WINDOW = 256
"""Largest context window with short prompts."""


def kinds_for(num_positions: int) -> Mapping[str, list[str]]:
    return KINDS if num_positions > SHORT_WINDOW else SHORT_KINDS
