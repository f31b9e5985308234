"""`python -m tests.architectures [MODEL_TYPE ...]`: tries every causal model class of the installed `transformers`.

Each is tried in a process of its own, one at a time, with bounds on memory and time. The table goes into docs/architectures.md;
with names only their lines are renewed.
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
            print(f"{model_type:28} {outcome.status:8} {outcome.why}", flush=True)
    PAGE.write_text(render([rows[name] for name in sorted(rows)]))


if __name__ == "__main__":
    main(sys.argv[1:])
