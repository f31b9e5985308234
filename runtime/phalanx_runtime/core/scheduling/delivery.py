"""Delivers tokens and vectors of a step: appends tokens to their requests, ends finished ones, builds the frame for the router.

A plan that the ranks could not compute is taken back instead.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from phalanx_api import wire
from phalanx_runtime.core.draft_tree import chain, draft_grades
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.kv.snapshots.sharing import SnapshotSharing
from phalanx_runtime.core.pace import MovingAverage
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.scheduling.policies import Policy
from phalanx_runtime.core.speculation.speculator import Speculator
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder
from phalanx_runtime.core.step_plan import StepResult


def misplaced_slots(first: int, accepted: Sequence[int]) -> list[int]:
    """Returns the slots of accepted nodes, from the first out of place on. Node 0 has slot `first`."""
    num_in_place = next((position for position, node in enumerate(accepted) if node != position), len(accepted))
    return [first + node for node in accepted[num_in_place:]]


class TokenDelivery:
    """Applies results to the requests of their steps. Ended requests have `has_ended`; the scheduler forgets them.

    output: mean number of output tokens of a finished request, updated here.
    """

    def __init__(self, policy: Policy, output: MovingAverage, sharing: PrefixSharing, speculator: Speculator) -> None:
        self.refused: list[wire.Refused] = []
        """Requests that the last result ended without a token."""
        self._policy = policy
        self._output = output
        self._sharing = sharing
        self._speculator = speculator

    def ended_handles(self, frame: wire.Tokens) -> list[int]:
        """Returns the requests that the result of `frame` ended."""
        return [end.handle for end in frame.finished] + [end.handle for end in self.refused]

    def deliver(self, builder: StepBuilder, result: StepResult, run_lengths: Sequence[int]) -> wire.Tokens:
        """Appends the tokens of a step to their requests. Returns the frame with them.

        `run_lengths`: tokens of each draw. Sets `refused`.
        """
        frame = wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[])
        self.refused = []
        _record_drafts(builder, result)
        _add_prompt_details(builder, result, frame)
        complete, already_complete = frozenset(result.complete), frozenset(result.already_complete)
        failed, accepted_nodes = dict(result.failed), dict(result.accepted)
        first = 0
        for draw, ((i, index), length) in enumerate(zip(builder.draws, run_lengths, strict=True)):
            chunk, run = builder.chunks[i], range(first, first + length)
            first += length
            if chunk.request.has_ended:
                continue
            if draw in already_complete:
                self._finish(chunk.request, "stop", frame)
            elif draw in failed:
                self._refuse(chunk.request, failed[draw])
            else:
                accepted = accepted_nodes.get(draw, range(length))[: length - 1]
                self._append(chunk, index, run, accepted, result=result, is_complete=draw in complete, frame=frame)
        for i, vector in result.vectors:
            if not builder.chunks[i].request.has_ended:
                self._finish(builder.chunks[i].request, "stop", frame, vector)
        return frame

    def _append(
        self,
        chunk: ScheduledChunk,
        index: int,
        run: range,
        accepted: Sequence[int],
        *,
        result: StepResult,
        is_complete: bool,
        frame: wire.Tokens,
    ) -> None:
        """Appends the result's tokens in `run`, up to the request's end. All but the last are `accepted` draft tokens."""
        request, num_kept = chunk.request, 0
        handle, epoch = request.params.handle, request.params.epoch
        cached_tokens = request.pages.cached_tokens
        if cached_tokens and not request.delivery.has_sampled:
            frame.cached.append(wire.Cached(handle, epoch, cached_tokens))
        request.delivery.has_sampled = True
        for position in run:
            token, num_kept = result.tokens[position], num_kept + 1
            request.tokens.append(token)
            self._policy.charge(request, 0, 1)
            if result.details:
                frame.details.append(result.details[position])
            frame.handles.append(handle)
            frame.epochs.append(epoch)
            frame.indices.append(index + num_kept - 1)
            frame.tokens.append(token)
            reason = "stop" if is_complete and position == run[-1] else request.finish_reason()
            if reason is not None:
                self._output.add(request.num_output)
                self._finish(request, reason, frame)
                break
        if accepted:
            request.num_computed += min(len(accepted), num_kept)
            request.pages.misplaced = misplaced_slots(chunk.end, accepted[:num_kept])
            self._sharing.record_accepted(chunk)
        chunk.num_gained = num_kept
        self._speculator.record_result(chunk, accepted, num_kept)

    def _finish(self, request: Request, reason: wire.FinishReason, frame: wire.Tokens, vector: bytes = b"") -> None:
        params = request.params
        frame.finished.append(wire.Finished(params.handle, params.epoch, reason, request.pages.cached_tokens, vector))
        request.has_ended = True

    def _refuse(self, request: Request, message: str) -> None:
        params = request.params
        self.refused.append(
            wire.Refused(handle=params.handle, epoch=params.epoch, status=400, code="nothing_to_draw", message=message)
        )
        request.has_ended = True


def _record_drafts(builder: StepBuilder, result: StepResult) -> None:
    shapes, undrafted = iter(result.shapes), dict(result.undrafted)
    for p, chunk in enumerate(chunk for chunk in builder.chunks if chunk.draft.is_drafted):
        draft = replace(chunk.draft, undrafted=frozenset(undrafted.get(p, ())))
        if draft.tree_bounds is not None:
            parents = next(shapes, chain(draft.depth))
            draft = replace(draft, parents=parents, grades=draft_grades(parents))
        chunk.draft = draft


def _add_prompt_details(builder: StepBuilder, result: StepResult, frame: wire.Tokens) -> None:
    """Adds undelivered prompt logprobs."""
    for i, start, details in result.prompt_details:
        request = builder.chunks[i].request
        delivery = request.delivery
        first = delivery.num_prompt_details + 1
        new = details[max(0, first - start) :]
        if new and not request.has_ended:
            delivery.num_prompt_details += len(new)
            frame.prompt_details.append(wire.PromptDetails(request.params.handle, request.params.epoch, first, new))


def take_back(builder: StepBuilder, running: Iterable[Request], sharing: PrefixSharing, lost_rows: Collection[int] = ()) -> None:
    """Undoes the latest plan in flight: pages count as before; later plans compute its tokens, and its strays again.

    The ranks applied the plan's pages and copies, and may have changed the state of its rows; so the next plan sends these rows
    with all their pages again. Snapshots that `lost_rows` loaded are dropped.
    """
    for chunk in builder.chunks:
        _take_back_chunk(chunk, sharing)
    for i, _ in builder.draws:
        builder.chunks[i].request.num_pending -= 1
    snapshots = sharing if isinstance(sharing, SnapshotSharing) else None
    for request in running:
        if snapshots is None:  # with states no request skips what this step was to write, and a state takes no token back
            sharing.writes.take_back(request, builder)
        if builder.drafted_pages:
            request.speculation.num_drafted_pages = 0  # counted again
    for page in builder.drafted_pages:
        sharing.pool.unmark_drafted(page)
    sharing.writes.unmark(builder)
    if snapshots is not None:
        snapshots.take_back(builder.step, [slot for row, slot in builder.state_loads if row in lost_rows])


def _take_back_chunk(chunk: ScheduledChunk, sharing: PrefixSharing) -> None:
    request, pages = chunk.request, chunk.request.pages
    request.in_flight -= 1
    request.num_computed = chunk.start - len(chunk.misplaced)  # strays too: their pages count as not written
    if chunk.draft.depth and len(pages.ids) > chunk.num_own_pages:
        sharing.pool.truncate(pages, chunk.num_own_pages)
    pages.num_sent, pages.must_truncate = 0, False
