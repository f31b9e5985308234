"""The OpenAI-compatible API server, which leaders and routers mount over their backends."""
