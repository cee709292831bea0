"""
Parameters that all generating endpoints share: sampling, stopping and output.

This module applies ranges, defaults and extensions. It rejects fields of unsupported features by name,
because a client would not notice that such a field was ignored.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from baton_api import limits
from baton_api.errors import INTEGER_ABOVE_MAX_VALUE, UNSUPPORTED_PARAMETER, InvalidRequest
from baton_api.sampling import SamplingParams
from baton_engine.api.fields import Fields, integer, number, shown, wrong_type
from baton_engine.api.streaming import Streaming
from baton_engine.api.structured_output import read_constraint
from baton_engine.model.checkpoint import SamplingDefaults
from baton_engine.settings import WorkerSettings

GREEDY_BELOW = 1e-5
"""Lower temperatures select greedy decoding, because a division by them overflows."""

WEAKEST_PENALTY = 1e-4
"""Lower bound of the repetition penalty. It makes repetition certain; smaller values overflow logits."""

UNSUPPORTED = (
    "custom_logit_processor", "custom_params", "use_beam_search", "truncate_prompt_tokens",
    "stop_regex", "lora_path", "prompt_embeds", "return_hidden_states", "priority", "vllm_xargs",
    "extra_key",
)  # fmt: skip
"""Fields of unsupported features and of other servers."""

CHAT_ONLY = (
    "documents", "input_ids", "prompt_token_ids", "thinking_token_budget", "separate_reasoning",
    "chat_template",
)  # fmt: skip
"""Fields of chat completions only."""


_UNCHANGED = SamplingParams()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids that a request may contain."""

    size: int
    eos_ids: tuple[int, ...]
    encode: Callable[[str, bool], Sequence[int]]
    """Tokenizes a text. The flag adds the tokenizer's special tokens."""


def _random_seed() -> int:
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values of parameters that a request omits. `baton_engine.settings` configures them."""

    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    seeds: Callable[[], int] = _random_seed
    """Returns the seed of a request without one, 0 to 2**64 - 1. Called from several threads."""
    include_usage: bool = False
    """Whether streams end with their usage."""


def defaults_of(settings: WorkerSettings, sampling: SamplingDefaults) -> Defaults:
    """Return the defaults of a worker. With `settings.seed`, a sequence of seeds begins."""
    if settings.seed is None:
        return Defaults(sampling=sampling, include_usage=settings.stream_include_usage)
    return Defaults(
        sampling=sampling,
        include_usage=settings.stream_include_usage,
        seeds=partial(random.Random(settings.seed).getrandbits, 64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Validated parameters of a request."""

    sampling: SamplingParams
    """Sampling of all choices; `choice` sets seed and max_tokens."""
    n: int
    seed: int
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    eos_ids: frozenset[int]
    """Ids that end a sequence and are not reported as a stop match."""
    streaming: Streaming
    return_token_ids: bool
    tokens_as_ids: bool = False
    """Whether logprobs name tokens by id."""

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives per token in the response, besides the sampled one. None: no logprobs."""
        return len(self.sampling.logprob_ids) or self.sampling.logprobs

    def choice(self, number: int, max_tokens: int) -> SamplingParams:
        """
        Return the sampling of choice `number`, with its own random stream.

        Choice 0 uses the request's seed, so that it does not depend on n. It also computes the prompt's
        logprobs.
        """
        seed = self.seed
        if number:
            digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest)
        prompt_logprobs = None if number else self.sampling.prompt_logprobs
        return replace(self.sampling, seed=seed, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)


def parse(fields: Fields, logprobs: int | None, vocabulary: Vocabulary, defaults: Defaults) -> Parameters:
    """Read the shared parameters. `logprobs` is the number of alternatives that the endpoint read."""
    reject_unsupported(fields, UNSUPPORTED)
    sampling = defaults.sampling
    numbers = _numbers(fields, sampling)
    top_k = fields.integer("top_k", *limits.TOP_K.range)
    ignore_eos = fields.boolean("ignore_eos")
    eos_ids = frozenset(() if ignore_eos else vocabulary.eos_ids)
    seed = fields.integer("seed", *limits.SEED.range)
    streaming = _streaming(fields, defaults.include_usage)
    return Parameters(
        sampling=SamplingParams(
            **numbers,
            top_k=sampling.top_k if top_k is None else max(top_k, 0),
            logit_bias=_logit_bias(fields, vocabulary.size),
            logprobs=logprobs,
            logprob_ids=_logprob_ids(fields, logprobs, vocabulary.size),
            prompt_logprobs=_prompt_logprobs(fields, streaming),
            min_tokens=fields.integer("min_tokens", *limits.MIN_TOKENS.range) or 0,
            allowed_ids=_allowed_ids(fields, vocabulary.size),
            bad_words=_bad_words(fields, vocabulary),
            stop_ids=eos_ids | _stop_ids(fields, vocabulary.size),
            constraint=read_constraint(fields),
        ),
        n=fields.integer("n", *limits.N.range) or 1,
        seed=defaults.seeds() if seed is None else seed % 2**64,
        stops=_stops(fields),
        include_stop=fields.boolean("include_stop_str_in_output") or fields.boolean("no_stop_trim"),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        eos_ids=eos_ids,
        streaming=streaming,
        return_token_ids=fields.boolean("return_token_ids"),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
    )


def read_cache_salt(fields: Fields) -> str:
    """Read the salt that isolates the prompt's blocks from other prompts of the same client; may be empty."""
    salt = fields.text("cache_salt", limits.CACHE_SALT.most)
    if salt == "":
        fields.wrong_value("cache_salt", "expected at least one character")
    return salt or ""


