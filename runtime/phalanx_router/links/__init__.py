"""Links to group leaders: discovery of leader pods, one WebSocket per leader, and the pool of all links."""
