"""Programs that use one client each, in an environment of its own: only the address, the key and the model are ours."""
