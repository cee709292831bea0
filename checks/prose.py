"""
Check the prose of the tree against the rules in CONTRIBUTING.md.

    python -m checks.prose                     compare the counts with checks/prose.toml
    python -m checks.prose PATH...             list the findings of files and folders
    python -m checks.prose --table             print the counts by package and rule
    python -m checks.prose --tighten           lower the recorded counts to today's
    python -m checks.prose --move FROM TO      hand the allowance of moved files to another package

Rules are tables of regular expressions with what to write instead. They read Markdown, docstrings, comments
and the product's messages; code in backticks is not prose. Names of tests and definitions are checked too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from checks import passages, ratchet, tree
from checks.passages import Passage
from checks.ratchet import Finding

RECORD = tree.ROOT / "checks" / "prose.toml"

SENTENCE_LIMIT = 30
"""Words of a sentence. Aim at 25."""

TEST_NAME_LIMIT = 60
"""Characters of a test's name."""

SUBJECT = re.compile(
    r"(?:^|;\s)(?P<found>(?:who|whoever|whom|whose|what|whatever|which|whichever|nobody|nothing|no one"
    r"|somebody|someone|everybody|everyone|anybody|anyone|(?:by|of|for|to|from|in|with|until|since|at|on) "
    r"(?:who|whom|whose|what|which|when|where))\b)",
    re.IGNORECASE,
)

WORDS = {
    r"nobody|somebody|everybody|anybody|whoever|whosoever": "name the actor",
    r"whom|whomever": "rewrite the clause with an actor",
    r"thereof|therein|thereby|therewith|thereupon|whereof|wherein|whereby|whereupon": "name the thing",
    r"lest": "so that … not",
    r"wherefore|hence|thence|whence|henceforth": "therefore, from here",
    r"told|tells|tell": "report, send, notify, distinguish",
    r"said": "reported, set, written",
    r"go(?:es)? on|went on|going on": "continue",
    r"lets? (?:\w+ )?go(?: of)?|letting (?:\w+ )?go": "release",
    r"for want of": "without",
    r"once more|anew": "again",
    r"in vain": "without success",
    r"by way of": "through",
    r"as it were|so to speak|for good": "delete it",
    r"speaks? of|speaking of": "refer to",
    r"h[eo]ld(?:s|ing)? (?:\w+ )?against": "compare with",
    r"(?:is|are|was|were) there(?! (?:a|an|any|no|one|is|are)\b)": "exists, is present",
    r"amidst|amongst|whilst|unto|upon": "in, among, while, to, on",
}
"""Private idiom and dated words, and what to write instead."""

GLOSSARY = {
    r"figures|tallies": "metrics, counters, usage",
    r"errands?": "admin operation",
    r"wish(?:es)?": "queue wake-up, request",
    r"verdicts?": "outcome",
    r"roster": "registry",
    r"patience": "first-byte timeout, idle timeout",
    r"rooms|(?:a|the|each|every|this|its|of|for|in) room": "transfer session",
    r"fronts|(?:a|the|each|every|of a|its) front": "frontend process, frontend pool",
    r"keepers?|(?:the|a|of its) door": "batch controller, runner gateway",
    r"permits": "token masks",
    r"readings": "prompt outputs",
    r"generations|(?:other|old(?:er)?|new(?:er)?|same|each|every|one|another|next) generation": "revision",
    r"aloneTokens|(?:workers?|served|serves?|computes?|prompts?) alone": "local prefill",
    r"(?:the|a|this) page of the router|router's page": "dashboard",
    r"sent away|sends? away|sending away": "rejected",
    r"looks? at objects|objects that wait": "reconciles, work queue depth",
    r"use of the budget": "burn rate",
    r"trials?": "rollout health",
}
"""The left column of the glossary, as far as the words have no other meaning in prose."""

BRITISH = (
    r"[a-z]*(?:colour|behaviour|favour|honour|neighbour|labour)[a-z]*|centres?|licence[sd]?|catalogues?|artefacts?|grey"
    r"|(?:token|normal|recogn|initial|organ|quant|optim|synchron|author|serial|summar|final|util|minim|maxim|general"
    r"|special|custom|standard|real|memor|priorit|parallel|local|categor)is(?:e|es|ed|er|ers|ing|ation|ations)"
    r"|analys(?:e|es|ed|ing)|labell(?:ed|ing)|modell(?:ed|ing)|travell(?:ed|ing)|afterwards|towards"
)

NEGATED = (
    r"(?:is|are|was|were|be|been|being|has|have|had|needs?|names?|gives?|wants?|takes?|finds?|gets?|makes?|knows?"
    r"|leaves?|holds?|keeps?|says?|sends?|does|become|becomes|there's) (?:none|no one)(?! of\b)"
    r"|(?<!there )(?:is|are|was|were) no (?!longer|more|less|fewer|different|better|worse|later)[a-z]+"
)

