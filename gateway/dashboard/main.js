// Ties the feed to the views. The feed tells; each view draws what changed; nothing is drawn while nobody looks.

import { startAsk, drawAsk } from "./ask.js";
import { decisionsOf } from "./decisions.js";
import { drawDeployments, startDeployments } from "./deployments.js";
import { drawDevices, repaintDevices } from "./devices.js";
import { $, say, text } from "./dom.js";
import { follow } from "./feed.js";
import { drawHeader, wentGone, wentLive } from "./header.js";
import { chooseLayers, drawOrders, startOrders } from "./orders.js";
import { drawPolicy, startPolicy } from "./policy.js";
import { store } from "./store.js";
import { showTab, startTabs } from "./tabs.js";
import { startTheme } from "./theme.js";
import { drawTimelines, highlight, repaintTimelines, spanNow, startTimelines } from "./timelines.js";
import { drawWhy, pointAt, startWhy } from "./why.js";

const stale = { state: false, time: false }; // what must be drawn
let frame = 0;

startTabs();
startAsk();
startOrders();
startDeployments();
startPolicy();
startWhy(highlight);
startTimelines(pointAt, () => redraw("time"));
startTheme(() => {
  repaintDevices();
  repaintTimelines();
});
drawHeader();
setInterval(drawHeader, 1000);
setInterval(() => redraw("time"), 5000); // time passes, whether anything happens or not
document.addEventListener("visibilitychange", draw);

follow({
  hello: (hello) => store.greet(hello),
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
