"""Supervision of the rank processes: rendezvous of the pods, incarnations, hang detection.

The supervisor is part of each pod's HTTP process. Pods connect to the leader's supervisor (`rendezvous`); both sides prove the
token and the key of their StatefulSet. `incarnation` decides, as a pure function, when the group starts and ends; `pod` resolves
the model; `ranks` starts and kills the rank processes, each with a RankSpec on stdin.

All ranks end together: when a rank process exits or a supervisor's connection closes, the leader's supervisor ends the
incarnation in every pod and the next incarnation starts. The HTTP processes survive. A rank without a heartbeat, or with a step
beyond its timeout, counts as exited (`hang_detection`). A pod that is being evicted notifies its leader; the group drains, then
the incarnation ends.
"""
