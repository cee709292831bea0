"""
Structured output: which tokens may come next, so that an answer is of the form that was asked for.

`grammars` compiles a constraint once and hands out a fresh guide for each answer; `guides` and `thinking` are
the guides that the engine asks; `texts`, `ebnf` and `tags` put what clients write into llguidance's language;
`trial` is the process in which every constraint is tried out first, since a hostile one cannot be stopped
in any other way.
"""
