"""
Reasoning before an answer: its marks by model family, its readers, and its presentation to clients.

`families` defines the marks, and `formats` selects the format of a model. `reader` separates reasoning
between two marks from the answer; `harmony` and `described` read formats with more structure. `visibility`
reads the options of a request and applies them.
"""
