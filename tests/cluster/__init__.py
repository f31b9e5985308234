"""Real Kubernetes in private namespaces of one machine, for tests and the demo: `python3 -m tests.cluster up`.

Two nodes with their own network, mount and PID namespaces. Standard library only: it runs before any environment exists.
"""
