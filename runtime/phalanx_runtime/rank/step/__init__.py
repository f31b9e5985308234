"""The tensors of one step, and the pipeline stages that compute it."""
