"""The process of a rank: cgroup limits, heartbeat, and its place in the group."""
