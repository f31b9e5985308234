"""WebSocket messages with binary frames only."""

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect


async def receive_binary(websocket: WebSocket) -> bytes:
    """Returns the next message. Raises WebSocketDisconnect and msgspec.DecodeError."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"], message.get("reason"))
    data = message.get("bytes")
    if not isinstance(data, bytes):
        raise msgspec.DecodeError("a text message; send binary messages only")
    return data
