"""The three programs as container images: for users by Dockerfile, for the test cluster as OCI archives."""
