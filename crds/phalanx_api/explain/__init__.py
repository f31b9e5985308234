"""What limits a service: findings from summaries of routers, the cost model, spec and status. Pure."""
