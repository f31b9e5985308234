"""The Kubernetes API: client, informer and store."""
