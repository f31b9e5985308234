"""Set-up of a checkout: the cache outside it, Debian packages unpacked, the development environment. Standard library only."""
