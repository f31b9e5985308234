"""Supervision of the rank processes: rendezvous of the pods, incarnations, hang detection."""
