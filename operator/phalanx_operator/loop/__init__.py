"""The reconcile loop."""
