// Light, dark, or as the system has it; kept for the next visit.

import { $, attribute, text } from "./dom.js";

const ORDER = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");

/** `onChange()`: colours are others now; canvases must be painted anew. */
export function startTheme(onChange) {
  show(localStorage.getItem("instar-theme") ?? "system");
  $("theme").addEventListener("click", () => {
    const next = ORDER[(ORDER.indexOf(document.documentElement.dataset.theme) + 1) % ORDER.length];
    localStorage.setItem("instar-theme", next);
    show(next);
    onChange();
  });
  dark.addEventListener("change", onChange);
}

function show(theme) {
  const known = ORDER.includes(theme) ? theme : "system";
  document.documentElement.dataset.theme = known;
  text($("theme"), { system: "Auto", light: "Light", dark: "Dark" }[known]);
  attribute($("theme"), "aria-label", `Theme: ${known}; press to change`);
}
