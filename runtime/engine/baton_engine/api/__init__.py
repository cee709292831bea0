"""The OpenAI API of one worker: text in and out of an engine that knows tokens only."""
