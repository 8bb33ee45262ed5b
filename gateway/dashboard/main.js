// Connects the feed to the views. Each view draws what changed; nothing is drawn while the page is hidden.

import { startAsk, drawAsk } from "./ask.js";
import { drawBurst, followBurst, startBurst } from "./burst.js";
import { decisionsOf } from "./decisions.js";
import { drawDeployments, startDeployments } from "./deployments.js";
import { drawDevices, repaintDevices } from "./devices.js";
import { $, attribute, say, text } from "./dom.js";
import { follow } from "./feed.js";
import { drawHeader, wentGone, wentLive } from "./header.js";
import { chooseLayers, drawOrders, startOrders } from "./orders.js";
import { drawPolicy, startPolicy } from "./policy.js";
import { store } from "./store.js";
import { takeTables } from "./tables.js";
import { drawTimelines, highlight, repaintTimelines, spanNow, startTimelines } from "./timelines.js";
import { drawWhy, pointAt, startWhy } from "./why.js";

const THEMES = ["system", "light", "dark"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const stale = { state: false, time: false }; // what must be drawn
let frame = 0;

startTabs();
startTheme(() => {
  repaintDevices();
  repaintTimelines();
});
drawHeader();
setInterval(drawHeader, 1000);
setInterval(() => redraw("time"), 5000); // time passes without news, too
document.addEventListener("visibilitychange", draw);

follow({
  hello(hello) {
    const isFirst = !store.hello?.tables;
    if (!takeTables(hello.tables)) location.reload(); // the gateway was updated
    store.greet(hello);
    if (isFirst && hello.tables) startViews();
  },
  history(history) {
    store.recall(history);
    redraw("time");
  },
  state(state) {
    store.state = state;
    redraw("state");
  },
  moment(moment) {
    store.addMoment(moment);
    redraw("time");
  },
  event(event) {
    redraw("state");
    if (store.addEvent(event)) redraw("time");
    if (event.kind === "burst_started") followBurst();
    if (event.target && event.state !== "running") say(`${event.kind} of ${event.target}: ${event.state} ${event.reason ?? ""}`);
  },
  live() {
    wentLive();
    drawHeader();
  },
  gone(why, retryAt) {
    wentGone(why, retryAt);
    text($("empty"), store.state ? "" : why);
    drawHeader();
  },
});

/** Makes forms and charts, for which the gateway's tables are needed. */
function startViews() {
  startAsk();
  startOrders();
  startDeployments();
  startPolicy();
  startBurst();
  startWhy(highlight);
  startTimelines(pointAt, () => redraw("time"));
}

function redraw(what) {
  stale[what] = true;
  if (!frame && !document.hidden) frame = requestAnimationFrame(draw);
}

function draw() {
  frame = 0;
  if (document.hidden || !store.state) return;
  const isFirst = $("main").hidden;
  $("main").hidden = false;
  $("empty").hidden = true;
  if (stale.state) {
    drawHeader();
    drawDevices(store.state, store.state.metrics, onChoose);
    drawOrders(store.state);
    drawDeployments(store.state);
    drawAsk(store.state);
    drawPolicy(store.state.policy);
    drawBurst(store.state);
  }
  if (stale.time || isFirst) {
    store.forget();
    const [from, to] = spanNow();
    const decisions = decisionsOf(store.events);
    drawTimelines(decisions, from, to);
    drawWhy(decisions, from, to);
  }
  stale.state = stale.time = false;
}

function onChoose(instanceId, layers) {
  chooseLayers(instanceId, layers);
  showTab("tab-orders");
}

// ---------------------------------------------------------------------------- tabs
// After the ARIA practices: one tab stop, arrow keys between.

function startTabs() {
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

function showTab(id) {
  for (const tab of $("tabs").querySelectorAll("[role=tab]")) {
    const isShown = tab.id === id;
    attribute(tab, "aria-selected", isShown);
    tab.tabIndex = isShown ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !isShown;
  }
}

// ---------------------------------------------------------------------------- theme
// Light, dark, or the system's; kept for the next visit.

/** `onChange()`: the colours changed; canvases must be painted again. */
function startTheme(onChange) {
  showTheme(localStorage.getItem("instar-theme") ?? "system");
  $("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    localStorage.setItem("instar-theme", next);
    showTheme(next);
    onChange();
  });
  dark.addEventListener("change", onChange);
}

function showTheme(theme) {
  const known = THEMES.includes(theme) ? theme : "system";
  document.documentElement.dataset.theme = known;
  text($("theme"), { system: "Auto", light: "Light", dark: "Dark" }[known]);
  attribute($("theme"), "aria-label", `Theme: ${known}; press to change`);
}
