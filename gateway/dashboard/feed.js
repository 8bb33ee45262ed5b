// GET /admin/live, for as long as the page is open: reconnects by itself, and says for how long it could not.

import { Refused, events, isAsking, request } from "./api.js";

const SILENCE_MS = 25_000; // the gateway says something every ten seconds
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
    const wait = pause * (0.75 + Math.random() / 2); // many viewers do not come back all at once
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
    heard(); // a gateway that takes the call and never answers is silent, too
    const answer = await request("admin", "/admin/live", { signal: abort.signal });
    for await (const { event, data } of events(answer)) {
      heard();
      if (!event || !(event in on)) continue;
      on[event](JSON.parse(data));
      if (event === "hello") on.live();
      if (event === "state") wasHeard(); // the opening is whole: a gateway that fails on its way is not hurried
    }
  } finally {
    clearTimeout(watch);
  }
}
