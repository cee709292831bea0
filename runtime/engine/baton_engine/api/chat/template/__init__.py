"""Conversations to prompts, by a model's chat template: a program, which runs in bounds."""
