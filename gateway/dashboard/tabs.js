// Tabs as the ARIA practices have them: one tab stop, arrow keys between.

import { $, attribute } from "./dom.js";

export function startTabs() {
  const tabs = [...$("tabs").querySelectorAll("[role=tab]")];
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => showTab(tab.id));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      const next = tabs[(to + tabs.length) % tabs.length];
      event.preventDefault();
      showTab(next.id);
      next.focus();
    });
  });
}

export function showTab(id) {
  for (const tab of $("tabs").querySelectorAll("[role=tab]")) {
    const isShown = tab.id === id;
    attribute(tab, "aria-selected", isShown);
    tab.tabIndex = isShown ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !isShown;
  }
}
