"""A fleet in virtual time: routing and balance as they run in production, over engines modelled by their cost function."""
