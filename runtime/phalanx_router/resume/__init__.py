"""Resuming a stream by `Last-Event-ID`: the registry of open streams, journal copies, and the protocol between routers."""
