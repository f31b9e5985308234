"""Sets up a checkout: cache, unpacked Debian packages, development environment. Standard library only."""
