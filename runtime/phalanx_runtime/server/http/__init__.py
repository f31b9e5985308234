"""HTTP application of a pod."""
