"""Loading and unloading of adapters: in the HTTP process, and at rank 0."""
