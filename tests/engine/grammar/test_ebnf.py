"""EBNF as SGLang and llama.cpp write it means the same here."""

from __future__ import annotations

import pytest

from baton_engine.grammar import ebnf
from tests.engine.grammar.tokenizers import takes

JSON = r"""
# as in llama.cpp's folder of grammars
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

CASES = {
    "a choice": ('root ::= "yes" | "no"', ["yes", "no"], ["", "ye", "yesno"]),
    "repetitions": (
        'root ::= "a"* "b"+ "c"? "d"{2} "e"{1,} "f"{0,2}',
        ["bdde", "aabcddeeff"],
        ["add", "bde"],
    ),
    "groups": ('root ::= ("a" | "b" "c"){2}', ["aa", "bca", "bcbc"], ["a", "abab"]),
    "ways on lines of their own": ('root ::=\n    "a"\n  | "b"\n', ["a", "b"], ["ab"]),
    "rules that follow each other on a line": ('root ::= x y x ::= "1" y ::= "2"', ["12"], ["1"]),
    "comments": ('# "x"\nroot ::= "a" # | "b"\n  "c"', ["ac"], ["a", "b"]),
    "escapes": (r'root ::= "\n\t\"\\\x41\u00e9\U0001F642"', ['\n\t"\\Aé🙂'], ["n"]),
    "sets": (r"root ::= [a-c\]\-é] [^a-z\n]", ["aA", "]9", "-é", "é "], ["dA", "ab", "a\n"]),
    "a hyphen at the edge": ("root ::= [-a] [b-]", ["-b", "a-"], ["b-"]),
    "any character": ('root ::= . "x"', ["ax", "\nx", "🙂x"], ["x"]),
    "nothing": ('root ::= ""', [""], ["a"]),
    "what comes again inside itself": ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "x)"]),
    "recursion to the left": ('root ::= root "+" n | n\nn ::= [0-9]+', ["1", "1+22+3"], ["1+", "+1"]),
    "names with hyphens and capitals": (
        'root ::= my-Rule\nmy-Rule ::= Other_1\nOther_1 ::= "a"',
        ["a"],
        ["b"],
    ),
    "one literal that begins another": ('root ::= ("a" | "ab") "b"', ["ab", "abb"], ["a"]),
    "a run that could take what follows": ('root ::= [a-z]+ "b"', ["ab", "bb", "aabb"], ["b", "a"]),
    "very many ways beside one that recurs": (
        "root ::= " + " | ".join(f'"w{number}."' for number in range(3000)) + ' | "(" root ")"',
        ["w0.", "(w2999.)"],
        ["w3000.", "(w1."],
    ),
    "JSON": (JSON, ['{"a": [1, -2.5e3, {"b": null}], "c": "x\\n"}', "{}"], ['{"a" 1}', "[]", '{"a": tru}']),
}


@pytest.mark.parametrize("case", CASES)
def test_ebnf_grammar_accepts_its_language_only(case: str) -> None:
    source, good, bad = CASES[case]
    assert [text for text in good if not takes("ebnf", source, text)] == []
    assert [text for text in bad if takes("ebnf", source, text)] == []


WRONG = {
    "an open literal": ('root ::= "a', "line 1"),
    "an open set": ("\nroot ::= [a", "line 2"),
    "an open parenthesis": ('root ::= ("a"', "not closed"),
    "too many parentheses": ("root ::= " + "(" * 100, "deeper than 64"),
    "another sign of definition": ('root = "a"', "unexpected '='"),
    "no definition": ('"a"', "expected a rule: its name"),
    "an unknown rule": ("root ::= other", "'other' is not defined"),
    "no root": ('main ::= "a"', "the rule 'root' is missing"),
    "nothing at all": ("", "the rule 'root' is missing"),
    "a rule twice": ('root ::= "a"\nroot ::= "b"', "defined twice"),
    "an empty set": ("root ::= []", "empty"),
    "an empty range": ("root ::= [z-a]", "is empty"),
    "half a character": (r'root ::= "\ud800"', "not a valid character"),
}


@pytest.mark.parametrize("case", WRONG)
def test_ebnf_invalid_grammar_is_rejected_with_the_reason(case: str) -> None:
    source, reason = WRONG[case]
    with pytest.raises(ebnf.EbnfError) as error:
        ebnf.to_lark(source)
    assert reason in str(error.value)
