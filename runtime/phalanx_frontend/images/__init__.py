"""Images of chats: reads them within bounds, and makes the tiles and placeholder tokens of a model."""
