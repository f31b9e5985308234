"""GPU figures: a model of the limit, and measurements where a GPU is at hand."""
