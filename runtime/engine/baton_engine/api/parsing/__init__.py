"""From generated text to messages: reasoning, tool calls, and what is shown of them."""
