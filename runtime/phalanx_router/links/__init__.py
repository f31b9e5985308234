"""Links to group leaders: discovery of leader pods, one WebSocket per leader, the pool of all links."""
