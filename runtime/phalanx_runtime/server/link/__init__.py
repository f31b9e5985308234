"""The leader's side of the link to routers."""
