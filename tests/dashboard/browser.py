"""Debian's Chromium without a screen, and what a test wants to know of a page in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.cli.service import await_true

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
MISSING = next((name for name, path in (("chromium", CHROMIUM), ("chromedriver", DRIVER)) if not path), "")

TIMEOUT_S = 90.0
LARGE = (1360, 1000)


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """A page with nothing of an earlier one: no key, no theme, no emulation."""
        self.driver.get("about:blank")
        self.emulate()
        self.size(*LARGE)
        self.driver.get(url)
        self.run("sessionStorage.clear(); localStorage.clear();")
        self.driver.refresh()
        self.complaints()

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def emulate(self, **features: str) -> None:
        """Media features, such as prefers_color_scheme="dark"."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": listed})

    def complaints(self) -> list[str]:
        """Return new messages of the console: errors, and violations of the content policy."""
        entries = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries]

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def one(self, selector: str) -> WebElement:
        """Return an element that reports do not replace, which may come at any moment."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Of all elements, shown or not."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent).join('\\n')"
        )
        return str(self.run(script, selector))

    def until(self, claim: Callable[[], object], what: str) -> None:
        await_true(lambda: bool(claim()), TIMEOUT_S, what)

    def until_live(self) -> None:
        self.until(lambda: self.text("#connection") == "Live", "the page is connected")

    def press(self, *keys: str) -> None:
        """At whatever has the focus."""
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> str:
        """Return the focused element: its id, class, or tag and text."""
        return str(
            self.run(
                "const one = document.activeElement;"
                "return one.id || one.className || one.tagName.toLowerCase() + ' ' + one.textContent.trim()"
            )
        )

    def ask(self, text: str) -> None:
        self.one("#question").send_keys(text, Keys.ENTER)

    def answered(self) -> bool:
        return bool(self.count(".answer") and not self.count(".answer.running"))


@contextmanager
def browsing() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    # Root has no sandbox, containers have a small /dev/shm, and the browser must not connect elsewhere.
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "no-first-run"):
        options.add_argument(f"--{flag}")
    for flag in ("disable-background-networking", "disable-component-update", "disable-sync"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
