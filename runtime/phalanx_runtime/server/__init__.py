"""The HTTP process of a pod."""
