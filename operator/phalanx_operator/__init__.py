"""The operator: reconciles InferenceService objects into groups, a router and the objects around them."""
