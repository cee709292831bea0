"""
What models think before they speak: how each family marks it, and how clients want to see it.

`families` names the marks, `reader` tells thoughts from the answer, `harmony` and `described` do so for
models that mark more than thoughts, and `wishes` reads what a request has to say about it.
"""