NAMES_BY_PART = re.compile(
    r"figures|tally|tallies|told|said|asked|errands?|wish|wishes|verdicts?|parity|roster|patience|permits|draws|"
    r"readings|guides|keeper|door|fronts?|tries|trial|tried|nobody|somebody|alone|whose|rooms?|knowledge"
)
"""Words that no part of a name may be."""

NAMES = re.compile(
    r"made|found|there|known|asks|spare|turns|places|ranking|following|observed|observer|line_up|native"
)
"""Names that say nothing about their value, when they stand alone."""

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SENTENCE_END = re.compile(
    r"(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.)(?<!\bcf\.)(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9])"
)
_TEST_FORM = re.compile(
    r"test_(?:the|a|an|what|who|whoever|nobody|nothing|no|none|every|each|one|it|its|there|only)_"
)


def _pattern(expression: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w`-])(?:{expression})(?![\w`-])", re.IGNORECASE)


_TABLES = tuple(
    (rule, _pattern(expression), advice)
    for rule, entries in (
        ("word", WORDS),
        ("glossary", GLOSSARY),
        ("negated-noun", {NEGATED: "negate the verb, or name the state: is invalid, is not set"}),
        ("spelling", {BRITISH: "use the American spelling"}),
    )
    for expression, advice in entries.items()
)


def check(passage: Passage) -> Iterator[tuple[int, str, str, str]]:
    """Yield line, rule, words and advice for each place of a passage that breaks a rule."""
    for begin, sentence in sentences(passage.text):
        first = passage.line + passage.text.count("\n", 0, begin)
        words = sum(any(sign.isalnum() for sign in word) for word in sentence.split())
        if words > SENTENCE_LIMIT:
            advice = f"{words} words: split it; at most {SENTENCE_LIMIT}"
            yield first, "sentence-length", " ".join(sentence.split()[:6]) + " …", advice
        question = sentence.rstrip("\"')").endswith("?")
        subject = None if question else SUBJECT.search(sentence)
        if subject:
            line = first + sentence.count("\n", 0, subject.start("found"))
            yield line, "subject", subject["found"], "begin with the actor or a noun phrase"
        if question and passage.kind == "error":
            yield first, "error-question", sentence, "report what failed, why, and what to do"
    text = passage.text.replace("\n", " ")
    for rule, pattern, advice in _TABLES:
        for match in pattern.finditer(text):
            yield passage.line + passage.text.count("\n", 0, match.start()), rule, match[0], advice


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """
    Yield the sentences of a passage and where they begin.

    >>> [sentence for _, sentence in sentences("Set it, e.g. X. Then wait.")]
    ['Set it, e.g. X.', 'Then wait.']
    """
    begin = 0
    for end in _SENTENCE_END.finditer(text):
        yield begin, text[begin : end.start()]
        begin = end.end()
    yield begin, text[begin:]


def names(path: str, source: str) -> Iterator[Finding]:
    """Find definitions and test names of a Python file that break a rule."""
    stem = path.rpartition("/")[2].removesuffix(".py")
    defined = [] if stem.startswith("test_") else [(1, stem)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            defined.append((node.lineno, node.name))
        elif isinstance(node, ast.arg):
            defined.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            defined.append((node.lineno, node.id if isinstance(node, ast.Name) else node.attr))
    for line, name in defined:
        if name.startswith("test_"):
            if len(name) > TEST_NAME_LIMIT:
                advice = (
                    f"{len(name)} characters; at most {TEST_NAME_LIMIT}, the story belongs in the docstring"
                )
                yield Finding(path, line, "test-name-length", name, advice)
            if _TEST_FORM.match(name):
                yield Finding(path, line, "test-name-form", name, "test_<unit>_<condition>_<expected>")
        elif NAMES.fullmatch(name.strip("_").lower()) or any(
            NAMES_BY_PART.fullmatch(part.lower()) for part in _PART.findall(name)
        ):
            yield Finding(path, line, "name", name, "name it by its value, in a word of the glossary")


def find() -> list[Finding]:
    """Check every file of the tree."""
    product = tuple(f"{folder}/" for folder in tree.packages())
    findings = []
    for path in tree.files():
        if path.startswith("checks/prose.") or path == "tests/test_prose.py":
            continue
        source = (tree.ROOT / path).read_text()
        for passage in passages.read(path, source, messages=path.startswith(product)):
            findings += [Finding(path, *finding) for finding in check(passage)]
        if path.endswith(".py"):
            findings += names(path, source)
    return findings


if __name__ == "__main__":
    sys.exit(ratchet.main(sys.argv[1:], RECORD, find))
