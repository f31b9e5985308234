"""The spec of an InferenceService, as pydantic models."""
