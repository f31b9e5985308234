"""Models in torch: configuration, layers, attention, weights."""
