"""The table of a view's cost, for benchmarks of views."""

import statistics
from collections.abc import Sequence

from bench.frame.figures import table

FRAME_BOUND_S, CPU_BOUND = 0.1, 0.01


def print_costs(title: str, frame_s: Sequence[float], router_s: Sequence[float], period_s: float) -> int:
    """Prints what a frame and the router's part of it cost; returns the exit status, 1 if a median reaches its bound.

    `frame_s`: seconds of each frame; `router_s`: CPU seconds of the router for each; `period_s`: between frames.
    """
    frame, cpu = statistics.median(frame_s), statistics.median(router_s) / period_s
    rows = [
        ["a frame", f"{frame * 1e3:.1f} ms", f"{max(frame_s) * 1e3:.1f} ms", f"below {FRAME_BOUND_S * 1e3:.0f} ms"],
        ["router CPU", f"{cpu:.2%} of a core", f"{max(router_s) / period_s:.2%}", f"below {CPU_BOUND:.0%}"],
    ]
    print(table([title, "median", "most", "bound"], rows))
    return int(frame >= FRAME_BOUND_S or cpu >= CPU_BOUND)
