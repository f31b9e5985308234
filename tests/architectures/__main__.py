"""Tries each causal model class of the installed `transformers` and writes docs/architectures.md.

Each trial has its own process with bounds on memory and time. With model types as arguments, only their rows are updated.
"""

import multiprocessing
import sys

from tests.architectures.apart import try_apart
from tests.architectures.table import PAGE, Row, causal_classes, read, render


def main(names: list[str]) -> None:
    """Runs the trials and writes the table."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.architectures.apart"])
    rows = read(PAGE.read_text()) if names else {}
    for class_name, model_type in causal_classes().items():
        if not names or model_type in names:
            outcome = try_apart(context, model_type)
            rows[class_name] = Row(class_name, model_type, outcome)
            print(f"{model_type:28} {outcome.status:8} {outcome.reason}", flush=True)
    PAGE.write_text(render([rows[name] for name in sorted(rows)]))


if __name__ == "__main__":
    main(sys.argv[1:])
