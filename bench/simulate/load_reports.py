"""Load reports of a simulated group, in the engine's format."""

from dataclasses import astuple

from bench.simulate.cache import PAGE
from bench.simulate.engine import Engine
from bench.simulate.jobs import Job
from phalanx_api import wire
from phalanx_api.cost import attention_work
from phalanx_router.balancing.records import StreamView
from phalanx_router.routing.view_builder import scale_model

AVERAGE_WEIGHT = 1 / 20
DISTANT_STEPS = 200


class Reporter:
    """Builds the load reports of one group."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.last_handle = 0
        self._sequence = 0
        self._prompt_per_step = 0.0
        self.output = 0.0
        """Moving average of output lengths."""
        self._slowness = 1.0

    def step_finished(self, ended: list[Job]) -> None:
        self._prompt_per_step += AVERAGE_WEIGHT * (self.engine.last_work.prefill_tokens - self._prompt_per_step)
        self._slowness += AVERAGE_WEIGHT * (self.engine.slow - self._slowness)
        for job in ended:
            self.output += AVERAGE_WEIGHT * (job.output_tokens - self.output) if self.output else job.output_tokens

    def load(self) -> wire.Load:
        """Returns the current report. Its step model is the true one, scaled by recent slowness."""
        engine, pages, model = self.engine, self.engine.pages, self.engine.shape.model
        self._sequence += 1
        uncached = [job.tokens - pages.hit_blocks(job) * pages.block_tokens for job in engine.waiting]
        attention = [attention_work(job.tokens, job.tokens - count) for job, count in zip(engine.waiting, uncached, strict=True)]
        attention += [attention_work(job.tokens, job.computed) for job in engine.prefills]
        return wire.Load(
            waiting=len(engine.waiting),
            running=engine.running,
            outstanding_tokens=sum(uncached),
            free_pages=pages.free,
            total_pages=pages.total,
            preemptions=engine.preemptions,
            pages_evicted=pages.evicted * pages.block_pages,
            step_model=list(astuple(scale_model(model, self._slowness))),
            sequence=self._sequence,
            last_handle=self.last_handle,
            reserved_pages=pages.reserved,
            waiting_prompt_tokens=sum(uncached),
            running_prompt_tokens=sum(job.tokens - job.computed for job in engine.prefills),
            waiting_pages=sum(-(-count // PAGE) for count in uncached),
            context_tokens=engine.context_tokens,
            step_s=engine.last_step_s,
            longest_step_s=engine.last_step_s,
            prompt_tokens_per_step=self._prompt_per_step,
            recomputed_tokens=engine.recomputed,
            steps_to_full=self._steps_to_full(),
            mean_output_tokens=self.output,
            max_num_batched_tokens=engine.shape.max_num_batched_tokens,
            max_num_seqs=engine.shape.max_num_seqs,
            prompt_attention=sum(attention),
        )

    def _steps_to_full(self) -> float | None:
        """Returns the expected steps until the pages are full; the lower bound if that is far off."""
        bound = self.engine.steps_to_full()
        return bound if bound is None or bound > DISTANT_STEPS else self.engine.expected_to_full(self.output)


def stream_of(job: Job, key: str, context: int) -> StreamView:
    return StreamView(
        stream=str(job.number),
        key=key,
        context=context,
        generated=context - job.prompt_tokens,
        num_moves=job.moves,
        moved_at=job.moved_s,
        last_source=job.last_source,
    )
