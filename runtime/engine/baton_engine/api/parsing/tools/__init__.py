"""
Tools: the tools of a request, and the calls in a model's text.

`request` reads tools and the tool choice into a `Toolbox`. `families` lists the formats of calls. Each format
is a `ToolFamily`: its reader converts text to calls, and its grammar forces calls. `source` is the text of a
reader, `arguments` and `tagged_arguments` read arguments, and `grammar` writes grammars.
"""
