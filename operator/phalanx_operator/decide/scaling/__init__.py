"""The number of groups: the autoscaler, demand, load and scale-down."""
