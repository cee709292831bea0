"""
Reasoning before an answer: how each model family marks it, and how clients get it.

`families` names the marks, `reader` tells thoughts from the answer, `harmony` and `described` do so for
models that mark more than thoughts, and `wishes` reads what a request has to say about it.
"""
