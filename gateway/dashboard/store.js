// What the feed sent, as far back as its history. Every view reads it; only the feed writes it.

const MOST_EVENTS = 600;

export const store = {
  hello: null,
  state: null,
  moments: [],
  events: [],
  historyS: 900,
  slo: { ttft_s: null, tpot_s: null },
  skewS: 0, // the gateway's clock minus this one

  /** Seconds since 1970 by the gateway's clock. */
  now() {
    return Date.now() / 1000 + this.skewS;
  },

  greet(hello) {
    this.hello = hello;
    this.historyS = hello.history_s ?? 900;
    this.slo = hello.slo ?? this.slo;
    this.skewS = hello.now - Date.now() / 1000;
  },

  recall(history) {
    this.moments = [...history.moments];
    this.events = [];
    history.events.forEach((event) => keep(timed(event)));
    this.forget();
  },

  addMoment(moment) {
    if (this.moments.length && moment.at <= this.moments.at(-1).at) return; // received before
    this.moments.push(moment);
    this.forget();
  },

  /** Returns false for the progress of a morph that was known to run. */
  addEvent(event) {
    const isNew = keep(timed(event));
    if (isReport(event) && event.state === "running") applyProgress(event);
    this.forget();
    return isNew;
  },

  forget() {
    const oldest = this.now() - this.historyS;
    drop(this.moments, oldest);
    // Events are not in order: a morph's report has the time of its start until it ends.
    if (this.events.some(({ at }) => at < oldest)) this.events = this.events.filter(({ at }) => at >= oldest);
    if (this.events.length > MOST_EVENTS) this.events.splice(0, this.events.length - MOST_EVENTS);
  },
};

/** Keeps an event; of a morph only the last report. */
function keep(event) {
  const at = isReport(event) ? store.events.findLastIndex((one) => isReport(one) && one.id === event.id) : -1;
  if (at < 0) store.events.push(event);
  else store.events[at] = event;
  return at < 0 || event.state !== "running";
}

/** Applies a report's progress to the state, which comes twice a second at most. An end waits for the state. */
function applyProgress(report) {
  const morphs = store.state?.morphs;
  const at = morphs?.findIndex(({ id }) => id === report.id) ?? -1;
  if (at < 0) {
    if (morphs && report.kind !== "morph") morphs.push(report);
  } else if (morphs[at].state === "running") morphs[at] = { ...morphs[at], ...report, kind: morphs[at].kind };
}

export const isReport = (event) => "target" in event && "state" in event;

function drop(list, oldest) {
  let num = 0;
  while (num < list.length && list[num].at < oldest) num += 1;
  if (num) list.splice(0, num);
}

/** Morph reports carry `started` and `ended`, events `at` or `at_ms`: all get an `at`. */
function timed(event) {
  const at = event.at ?? (event.at_ms ? event.at_ms / 1000 : event.ended ?? event.started);
  return { ...event, at };
}
