"""
Reasoning before an answer: `formats` selects the format of a model and reads the options of a request.

`marked` reads reasoning between two marks; `harmony` and `described` read formats with more structure.
"""
