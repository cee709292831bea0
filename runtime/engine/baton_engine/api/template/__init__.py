"""Rendering of conversations to prompts by chat templates, which are programs and run with limits."""
