"""The HTTP process of a pod: API server over the local engine, link to routers, supervisor of the ranks."""
