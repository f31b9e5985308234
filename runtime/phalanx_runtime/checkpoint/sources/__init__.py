"""Remote model sources: hub, S3, GCS and OCI registries, and resumable downloads."""
