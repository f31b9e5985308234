"""Responses that a router stores, finds again, shares with other routers and checks."""