def read_metadata(fields: Fields) -> dict[str, str] | None:
    """
    Read `metadata`, which the response repeats. Raises InvalidRequest.

    OpenHands and LiteLLM send values other than texts, such as lists of tags. They become JSON.
    """
    metadata = fields.mapping("metadata")
    if metadata is None:
        return None
    if len(metadata) > limits.METADATA.most:
        most = limits.METADATA.most
        fields.wrong_value("metadata", f"Expected at most {most} pairs, but got {len(metadata)}")
    inner = Fields(metadata, "metadata")
    for key, value in metadata.items():
        if len(key) > limits.METADATA_KEY.most:
            most = limits.METADATA_KEY.most
            fields.wrong_value("metadata", f"Expected keys of at most {most} characters, but got {len(key)}")
        if isinstance(value, str):
            inner.text(key, limits.METADATA_VALUE.most)
    return {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in metadata.items()
    }


def reject_unsupported(fields: Fields, names: Sequence[str]) -> None:
    """Raise InvalidRequest for the first of `names` that has a value."""
    for name in names:
        if fields.given(name):
            raise unsupported(fields.param(name))


def reject_moved(fields: Fields, moved: Mapping[str, str]) -> None:
    """Raise InvalidRequest for the first field that has another name here. `moved` has the names here."""
    for name, here in moved.items():
        if fields.get(name) is not None:
            raise InvalidRequest(
                f"Unsupported parameter: '{name}'. Use {here!r} instead.",
                param=name,
                code=UNSUPPORTED_PARAMETER,
            )


def unsupported(param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param!r} is not supported by this worker. Omit it.",
        param=param,
        code=UNSUPPORTED_PARAMETER,
    )


def _numbers(fields: Fields, defaults: SamplingDefaults) -> dict[str, Any]:
    """Read the parameters of `limits.SAMPLING_NUMBERS`, with defaults of the worker and `SamplingParams`."""
    numbers: dict[str, float] = {}
    for limit in limits.SAMPLING_NUMBERS:
        default = getattr(defaults, limit.field, getattr(_UNCHANGED, limit.field))
        numbers[limit.field] = fields.number(limit.field, default, *limit.range, above=limit.open_below)
    if numbers["temperature"] < GREEDY_BELOW or numbers["top_p"] == 0.0:
        numbers |= {"temperature": 0.0, "top_p": 1.0}
    numbers["repetition_penalty"] = max(numbers["repetition_penalty"], WEAKEST_PENALTY)
    return numbers


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    if not isinstance(value, str | list):
        raise wrong_type("stop", "a string or an array of strings", value)
    stops = [value] if isinstance(value, str) else fields.array("stop", limits.STOPS.most) or []
    for position, stop in enumerate(stops):
        param = "stop" if isinstance(value, str) else f"stop[{position}]"
        if not isinstance(stop, str):
            raise wrong_type(param, "a string", stop)
        if not stop:
            fields.wrong_value("stop", "expected at least one character per stop string")
        Fields({param: stop}).text(param, limits.STOP.most)
    return tuple(stops)


