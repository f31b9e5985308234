"""HTTP of a pod: the application, metrics and health."""
