"""The console of all services: a page that reads with the Kubernetes rights of its user."""
