"""Routers and groups in virtual time: the real fleet, links, journals and machines, the real scheduler and pages, no network."""
