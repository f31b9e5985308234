"""A fleet in virtual time: production routing and balancing over engines modelled by a step-time function."""
