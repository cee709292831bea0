"""
Structured output: the tokens that may come next, so that an answer has the requested format.

`grammars` compiles each constraint once and creates a matcher for each answer; `matchers` contains the
matchers. `texts`, `ebnf` and `tags` translate constraints of clients into llguidance's language. `validator`
first compiles each constraint in a separate process, `validator_process`, because only a process can be
stopped during the compilation of a hostile constraint.
"""
