"""The page in Chromium, before a real router and real workers: one that reads prompts, one that answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver.common.keys import Keys

from tests.cli.service import running_up
from tests.dashboard.browser import Browser
from tests.engine.models import make_model

pytestmark = pytest.mark.slow

PHASES = ["queue", "prefill", "transfer", "decode"]
NEWEST = "#requests > li:first-child"
ATTEMPTS = 5

PAIRS = [
    *[(text, ground) for text in ("ink", "soft") for ground in ("ground", "surface", "sunk", "queue-tint")],
    *[(text, ground) for text in ("ink", "soft") for ground in ("prefill-tint", "decode-tint")],
    *[(role, "surface") for role in ("queue", "prefill", "transfer", "decode", "bad")],
    *[("bad", ground) for ground in ("bad-tint", "ground", "sunk")],
    ("surface", "ink"),
]
"""Colors of text and of its background."""

CONTRAST = """
  const probe = document.body.appendChild(document.createElement("i"));
  const light = (name) => {
    probe.style.color = `var(--${name})`;
    const parts = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const [red, green, blue] = parts.map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const found = arguments[0].map(([text, ground]) => {
    const [less, more] = [light(text), light(ground)].sort((a, b) => a - b);
    return (more + 0.05) / (less + 0.05);
  });
  probe.remove();
  return found;
"""


BOXES = """
  return arguments[0].map((one) => document.querySelector(`#relay ${one}`).getBoundingClientRect().toJSON());
"""


@pytest.fixture(scope="module")
def url(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # The browser is asked for first: without one, nothing has to be started.
    model = make_model(tmp_path_factory.mktemp("models") / "tiny")
    with running_up(model) as up:
        yield f"{up.url}/"


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Browser]:
    browser.open(url)
    browser.until_live()
    yield browser
    assert browser.complaints() == []


def ask(page: Browser, text: str, tokens: int = 24) -> None:
    """Ask, and wait for the end of the answer."""
    page.run("document.getElementById('max-tokens').value = arguments[0]", tokens)
    before = page.count(".answer")
    page.ask(text)
    page.until(lambda: page.count(".answer") > before and page.answered(), "the answer has ended")


def ask_both(page: Browser, text: str) -> None:
    """Ask until both workers had a part in the answer: on a busy machine one may do without the other."""
    for attempt in range(ATTEMPTS):
        page.one("#anew").click()
        ask(page, f"{attempt}: {text}")
        page.until(
            lambda: page.count(".answer .bar") and not page.count(".answer .open"), "its timeline ends"
        )
        if phases(page, ".answer") == PHASES:
            page.until(lambda: phases(page, f"{NEWEST} .timeline") == PHASES, "so it does in the list")
            return
    raise AssertionError(f"of {ATTEMPTS} prompts none came from the prefill worker")


def phases(page: Browser, within: str) -> list[str]:
    script = (
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.className.split(' ').at(-1))"
    )
    names: list[str] = page.run(script, f"{within} .bar")
    return names


def test_both_workers_are_shown_without_console_errors(page: Browser) -> None:
    page.until(lambda: page.count("#relay .worker") == 2, "both workers are shown")
    assert page.text("#relay .title").split("\n") == ["Router", "prefill-0", "decode-0"]
    assert page.count("#relay .link.blocks")
    described = page.one("#relay svg").get_attribute("aria-label") or ""
    assert "prefill-0, ready" in described and "decode-0, ready" in described
    page.one(".relay summary").click()
    assert page.count("#workers tr") == 2
    assert "KV blocks in use" in page.text(".worker.decode")


def test_answer_names_its_workers_and_times(page: Browser) -> None:
    ask_both(page, "What is the capital of France?")
    assert page.text(".answer .text") and not page.count(".problem")
    page.until(lambda: phases(page, ".answer") == PHASES, "the answer's timeline has all phases")
    page.until(lambda: " token" in page.text(".answer .about"), "the answer is described")
    about = page.text(".answer .about")
    assert "prefill-0 computed the prompt, decode-0 generated the answer" in about
    assert " cached" in about and "first token after" in about

    assert page.text(f"{NEWEST} .way") == "prefill-0 → decode-0"
    page.one(f"{NEWEST} button").click()
    details = page.text(f"{NEWEST} .details")
    assert "KV blocks moved" in details or "KV block moved" in details
    assert "prefill-0 computed the prompt" in details and "predicted: " in details
    page.until(lambda: page.text("#figure-first").endswith("s"), "the figures follow")
    page.until(lambda: page.count("#chart-first .line[d^=M]"), "and so does the chart")
    assert " min, up to " in page.text("#highest-first")


def test_second_turn_comes_from_the_prefix_cache(page: Browser) -> None:
    ask(page, "List 3 countries and their capitals.", 8)
    ask(page, "And then?", 8)
    page.until(lambda: page.count(".answer .track") == 2, "both timelines are there")
    # The description follows the answer with the next report.
    page.until(lambda: page.text(".answer .about").count(" cached") == 2, "both answers are described")
    _, cached = page.text(".answer .about").split("\n")
    assert not cached.split(" · ")[1].startswith("0 of")
    page.one("#anew").click()
    assert not page.count(".message")


def test_moving_marks_are_the_blocks_of_a_request(page: Browser) -> None:
    watch(page)
    ask_both(page, "A relay has four runners.")
    page.until(lambda: "mark blocks" in page.run("return window.seen"), "blocks have moved")
    assert "mark ask" in page.run("return window.seen")
    page.until(lambda: not page.count(".mark"), "all have arrived")


def test_reduced_motion_moves_nothing(page: Browser) -> None:
    page.emulate(prefers_reduced_motion="reduce")
    watch(page)
    ask_both(page, "each one hands the baton to the next.")
    page.until(lambda: "lit" in page.run("return window.seen"), "the way of the blocks has lit up")
    assert not any("mark" in one for one in page.run("return window.seen"))


def watch(page: Browser) -> None:
    """Note what is drawn from now on: marks that move, and ways that light up."""
    page.run(
        """
        window.seen = [];
        new MutationObserver((changes) => changes.forEach((change) => {
          for (const one of change.addedNodes) window.seen.push(one.getAttribute?.("class") ?? "");
          if (change.target.classList.contains("lit")) window.seen.push("lit");
        })).observe(document.getElementById("relay"), {
          subtree: true, childList: true, attributes: true, attributeFilter: ["class"],
        });
        """
    )


def test_keyboard_reaches_everything(page: Browser) -> None:
    page.press(Keys.TAB)
    assert page.focused() == "skip"
    page.press(Keys.ENTER)
    page.press(*"Hello", Keys.ENTER)
    page.until(lambda: page.answered(), "the answer has ended")
    page.until(lambda: page.count("#requests > li"), "the request is shown")

    # From the top, Tab comes by everything that can be used, in the order in which it is read.
    page.run("document.activeElement.blur(); window.getSelection().removeAllRanges(); window.scrollTo(0, 0)")
    page.run("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    order: list[str] = []
    while len(order) < 40 and (len(order) < 2 or order[-1] != order[0]):
        page.press(Keys.TAB)
        order.append(page.focused())
    wanted = ["skip", "theme", "summary Workers as a table", "anew", "conversation", "question", "send"]
    wanted += ["summary Model and sampling", "timeline"]
    assert [one for one in order if one in wanted][: len(wanted)] == wanted

    # The focused row: another request can become the first row at any moment.
    page.run("document.querySelector('#requests button').focus()")
    page.press(Keys.ENTER)
    assert page.run("return document.activeElement.getAttribute('aria-expanded')") == "true"
    assert page.run("return document.activeElement.parentElement.querySelector('.details').checkVisibility()")


def test_theme_follows_the_system_or_the_choice(page: Browser) -> None:
    def brightness() -> float:
        colour = page.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        return float(sum(colour[:3]))

    page.emulate(prefers_color_scheme="dark")
    assert brightness() < 150
    page.emulate(prefers_color_scheme="light")
    assert brightness() > 600
    page.one("#theme").click()
    page.one("#theme").click()
    assert page.text("#theme") == "Theme: dark" and brightness() < 150
    page.driver.refresh()
    assert page.text("#theme") == "Theme: dark" and brightness() < 150


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_sufficient_contrast(page: Browser, scheme: str) -> None:
    page.emulate(prefers_color_scheme=scheme)
    contrasts = dict(zip(PAIRS, page.run(CONTRAST, PAIRS), strict=True))
    assert {pair: contrast for pair, contrast in contrasts.items() if contrast < 4.5} == {}


@pytest.mark.parametrize("width", [320, 390, 700])
def test_small_screen_shows_everything(page: Browser, width: int) -> None:
    page.size(width, 740)
    page.until(
        lambda: page.run("return document.querySelector('#relay svg').clientWidth") < width, "drawn anew"
    )
    assert page.run("return document.documentElement.scrollWidth") <= width
    prefill, decode = page.run(BOXES, [".worker.prefill", ".worker.decode"])
    assert all(box["left"] >= 0 and box["right"] <= width for box in (prefill, decode))
    assert prefill["top"] < decode["top"] if width < 620 else prefill["left"] < decode["left"]


def test_form_fields_all_have_a_name(page: Browser) -> None:
    page.one(".wishes summary").click()
    nameless = page.run(
        """
        return [...document.querySelectorAll("button, input, select, textarea, summary, [role], a")]
          .filter((one) => !(one.labels?.length || one.getAttribute("aria-label") || one.textContent.trim()))
          .filter((one) => one.checkVisibility()).map((one) => one.outerHTML.slice(0, 100))
        """
    )
    assert [one for one in nameless if 'role="status"' not in one] == []
