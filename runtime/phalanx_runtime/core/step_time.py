"""The time of a step that computes, without waits for copies between device and host memory. All times are seconds."""


def computing_s(wall_s: float, copy_wait_s: float, busy_s: float) -> float:
    """Returns the part of a step's time that computes, which the cost model learns from.

    copy_wait_s: time of the host in waits for copies. busy_s: of the device's own computation, which may overlap with a wait.
    """
    return max(wall_s - copy_wait_s, min(busy_s, wall_s))
