"""Anthropic's Messages API over the chat of `phalanx_frontend.openai`."""
