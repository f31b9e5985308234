"""The scheduler: queue, policies, step composition, running requests and load reports."""
