"""
Structured output: which tokens may come next, so that an answer has the requested form.

`grammars` compiles a constraint once and gives each answer a matcher of its own; `matcher` and `thinking` are
the matchers; `texts`, `ebnf` and `tags` translate clients' constraints into llguidance's language.
`trial` is the process in which every constraint is tried first, since a hostile one cannot be stopped
in any other way.
"""
