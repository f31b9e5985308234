"""A trial in a process of its own, with bounds on its time and memory.

What all trials need of torch and transformers is loaded once, in the server that forks their processes.
"""

import resource
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
import transformers
from transformers.models.llama import modeling_llama as modeling_llama

from tests.architectures.trial import Outcome, try_model

LIMIT_S = 180.0
MEMORY_BYTES = 6 << 30


def try_apart(context: ForkServerContext, model_type: str) -> Outcome:
    """The outcome of one trial, in a process of its own."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(model_type, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            return Outcome("failed", f"no result within {LIMIT_S:.0f} s")
        outcome: Outcome = ours.recv()
        return outcome
    except EOFError:
        process.join()
        return Outcome("failed", f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _try(model_type: str, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    answer.send(try_model(model_type))
