"""Formats of tool calls and reasoning: parsers of streamed text, and which one a checkpoint uses."""
