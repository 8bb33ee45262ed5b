// Follows GET /admin/live while the page is open; reconnects, and shows since when there is no connection.

import { Refused, events, isAsking, request } from "./api.js";

const SILENCE_MS = 25_000; // the gateway sends at least a comment every ten seconds
const FIRST_PAUSE_MS = 400;
const LONGEST_PAUSE_MS = 8_000;

/** `on` has hello, history, state, moment, event, live(), gone(why, retryAt). Never returns. */
export async function follow(on) {
  let pause = FIRST_PAUSE_MS;
  for (;;) {
    let why = "the gateway ended the stream";
    try {
      await listen(on, () => {
        pause = FIRST_PAUSE_MS;
      });
    } catch (error) {
      why = error instanceof Refused ? error.message : "the gateway does not answer";
      if (!(error instanceof Refused) && error.name !== "TypeError" && error.name !== "AbortError") {
        why = `the feed broke: ${error.message}`;
      }
    }
    const wait = pause * (0.75 + Math.random() / 2); // so that viewers do not reconnect all at once
    on.gone(why, Date.now() + wait);
    await new Promise((resolve) => setTimeout(resolve, wait));
    pause = Math.min(pause * 1.7, LONGEST_PAUSE_MS);
  }
}

async function listen(on, wasHeard) {
  const abort = new AbortController();
  let watch = null;
  const heard = () => {
    clearTimeout(watch);
    watch = setTimeout(() => (isAsking() ? heard() : abort.abort()), SILENCE_MS);
  };
  try {
    heard(); // also while a gateway takes the call and never answers
    const answer = await request("admin", "/admin/live", { signal: abort.signal });
    for await (const { event, data } of events(answer)) {
      heard();
      if (!event || !(event in on)) continue;
      on[event](JSON.parse(data));
      if (event === "hello") on.live();
      if (event === "state") wasHeard(); // the opening is complete: a gateway that fails before it is retried less and less often
    }
  } finally {
    clearTimeout(watch);
  }
}
