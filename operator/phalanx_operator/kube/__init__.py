"""The Kubernetes API: client, informer, store and events."""
