"""Runs a trial in a separate process with bounds on time and memory.

The fork server imports torch and transformers once for all trials.
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
    """Runs one trial in a separate process."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(model_type, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT_S):
            return Outcome("failed", f"no result within {LIMIT_S:.0f} s")
        outcome: Outcome = receiver.recv()
        return outcome
    except EOFError:
        process.join()
        return Outcome("failed", f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _try(model_type: str, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    sender.send(try_model(model_type))
