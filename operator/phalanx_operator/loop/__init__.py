"""The reconcile loop: wakeups, workers, one reconcile per key."""
