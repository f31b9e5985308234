"""The router: the frontend over the fleet of groups of one service."""
