"""Adapters of a rank: the tokens of a step by adapter, and loads on all ranks between two steps, by all of them or none.

Ranks of a stage exchange their reasons, each stage passes the first one to the next, and the sampling rank sends it to rank 0.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from phalanx_runtime.checkpoint.adapter import adapter_hash
from phalanx_runtime.core.step_plan import AdapterOrder, AdapterResult
from phalanx_runtime.engine.ports import MAY_PASS
from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.step_inputs import PIECE, StepAdapters
from phalanx_runtime.model.copies import Array
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.model.protocol import Model
from phalanx_runtime.rank.step.pipeline import Pipeline

log = logging.getLogger(__name__)
WHY_BYTES = 512
"""Longest reason that ranks exchange."""
_INTEGER_BYTES = 8
Upload = Callable[[Sequence[Array]], list[Tensor]]


class RankAdapters:
    """The adapters of one rank. On rank 0 it implements `engine.ports.AdapterLoader`; others `execute`. Raises PeerLost."""

    def __init__(self, model: Model, pipeline: Pipeline) -> None:
        self._adapters = model.adapters if isinstance(model, Decoder) else None
        self._pipeline = pipeline

    def load(self, slot: int, path: str, content_hash: str) -> str:
        """Loads an adapter on all ranks, while no plan is in flight. Returns why it is not loaded; empty if it is."""
        order = AdapterOrder(slot, path, content_hash)
        self._pipeline.send_order(order)
        why = self._load(order)
        return why if self._pipeline.is_sampling_rank else self._pipeline.next_adapter_result().why

    def execute(self, order: AdapterOrder) -> None:
        """Loads this rank's part; the sampling rank sends the result."""
        why = self._load(order)
        if self._pipeline.is_sampling_rank:
            self._pipeline.send_result(AdapterResult(why))

    def _load(self, order: AdapterOrder) -> str:
        """Returns the first reason of this stage and those before it."""
        pipeline, stage = self._pipeline, self._pipeline.stage
        reasons = [_text(numbers) for numbers in pipeline.peers.all_gather_integers(_numbers(self._read(order)))]
        if not stage.is_first:
            received = pipeline.receive_from_previous(torch.zeros(WHY_BYTES // _INTEGER_BYTES, dtype=torch.int64))
            reasons.insert(0, _text(received.tolist()))
        why = next((reason for reason in reasons if reason), "")
        if not stage.is_last:
            pipeline.send_to_next(torch.tensor(_numbers(why)))
        return why

    def _read(self, order: AdapterOrder) -> str:
        if self._adapters is None:
            return "the model has no slots for adapters"
        content_hash = ""
        try:
            content_hash = adapter_hash(Path(order.path))
            if content_hash != order.content_hash:  # page keys have the hash
                return f"{MAY_PASS}{order.path} has changed since its content was hashed, or differs between the pods"
            self._adapters.load(order.slot, Path(order.path))
        except ModelError as error:
            return str(error) if content_hash else f"{MAY_PASS}{error}"
        except Exception as error:  # a broken file must not end the group
            log.exception("an adapter cannot be read", extra={"path": order.path})
            return f"{MAY_PASS}{order.path} cannot be read: {error!r}"
        return ""


def _numbers(text: str) -> list[int]:
    """Returns the start of a text as 64-bit integers, equally many for each text."""
    padded = text.encode()[:WHY_BYTES].ljust(WHY_BYTES, b"\0")
    return [int.from_bytes(padded[at : at + _INTEGER_BYTES], "little", signed=True) for at in range(0, WHY_BYTES, _INTEGER_BYTES)]


def _text(numbers: Sequence[int]) -> str:
    content = b"".join(number.to_bytes(_INTEGER_BYTES, "little", signed=True) for number in numbers)
    return content.rstrip(b"\0").decode(errors="ignore")


def adapter_rows(slots: Sequence[int], counts: Sequence[int], upload: Upload) -> StepAdapters | None:
    """Returns the tokens with an adapter, if there are any. `slots`: of each request in packed order, from 1; 0: none.

    `counts`: tokens of each.
    """
    slot_of = np.repeat(np.asarray(slots, np.int64), counts)
    rows = np.argsort(slot_of, kind="stable")[np.count_nonzero(slot_of == 0) :]
    if not len(rows):
        return None
    present, firsts = np.unique(slot_of[rows], return_index=True)
    stops = [*firsts[1:].tolist(), len(rows)]
    pieces = [
        (slot - 1, start, min(start + PIECE, stop))
        for slot, first, stop in zip(present.tolist(), firsts.tolist(), stops, strict=True)
        for start in range(first, stop, PIECE)
    ]
    uploaded = upload([rows, np.asarray(pieces, np.int64), slot_of - 1])
    return StepAdapters(rows=uploaded[0], pieces=pieces, table=uploaded[1], slots=uploaded[2])
