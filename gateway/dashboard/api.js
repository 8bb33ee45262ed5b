// Calls to the gateway, and the keys that it may ask for: one for /admin, one for /v1.
// Keys are kept in sessionStorage: they are gone with the tab, and in no address or log.

import { $, text } from "./dom.js";

const TITLES = {
  admin: "This gateway asks for an admin key",
  v1: "Requests to /v1 ask for an API key",
};

export class Refused extends Error {
  /** A refusal in the server's words, which name the value, the limit and what to do. */
  constructor(status, error) {
    super(error?.message ?? `the gateway answered ${status}`);
    this.status = status;
    this.param = error?.param ?? null;
    this.code = error?.code ?? null;
  }
}

const keyOf = (which) => sessionStorage.getItem(`instar-${which}-key`);

export function headers(which, more = {}) {
  const key = keyOf(which);
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

/** Throws Refused for an answer other than 2xx, TypeError without an answer. */
export async function request(which, path, options = {}) {
  for (;;) {
    const answer = await fetch(path, { ...options, headers: headers(which, options.headers), cache: "no-store" });
    if (answer.ok) return answer;
    const problem = new Refused(answer.status, await errorOf(answer));
    if (!wantsKey(problem)) throw problem;
    if (!(await askForKey(which, problem.message))) throw problem;
  }
}

export async function call(method, path, body) {
  const options = { method };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "content-type": "application/json" };
  }
  return (await request("admin", path, options)).json();
}

/** Without a configured key another one does not help; the message says what does. */
function wantsKey({ status, code }) {
  return status === 401 || (status === 403 && code !== "admin_loopback_only");
}

async function errorOf(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return null;
  }
}

let asking = null; // one dialog for all calls that wait for a key
export const isAsking = () => asking !== null;

async function askForKey(which, why) {
  while (asking) {
    if (asking.which === which) return asking.done;
    await asking.done;
  }
  const done = showDialog(which, why);
  asking = { which, done };
  try {
    return await done;
  } finally {
    asking = null;
  }
}

function showDialog(which, why) {
  const dialog = $("key-dialog");
  const input = $("key-input");
  text($("key-title"), TITLES[which]);
  text($("key-why"), why);
  input.value = "";
  const isNeeded = which === "admin" && $("main").hidden; // without it there is nothing to show
  $("key-cancel").hidden = isNeeded;
  $("key-cancel").onclick = () => dialog.close("");
  dialog.oncancel = (event) => isNeeded && event.preventDefault();
  dialog.returnValue = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      const key = input.value.trim();
      input.value = "";
      if (dialog.returnValue === "use" && key) sessionStorage.setItem(`instar-${which}-key`, key);
      resolve(dialog.returnValue === "use" && Boolean(key));
    };
  });
}

// ---------------------------------------------------------------------------- server-sent events
// Read from a fetch: EventSource cannot send a key.

/** Yields {event, data} of a response's body; comments as {event: ""}: they show that the gateway lives. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const block = rest.slice(0, end);
        rest = rest.slice(end + 2);
        yield parse(block);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { event, data: data.join("\n") } : { event: "", data: "" };
}
