"""
Limits of requests: every checked size, count and range, in one table.

Workers, the router, the OpenAPI description and the reference of limits read it. Both ends of a range are
valid. Values outside are rejected with the row's code. A test tries every row on both sides.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from baton_api.errors import (
    ARRAY_ABOVE_MAX_LENGTH,
    DECIMAL_ABOVE_MAX_VALUE,
    DECIMAL_BELOW_MIN_VALUE,
    EMPTY_ARRAY,
    INTEGER_ABOVE_MAX_VALUE,
    INTEGER_BELOW_MIN_VALUE,
    INVALID_FUNCTION_PARAMETERS,
    INVALID_VALUE,
    OBJECT_ABOVE_MAX_PROPERTIES,
    STRING_ABOVE_MAX_LENGTH,
    BodyTooLarge,
)


class Kind(enum.StrEnum):
    """The measure of a value that is limited. It determines the error code."""

    BYTES = "bytes"
    LEVELS = "levels"
    ITEMS = "items"
    PAIRS = "pairs"
    CHARACTERS = "characters"
    INTEGER = "integer"
    DECIMAL = "decimal"


_ABOVE = {
    Kind.BYTES: BodyTooLarge.code,
    Kind.LEVELS: None,
    Kind.ITEMS: ARRAY_ABOVE_MAX_LENGTH,
    Kind.PAIRS: OBJECT_ABOVE_MAX_PROPERTIES,
    Kind.CHARACTERS: STRING_ABOVE_MAX_LENGTH,
    Kind.INTEGER: INTEGER_ABOVE_MAX_VALUE,
    Kind.DECIMAL: DECIMAL_ABOVE_MAX_VALUE,
}
_BELOW = {
    Kind.ITEMS: EMPTY_ARRAY,
    Kind.CHARACTERS: INVALID_VALUE,
    Kind.INTEGER: INTEGER_BELOW_MIN_VALUE,
    Kind.DECIMAL: DECIMAL_BELOW_MIN_VALUE,
}


@dataclass(frozen=True, slots=True)
class Limit:
    """One row: `least` to `most`, both inclusive."""

    field: str
    """The field, as in `param` of the error."""
    kind: Kind
    most: int
    least: int = 0
    paths: str = "chat, completions"
    """Endpoints that check it."""
    note: str = ""
    status: int = 400
    open_below: bool = False
    """Whether `least` itself is invalid."""
    other_code: str | None = ""
    """Code for values above `most`, if it differs from the code of the kind."""

    @property
    def range(self) -> tuple[int, int]:
        return self.least, self.most

    @property
    def code(self) -> str | None:
        """Error code for values above `most`."""
        return _ABOVE[self.kind] if self.other_code == "" else self.other_code

    @property
    def code_below(self) -> str | None:
        """Error code for values below `least`. None: no value can be below."""
        return _BELOW.get(self.kind) if self.least or self.kind in _NUMBERS else None


_NUMBERS = (Kind.INTEGER, Kind.DECIMAL)

TENANT_SHARE = 0.8
"""Share that one tenant may fill, of the capacity (such as a queue) that other tenants do not use."""

TOKENS = 2**31 - 1
"""More tokens than any context length."""

# --- The request as a whole ---

HEAD = Limit("request line and headers", Kind.BYTES, 16 * 1024, paths="all", status=431, other_code=None)
BODY = Limit("body", Kind.BYTES, 4 * 1024 * 1024, paths="all", status=413)
DEPTH = Limit("body", Kind.LEVELS, 64, paths="all", note="objects and arrays within one another")
VALUES = Limit("body", Kind.ITEMS, 100_000, paths="all", other_code=None, note="objects, arrays and strings")
REQUEST_ID = Limit("rid, request_id", Kind.CHARACTERS, 128, paths="chat, completions, generate",
                   note="a longer `X-Request-Id` header is replaced by a new id")  # fmt: skip
ABORTS = Limit("rid", Kind.ITEMS, 1024, paths="abort_request")

# --- Input ---

MESSAGES = Limit("messages", Kind.ITEMS, 2048, 1, paths="chat")
PARTS = Limit("messages[].content", Kind.ITEMS, 2048, 1, paths="chat")
TOOL_CALLS = Limit("messages[].tool_calls", Kind.ITEMS, 128, paths="chat")
DOCUMENTS = Limit("documents", Kind.ITEMS, 1024, paths="chat")
PROMPTS = Limit("prompt", Kind.ITEMS, 1024, 1, paths="completions, tokenize, generate")
ALL_CHOICES = Limit("prompt, n", Kind.ITEMS, 1024, paths="completions, generate", other_code=None,
                    note="the product of both")  # fmt: skip
INPUTS = Limit("input", Kind.ITEMS, 2048, 1, paths="embeddings")
TOKEN_LISTS = Limit("tokens", Kind.ITEMS, 1024, paths="detokenize", note="where it is a list of lists")

# --- Sampling ---

TEMPERATURE = Limit("temperature", Kind.DECIMAL, 2)
TOP_P = Limit("top_p", Kind.DECIMAL, 1, note="0 is greedy")
MIN_P = Limit("min_p", Kind.DECIMAL, 1)
TOP_K = Limit("top_k", Kind.INTEGER, TOKENS, -1, note="-1 and 0 keep all")
PRESENCE_PENALTY = Limit("presence_penalty", Kind.DECIMAL, 2, -2)
FREQUENCY_PENALTY = Limit("frequency_penalty", Kind.DECIMAL, 2, -2)
REPETITION_PENALTY = Limit("repetition_penalty", Kind.DECIMAL, 10_000, open_below=True)
SAMPLING_NUMBERS = (TEMPERATURE, TOP_P, MIN_P, PRESENCE_PENALTY, FREQUENCY_PENALTY, REPETITION_PENALTY)
SEED = Limit("seed", Kind.INTEGER, 2**63 - 1, -(2**63))
LOGIT_BIAS = Limit("logit_bias", Kind.PAIRS, 300)
BIAS = Limit("logit_bias.*", Kind.DECIMAL, 100, -100)

# --- Number and length of outputs ---

N = Limit("n", Kind.INTEGER, 128, 1)
BEST_OF = Limit("best_of", Kind.INTEGER, 20, paths="completions", note="not below n")
MAX_TOKENS = Limit("max_tokens, max_completion_tokens", Kind.INTEGER, TOKENS, 1, paths="chat",
                   note="and what the context leaves: `context_length_exceeded`")  # fmt: skip
MAX_TOKENS_OR_NONE = Limit("max_tokens", Kind.INTEGER, TOKENS, 0, paths="completions",
                           note="and what the context leaves: `context_length_exceeded`")  # fmt: skip
THINKING_BUDGET = Limit(
    "thinking_token_budget", Kind.INTEGER, TOKENS, -1, paths="chat", note="-1 is any number"
)
MIN_TOKENS = Limit("min_tokens", Kind.INTEGER, TOKENS, note="not above the most tokens there can be")
STOPS = Limit("stop", Kind.ITEMS, 64, note="OpenAI's limit is 4; editors send more")
STOP = Limit("stop[]", Kind.CHARACTERS, 256, 1)
STOP_IDS = Limit("stop_token_ids", Kind.ITEMS, 256)
ALLOWED_IDS = Limit("allowed_token_ids", Kind.ITEMS, 16384, 1)
BAD_WORDS = Limit("bad_words", Kind.ITEMS, 256)
BAD_WORD = Limit("bad_words[]", Kind.CHARACTERS, 256, 1)

# --- Format of the output ---

CONSTRAINT = Limit("response_format, regex, ebnf, json_schema, structural_tag, structured_outputs, guided_*",
                   Kind.BYTES, 256 * 1024, other_code=INVALID_VALUE,
                   note="and what can be compiled in 2 s of processor time")  # fmt: skip
SCHEMA_NAME = Limit("response_format.json_schema.name", Kind.CHARACTERS, 64, 1)
CHOICES = Limit("structured_outputs.choice, guided_choice", Kind.ITEMS, 4096, 1)
WHITE_SPACE = Limit("structured_outputs.whitespace_pattern, guided_whitespace_pattern", Kind.CHARACTERS, 256)

# --- Logprobs ---

TOP_LOGPROBS = Limit("top_logprobs", Kind.INTEGER, 20, paths="chat")
LOGPROBS = Limit("logprobs", Kind.INTEGER, 20, paths="completions")
LOGPROB_IDS = Limit("logprob_token_ids", Kind.ITEMS, 128)
PROMPT_LOGPROBS = Limit("prompt_logprobs", Kind.INTEGER, 20, note="not in a stream")

# --- About the request ---

METADATA = Limit("metadata", Kind.PAIRS, 16, paths="chat", other_code=INVALID_VALUE)
METADATA_KEY = Limit("metadata (a key)", Kind.CHARACTERS, 64, paths="chat", other_code=INVALID_VALUE)
METADATA_VALUE = Limit("metadata.*", Kind.CHARACTERS, 512, paths="chat")
SAFETY_IDENTIFIER = Limit("safety_identifier", Kind.CHARACTERS, 64, paths="chat")
CACHE_SALT = Limit(
    "cache_salt", Kind.CHARACTERS, 128, 1, paths="chat, completions, responses, generate, embeddings"
)
MAX_TOOL_CALLS = Limit("max_tool_calls", Kind.INTEGER, TOKENS, 1, paths="responses")
ITEMS_PAGE = Limit("limit", Kind.INTEGER, 100, 1, paths="responses/{id}/input_items")
FILES_PAGE = Limit("limit", Kind.INTEGER, 10_000, 1, paths="files")
BATCHES_PAGE = Limit("limit", Kind.INTEGER, 100, 1, paths="batches")
EXPIRES_AFTER = Limit("expires_after[seconds], output_expires_after.seconds", Kind.INTEGER, 2_592_000, 3600,
                      paths="files, batches")  # fmt: skip
TEMPLATE_KWARGS = Limit("chat_template_kwargs", Kind.PAIRS, 32, paths="chat, tokenize",
                        other_code=INVALID_VALUE)  # fmt: skip

# --- Tools ---

TOOLS = Limit("tools", Kind.ITEMS, 1024, paths="chat")
FUNCTIONS = Limit("functions", Kind.ITEMS, 128, 1, paths="chat")
TOOL_NAME = Limit("tools[].function.name, functions[].name", Kind.CHARACTERS, 128, 1, paths="chat",
                  note="letters, digits, `_` and `-`; as long as in Anthropic's API and MCP")  # fmt: skip
TOOL_DESCRIPTION = Limit("tools[].function.description, functions[].description", Kind.CHARACTERS, 65_536,
                         paths="chat")  # fmt: skip
TOOL_SCHEMA = Limit("tools[].function.parameters, functions[].parameters", Kind.CHARACTERS, 131_072,
                    paths="chat", other_code=INVALID_FUNCTION_PARAMETERS, note="as JSON")  # fmt: skip


def table() -> dict[str, Limit]:
    """Return all rows by name, in the order of this module."""
    return {name: value for name, value in globals().items() if isinstance(value, Limit)}


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the columns of the reference: field, endpoints, minimum, maximum, error."""
    for limit in table().values():
        least = "" if not limit.least and limit.kind not in _NUMBERS else _shown(limit.least)
        beyond = " ".join(filter(None, (str(limit.status), limit.code and f"`{limit.code}`")))
        if limit.note:
            beyond = f"{beyond}; {limit.note}"
        yield f"`{limit.field}`", limit.paths, f"{'> ' * limit.open_below}{least}", _unit(limit), beyond


def _unit(limit: Limit) -> str:
    most = _shown(limit.most)
    return most if limit.kind in _NUMBERS else f"{most} {limit.kind}"


def _shown(number: int) -> str:
    """
    >>> _shown(2**31 - 1), _shown(-(2**63)), _shown(4 * 1024 * 1024), _shown(20)
    ('2^31 - 1', '-2^63', '4,194,304', '20')
    """
    size = abs(number)
    sign = "-" if number < 0 else ""
    for extra, tail in ((0, ""), (1, " - 1")):
        power = size + extra
        if power >= 2**31 and not power & (power - 1):
            return f"{sign}2^{power.bit_length() - 1}{tail}"
    return f"{number:,}"
