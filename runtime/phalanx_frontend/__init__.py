"""The API server, mounted by leaders and routers."""
