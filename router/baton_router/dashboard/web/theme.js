// Light, dark, or what the system says: set before anything is drawn, so that nothing flashes.
// A classic script, because modules wait for the document.
"use strict";

(function () {
  const NAME = "baton.theme";
  const ORDER = ["system", "light", "dark"];

  function chosen() {
    try {
      const kept = localStorage.getItem(NAME);
      return ORDER.includes(kept) ? kept : "system";
    } catch {
      return "system"; // storage is switched off
    }
  }

  function show(theme) {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  }

  function next() {
    const theme = ORDER[(ORDER.indexOf(document.documentElement.dataset.theme) + 1) % ORDER.length];
    try {
      localStorage.setItem(NAME, theme);
    } catch {
      // then it is forgotten with this tab
    }
    show(theme);
  }

  show(chosen());
  document.addEventListener("DOMContentLoaded", () => {
    show(chosen());
    document.getElementById("theme").addEventListener("click", next);
  });
})();
