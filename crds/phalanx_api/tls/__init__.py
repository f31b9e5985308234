"""TLS of services, for operator and processes alike."""
