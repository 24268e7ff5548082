// Dark or light before anything is drawn, hence no module. Without a choice the system's is followed.
"use strict";
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

  function chosen() {
    try {
      return localStorage.getItem("octavo.theme");
    } catch {
      return null; // storage is switched off
    }
  }

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  }

  function show() {
    document.getElementById("theme")?.setAttribute("aria-pressed", String(isDark()));
    dispatchEvent(new Event("octavo:theme"));
  }

  function toggle() {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("octavo.theme", root.dataset.theme);
    } catch {
      // then it holds until the page is left
    }
    show();
  }

  const theme = chosen();
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  system.addEventListener("change", show);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", toggle);
    show();
  });
})();
