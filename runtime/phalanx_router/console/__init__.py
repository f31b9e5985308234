"""The console of a router: a page at `/ui`, and the data below `/ui/api/` that it shows."""
