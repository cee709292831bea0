"""Stop strings: what is shown, what is held back, what is counted, for every way to cut the text."""

from __future__ import annotations

import random

import pytest

from baton_engine.api.transcript import StopStrings
from tests.engine.api.api import TOKENIZER, Api, events


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopStrings(stops, include)
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


CASES = {
    "none": ([], "abc", "abc", None),
    "absent": (["x"], "abc", "abc", None),
    "at the end": (["c"], "abc", "ab", "c"),
    "in the middle": ([" STOP"], "abc STOP def", "abc", " STOP"),
    "begun but not completed": (["STOP"], "abc STO", "abc STO", None),
    "begun twice": (["aab"], "aaab", "a", "aab"),
    "the one that ends first": (["bcd", "c"], "abcd", "ab", "c"),
    "the longer one at a tie": (["c", "bc"], "abcd", "a", "bc"),
    "at the very start": (["a"], "abc", "", "a"),
    "beyond ASCII": (["🎉"], "é🎉z", "é", "🎉"),
}


@pytest.mark.parametrize(("stops", "text", "shown", "stop"), CASES.values(), ids=CASES.keys())
def test_stop_strings_text_ends_before_the_stop(
    stops: list[str], text: str, shown: str, stop: str | None
) -> None:
    assert run(stops, [text]) == (shown, stop)
    assert run(stops, list(text)) == (shown, stop)
    assert run(stops, [text], include=True) == (shown + (stop or ""), stop)


def test_stop_strings_result_is_independent_of_cuts() -> None:
    chance = random.Random(1)
    for _ in range(2000):
        text = "".join(chance.choices("ab", k=chance.randint(0, 12)))
        stops = ["".join(chance.choices("ab", k=chance.randint(1, 4))) for _ in range(chance.randint(1, 3))]
        pieces, rest = [], text
        while rest:
            cut = chance.randint(1, len(rest))
            pieces.append(rest[:cut])
            rest = rest[cut:]
        expected = run(stops, list(text))
        assert run(stops, pieces) == expected, (text, stops, pieces)
        matches = [stop for stop in stops if stop in text]
        assert (expected[1] is None) == (not matches)
        assert not any(stop in expected[0] for stop in stops)


def test_stop_strings_hold_back_only_possible_beginnings() -> None:
    matcher = StopStrings(["STOP", "OPEN"])
    assert matcher.push("a ST")[0] == "a "
    assert matcher.push("O")[0] == ""
    assert matcher.push("x")[0] == "STOx"
    assert matcher.push("STO")[0] == ""
    assert matcher.flush() == "STO"


async def test_stop_string_ends_answer_and_counts_its_last_token(api: Api) -> None:
    api.model.script = "abc STOP def"
    body = (await api.chat(stop=" STOP", max_tokens=50, ignore_eos=True)).json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "abc"
    assert (choice["finish_reason"], choice["matched_stop"], choice["stop_reason"]) == (
        "stop",
        " STOP",
        " STOP",
    )
    assert body["usage"]["completion_tokens"] == len("abc STOP")
    await api.served.engine.idle()
    assert api.served.computing.snapshot().totals.finished == {"stop": 1}, "the engine was told at once"
    api.assert_all_blocks_back()


async def test_stop_string_is_absent_from_stream_chunks(api: Api) -> None:
    api.model.script = "abc ST STOP def"
    chunks = events((await api.chat(stop=[" STOP", "zz"], max_tokens=50, stream=True)).text)
    assert [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks] == [
        "", "a", "b", "c", " ST", "",
    ]  # fmt: skip
    assert chunks[-1]["choices"][0]["matched_stop"] == " STOP"


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
async def test_stop_string_is_included_if_requested(api: Api, name: str) -> None:
    api.model.script = "abc STOP def"
    body = (await api.chat(stop=" STOP", max_tokens=50, **{name: True})).json()
    assert body["choices"][0]["message"]["content"] == "abc STOP"


async def test_stop_token_id_ends_the_text_before_it(api: Api) -> None:
    api.model.script = "a b c"
    token = TOKENIZER.encode("b")[0]
    (choice,) = (await api.chat(stop_token_ids=[token])).json()["choices"]
    assert choice["message"]["content"] == "a "
    assert (choice["finish_reason"], choice["matched_stop"], choice["stop_reason"]) == ("stop", token, token)
    (shown,) = (await api.chat(stop_token_ids=[token], no_stop_trim=True)).json()["choices"]
    assert shown["message"]["content"] == "a b"


async def test_text_held_back_is_sent_when_the_answer_ends_otherwise(api: Api) -> None:
    api.model.script = "abc STO"
    for stream in (False, True):
        response = await api.chat(stop=" STOP", max_tokens=50, stream=stream)
        if stream:
            deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in events(response.text)]
            assert "".join(deltas) == "abc STO"
        else:
            assert response.json()["choices"][0]["message"]["content"] == "abc STO"


async def test_stop_string_ends_only_its_own_choice(api: Api) -> None:
    body = (await api.chat(n=4, seed=1, stop=["a", "e"], max_tokens=40)).json()
    for choice in body["choices"]:
        content = choice["message"]["content"]
        assert "a" not in content and "e" not in content
        assert choice["finish_reason"] in ("stop", "length")
    shown = sum(len(choice["message"]["content"]) for choice in body["choices"])
    stopped = sum(choice["finish_reason"] == "stop" for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == shown + stopped


async def test_stop_string_within_min_tokens_is_ignored(api: Api) -> None:
    api.model.script = "ab ab ab"
    (choice,) = (await api.chat(stop="b", min_tokens=4, max_tokens=20)).json()["choices"]
    assert choice["message"]["content"] == "ab a"
