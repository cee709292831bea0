"""
Tools: those of a request, the calls that a model writes, and their form in answers.

`request` reads tools and the choice among them into a `Toolbox`; `families` has one `ToolFamily` for each way
in which models write calls: its reader turns an answer's text into words and calls, its grammar forces calls;
`shown` writes calls into answers; `told` tells models of tools whose templates cannot.
"""
