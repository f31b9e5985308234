"""Container images of the three programs: Dockerfiles for users, OCI archives for the test cluster."""
