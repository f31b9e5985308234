"""Real routers, links, leaders, schedulers and pages in virtual time, without a network."""
