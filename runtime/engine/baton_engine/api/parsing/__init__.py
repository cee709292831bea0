"""Conversion of generated text to messages: reasoning, text and tool calls."""
