"""OpenAI's Responses API over the chat of `phalanx_frontend.openai`, and the store of its conversations."""
