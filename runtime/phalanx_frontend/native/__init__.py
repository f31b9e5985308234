"""The native API: /v1/generate, /v1/batch and /v1/metrics."""
