"""The Responses API: requests, events, the conversation store."""
