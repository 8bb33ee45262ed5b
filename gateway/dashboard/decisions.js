// Turns events into decisions: what was decided, by which numbers, and the outcome. Pure.

import { isReport } from "./store.js";
import { morphEntry } from "./tables.js";

const FAILED = new Set(["failed", "conflict", "stale", "deferred"]);
const TONES = {
  worker_lost: "bad", dead_letter: "bad", bus_restarted: "bad", request_replayed: "bad", epoch_changed: "bad",
  controller_failed: "bad",
  worker_joined: "good", worker_left: "plain", policy_changed: "plain",
};
const SAME_S = 5; // events of a kind that follow one another so closely are shown as one

/**
 * [{id, at, kind, subject, source, reason, saw, weighed, outcome, tone, times}], the oldest first.
 * kind: of the morph, or the event's. outcome: null unless it is a morph. weighed: null unless the planner decided.
 */
export function decisionsOf(events) {
  const found = new Map();
  let last = null;
  for (const event of events) {
    if (isReport(event)) addReport(found, event);
    else if (event.kind === "morph_decided") addDecided(found, event);
    else if (event.kind === "forecast_scored") continue;
    else {
      if (last?.kind === event.kind && event.at - last.until < SAME_S && event.kind === "request_replayed") {
        last.times += 1;
        last.until = event.at;
        continue;
      }
      last = plain(event);
      found.set(last.id, last);
    }
  }
  return [...found.values()].sort((a, b) => a.at - b.at);
}

function addReport(found, report) {
  const decision = found.get(report.id) ?? blank(report.id, report.started ?? report.at, report.target);
  decision.kind = report.kind;
  decision.reason ||= report.decided ?? ""; // of which the event that told of the decision may leave out the options
  decision.workers = report.workers ?? [];
  decision.outcome = {
    state: report.state,
    reason: report.reason,
    numbers: report.numbers ?? {},
    took: report.ended ? Math.max(0, report.ended - report.started) : null,
  };
  decision.tone = FAILED.has(report.state) ? "bad" : report.state === "running" ? "running" : "good";
  found.set(report.id, decision);
}

function addDecided(found, event) {
  const id = event.morph_id || `${event.kind} ${event.at} ${event.subject}`;
  const decision = found.get(id) ?? blank(id, event.at, event.subject);
  decision.at = event.at;
  decision.source = event.source;
  decision.reason = event.reason || decision.reason;
  decision.saw = event.numbers ?? {};
  decision.weighed = event.weighed ?? null;
  found.set(id, decision);
}

function blank(id, at, subject) {
  return {
    id, at, until: at, subject, kind: "morph", source: "", reason: "", saw: {}, weighed: null, workers: [], times: 1,
    tone: "running",
    outcome: { state: "ordered", reason: "", numbers: {}, took: null },
  };
}

function plain(event) {
  return {
    ...blank(`${event.kind} ${event.at} ${event.subject}`, event.at, event.subject),
    kind: event.kind, source: event.source, reason: event.reason, saw: event.numbers ?? {},
    weighed: event.weighed ?? null, outcome: null, tone: TONES[event.kind] ?? "plain",
  };
}

/** The glyph and colour of a decision: of a morph by its kind, else by its tone. */
export const glyphOf = ({ kind, tone }) => morphEntry(kind)?.colour ? kind : tone === "bad" ? "trouble" : "note";