def _stop_ids(fields: Fields, size: int) -> frozenset[int]:
    ids = fields.array("stop_token_ids", limits.STOP_IDS.most) or []
    return frozenset(
        integer(value, f"stop_token_ids[{position}]", 0, size - 1) for position, value in enumerate(ids)
    )


def _allowed_ids(fields: Fields, size: int) -> tuple[int, ...]:
    ids = fields.array("allowed_token_ids", limits.ALLOWED_IDS.most)
    if ids is None:
        return ()
    if not ids:
        raise InvalidRequest(
            "Invalid 'allowed_token_ids': empty array. Expected at least 1 item.",
            param="allowed_token_ids",
            code=limits.ALLOWED_IDS.code_below,
        )
    return tuple(
        integer(value, f"allowed_token_ids[{position}]", 0, size - 1) for position, value in enumerate(ids)
    )


def _bad_words(fields: Fields, vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word with and without a leading space, as in vLLM."""
    words: dict[tuple[int, ...], None] = {}
    for position, word in enumerate(fields.array("bad_words", limits.BAD_WORDS.most) or []):
        param = f"bad_words[{position}]"
        if not isinstance(word, str):
            raise wrong_type(param, "a string", word)
        Fields({param: word}).text(param, limits.BAD_WORD.most)
        if not word.strip():
            Fields({param: word}).wrong_value(param, "expected at least one character other than white space")
        first = tuple(vocabulary.encode(word.lstrip(), False))
        later = tuple(vocabulary.encode(f" {word.lstrip()}", False))
        # If the tokenizer has a separate token for the space, one entry covers both.
        both = [first] if later[-len(first) :] == first else [first, later]
        words |= dict.fromkeys(ids for ids in both if ids)
    return tuple(words)


def _logit_bias(fields: Fields, size: int) -> tuple[tuple[int, float], ...]:
    biases = fields.mapping("logit_bias") or {}
    if len(biases) > limits.LOGIT_BIAS.most:
        raise InvalidRequest(
            f"Invalid 'logit_bias': too many keys. Expected at most {limits.LOGIT_BIAS.most}, "
            f"but got {len(biases)}.",
            param="logit_bias",
            code=limits.LOGIT_BIAS.code,
        )
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < size):
            fields.wrong_value("logit_bias", f"{shown(key)} is not a token id from 0 to {size - 1}")
    return tuple(
        (int(key), number(bias, f"logit_bias.{key}", *limits.BIAS.range)) for key, bias in biases.items()
    )


def _logprob_ids(fields: Fields, logprobs: int | None, size: int) -> tuple[int, ...]:
    ids = fields.array("logprob_token_ids", limits.LOGPROB_IDS.most) or []
    if ids and logprobs is None:
        raise InvalidRequest(
            "The 'logprob_token_ids' parameter is only allowed when 'logprobs' are enabled.",
            param="logprob_token_ids",
        )
    read = (
        integer(token, f"logprob_token_ids[{position}]", 0, size - 1) for position, token in enumerate(ids)
    )
    return tuple(dict.fromkeys(read))


def _prompt_logprobs(fields: Fields, streaming: Streaming) -> int | None:
    wanted = fields.integer("prompt_logprobs", *limits.PROMPT_LOGPROBS.range)
    if wanted is not None and streaming.wanted:
        raise InvalidRequest(
            "'prompt_logprobs' are not available when 'stream' is enabled.", param="prompt_logprobs"
        )
    return wanted


def _streaming(fields: Fields, include_usage: bool) -> Streaming:
    stream = fields.boolean("stream")
    options = fields.mapping("stream_options")
    if options is None:
        return Streaming(stream, stream and include_usage)
    if not stream:
        raise InvalidRequest(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.", param="stream_options"
        )
    inner = Fields(options, "stream_options")
    inner.boolean("include_obfuscation")
    usage = inner.boolean("include_usage", include_usage)
    return Streaming(stream, usage, inner.boolean("continuous_usage_stats") and usage)


def check_min_tokens(parameters: Parameters, limit: int) -> None:
    """Raise InvalidRequest if `min_tokens` exceeds the maximum number of tokens, `limit`."""
    wanted = parameters.sampling.min_tokens
    if wanted > limit:
        raise InvalidRequest(
            f"Invalid 'min_tokens': {wanted} exceeds the maximum of {limit} tokens for this request.",
            param="min_tokens",
            code=INTEGER_ABOVE_MAX_VALUE,
        )
