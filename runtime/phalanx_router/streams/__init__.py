"""Client streams: the token stream of a request, its journal, and traffic windows."""
