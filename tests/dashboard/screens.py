"""
Take the pictures of docs/guides/dashboard.md: `python -m tests.dashboard.screens [--url URL]`.

Without a URL it starts two prefill and two decode workers with the built-in model.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.cli.service import running_up
from tests.dashboard.browser import Browser, browsing

FOLDER = Path(__file__).parents[2] / "docs" / "images"
MODEL = Path("smollm2")
SERVICE = ("--prefill=2", "--decode=2", "--kv-cache-memory=200MiB", "--dtype=auto")

QUESTIONS = (
    "What is a relay race, and why does one runner hand a baton to the next?",
    "Name three rivers of Europe, with a country that each of them flows through.",
)


@contextlib.contextmanager
def service(url: str) -> Iterator[str]:
    if url:
        yield url
        return
    with running_up(MODEL, *SERVICE) as up:
        yield up.url


def ask(browser: Browser, question: str) -> None:
    before = browser.count(".answer")
    browser.ask(question)
    browser.until(lambda: browser.count(".answer") > before and browser.answered(), "it is answered")


def take(browser: Browser, name: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.png").write_bytes(browser.driver.get_screenshot_as_png())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="", help="of a service that runs, such as http://127.0.0.1:8000")
    with service(parser.parse_args().url) as url, browsing() as browser:
        browser.open(f"{url}/")
        browser.until_live()
        browser.size(1360, 1000)
        browser.run("document.getElementById('max-tokens').value = 120")
        for question in QUESTIONS:
            ask(browser, question)
        browser.one("#long").click()
        browser.until(lambda: browser.count("#relay .box.prefill.busy"), "its prompt is being computed")
        browser.emulate(prefers_color_scheme="light")
        take(browser, "dashboard-light")
        browser.emulate(prefers_color_scheme="dark")
        browser.until(browser.answered, "it is answered")
        browser.run("document.querySelector('#requests button').click()")
        take(browser, "dashboard-dark")
        browser.size(390, 844)
        browser.emulate(prefers_color_scheme="light")
        browser.until(
            lambda: browser.run("return document.querySelector('#relay svg').clientWidth") < 390, "drawn"
        )
        take(browser, "dashboard-small")


if __name__ == "__main__":
    main()
