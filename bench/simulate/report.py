"""The reports of a simulated group: the same record that an engine sends to routers."""

from dataclasses import astuple

from bench.simulate.cache import PAGE
from bench.simulate.engine import Engine
from bench.simulate.jobs import Job
from phalanx_api import wire
from phalanx_api.cost import attended
from phalanx_router.balancing.records import StreamView
from phalanx_router.routing.look import scale_model

FOLLOWED = 1 / 20
FAR_STEPS = 200


class Reporter:
    """Follows one group's steps, and makes its reports."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.last_handle = 0
        self._sequence = 0
        self._prompt_per_step = 0.0
        self.output = 0.0
        """Output tokens that requests had lately."""
        self._speed = 1.0

    def stepped(self, ended: list[Job]) -> None:
        """A step was computed."""
        self._prompt_per_step += FOLLOWED * (self.engine.last_work.prefill_tokens - self._prompt_per_step)
        self._speed += FOLLOWED * (self.engine.slow - self._speed)
        for job in ended:
            self.output += FOLLOWED * (job.output_tokens - self.output) if self.output else job.output_tokens

    def load(self) -> wire.Load:
        """What the group has in hand now. Its fitted step model is its true one, times how slow it has been lately."""
        engine, pages, model = self.engine, self.engine.pages, self.engine.shape.model
        self._sequence += 1
        missing = [job.tokens - pages.hit_blocks(job) * pages.block_tokens for job in engine.waiting]
        behind = [attended(job.tokens, job.tokens - count) for job, count in zip(engine.waiting, missing, strict=True)]
        behind += [attended(job.tokens, job.computed) for job in engine.prefills]
        return wire.Load(
            waiting=len(engine.waiting),
            running=engine.running,
            outstanding_tokens=sum(missing),
            free_pages=pages.free,
            total_pages=pages.total,
            preemptions=engine.preemptions,
            pages_evicted=pages.evicted * pages.block_pages,
            step_model=list(astuple(scale_model(model, self._speed))),
            sequence=self._sequence,
            last_handle=self.last_handle,
            reserved_pages=pages.reserved,
            waiting_prompt_tokens=sum(missing),
            running_prompt_tokens=sum(job.tokens - job.computed for job in engine.prefills),
            waiting_pages=sum(-(-count // PAGE) for count in missing),
            context_tokens=engine.context_tokens,
            step_s=engine.last_step_s,
            longest_step_s=engine.last_step_s,
            prompt_tokens_per_step=self._prompt_per_step,
            recomputed_tokens=engine.recomputed,
            steps_to_full=self._steps_to_full(),
            mean_output_tokens=self.output,
            max_num_batched_tokens=engine.shape.max_num_batched_tokens,
            max_num_seqs=engine.shape.max_num_seqs,
            prompt_attended=sum(behind),
        )

    def _steps_to_full(self) -> float | None:
        """As requests are expected to end; where that is far off, the bound that costs nothing."""
        least = self.engine.steps_to_full()
        return least if least is None or least > FAR_STEPS else self.engine.expected_to_full(self.output)


def stream_of(job: Job, key: str, context: int) -> StreamView:
    """A running request as balancing sees it."""
    return StreamView(
        stream=str(job.number),
        key=key,
        context=context,
        generated=context - job.prompt_tokens,
        moves=job.moves,
        moved_s=job.moved_s,
        left=job.left,
    )
