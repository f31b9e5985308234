"""The leader's side of links."""
