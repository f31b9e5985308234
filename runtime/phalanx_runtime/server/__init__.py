"""The HTTP process of a pod: the door over the local engine, the link to routers, the supervisor of the ranks."""
