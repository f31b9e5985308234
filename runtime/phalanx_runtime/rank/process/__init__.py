"""The rank process: cgroup limits, heartbeat, joining the group."""
