"""Messages of a WebSocket whose peers speak bytes only."""

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect


async def receive_binary(websocket: WebSocket) -> bytes:
    """The next message. Raises WebSocketDisconnect, and msgspec.DecodeError for a text message."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"], message.get("reason"))
    data = message.get("bytes")
    if not isinstance(data, bytes):
        raise msgspec.DecodeError("a text message")
    return data
