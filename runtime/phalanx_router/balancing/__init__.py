"""Which groups are in trouble and which running requests go elsewhere: pure, time is an argument. Effects are the router's."""
