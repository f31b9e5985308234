"""Supervision of the rank processes.

Pods connect to the leader's supervisor (`rendezvous`). When a rank exits, hangs (`hang_detection`) or a pod's connection closes,
every pod kills its ranks and the next `incarnation` starts; the HTTP processes survive. A pod that is being evicted notifies its
leader; the group drains first.
"""
