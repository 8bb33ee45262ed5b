// A streamed request. Each piece of text has the colour of the shape that made it, which its chunk names; calls of tools
// stand in a list of their own.

import { Refused, events, request } from "./api.js";
import { $, children, h, options, say, text } from "./dom.js";
import { field, notice, number, select } from "./form.js";
import { count, seconds } from "./format.js";
import { store } from "./store.js";
import { lowestIn, tables } from "./tables.js";

const EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

const view = { abort: null, shapes: new Map(), calls: [] };

export function startAsk() {
  view.model = field("Model", select());
  view.kind = field("As", select([["completions", "a completion"], ["chat", "a chat"]]));
  view.prompt = field("Prompt", h("textarea", { rows: 4, value: "def read_lines(path):\n    " }), "Ctrl Enter sends");
  view.length = field("Tokens", number({ min: 1, step: 1, value: "128" }));
  view.heat = field("Temperature", number({ min: 0, max: 2, value: "0" }));
  view.floor = field("Minimum precision", select([["", "any"], ...tables.precisions.slice(0, -1).map(({ name, label }) => [name, label])]));
  view.tools = field("Tools", h("textarea", { rows: 3, spellcheck: false }), "JSON, as the OpenAI API has it; empty: none");
  view.choice = field("Calls", select([["auto", "as the model decides"], ["required", "at least one"], ["none", "none"]]));
  view.example = h("button.quiet", { type: "button", onclick: () => { view.tools.input.value = JSON.stringify(EXAMPLE, null, 1); } }, "Example");
  view.offer = h("details.offer", { hidden: true }, h("summary", {}, "Tools"),
    view.tools.element, h("div.row", {}, view.choice.element, view.example));
  view.go = h("button.primary", { type: "submit" }, "Send");
  view.stop = h("button.quiet", { type: "button", hidden: true, onclick: () => view.abort?.abort() }, "Stop");
  view.outcome = notice();
  view.output = h("div.output", { tabIndex: 0, role: "region", "aria-label": "Answer", hidden: true });
  view.callList = h("ol.calls", { "aria-label": "Calls of tools" });
  view.numbers = h("p.fine.ask-numbers");
  view.legend = h("ul.legend.shapes", { "aria-label": "Shapes that made this text" });
  const form = h("form.ask", { noValidate: true, "aria-label": "Ask" },
    h("div.fields", {}, view.model.element, view.kind.element), view.prompt.element,
    h("div.fields.three", {}, view.length.element, view.heat.element, view.floor.element),
    view.offer,
    h("div.row", {}, view.go, view.stop), view.outcome.element);
  form.addEventListener("submit", send);
  view.kind.input.addEventListener("change", () => { view.offer.hidden = view.kind.input.value !== "chat"; });
  view.prompt.input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  $("panel-ask").append(form, view.output, view.callList, view.numbers, view.legend);
}

export function drawAsk(state) {
  options(view.model.input, [...new Set(state.instances.map(({ model }) => model))].map((name) => [name, name]));
}

async function send(event) {
  event.preventDefault();
  if (view.abort) return;
  view.abort = new AbortController();
  view.shapes = new Map();
  view.calls = [];
  view.callList.replaceChildren();
  view.output.replaceChildren();
  view.output.hidden = false;
  children(view.legend, []);
  view.outcome.show("", "");
  for (const one of [view.model, view.prompt, view.length, view.heat, view.floor, view.tools, view.choice]) one.clear();
  view.stop.hidden = false;
  view.go.disabled = true;
  try {
    await stream(performance.now());
  } catch (error) {
    refuse(error);
  } finally {
    view.abort = null;
    view.stop.hidden = true;
    view.go.disabled = false;
  }
}

function body() {
  const isChat = view.kind.input.value === "chat";
  const prompt = view.prompt.input.value;
  const asked = {
    model: view.model.input.value,
    max_tokens: view.length.input.valueAsNumber || 0,
    temperature: view.heat.input.valueAsNumber || 0,
    stream: true,
    stream_options: { include_usage: true },
    return_precision: true,
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
  if (view.floor.input.value) asked.min_precision = view.floor.input.value;
  if (isChat && view.tools.input.value.trim()) Object.assign(asked, { tools: toolsOf(view.tools.input.value), tool_choice: view.choice.input.value });
  return { path: isChat ? "/v1/chat/completions" : "/v1/completions", asked };
}

/** Throws Refused, as the server would, where it would get no JSON at all. */
function toolsOf(words) {
  try {
    return JSON.parse(words);
  } catch (error) {
    throw new Refused(400, { message: `the tools are no JSON: ${error.message}`, param: "tools" });
  }
}

async function stream(began) {
  const { path, asked } = body();
  const answer = await request("v1", path, {
    method: "POST", body: JSON.stringify(asked), signal: view.abort.signal,
    headers: { "content-type": "application/json" },
  });
  const seen = { first: null, pieces: 0, usage: null, finish: null, last: 0, began };
  for await (const { data } of events(answer)) {
    if (!data || data === "[DONE]") continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(answer.status, chunk.error);
    take(chunk, seen);
  }
  const num = seen.usage?.completion_tokens ?? seen.pieces;
  say(`The answer is complete: ${num} tokens.`);
}

function take(chunk, seen) {
  seen.usage = chunk.usage ?? seen.usage;
  const choice = chunk.choices[0];
  const piece = choice?.text ?? choice?.delta?.content ?? choice?.delta?.reasoning_content ?? "";
  const calls = choice?.delta?.tool_calls ?? [];
  if (piece || calls.length) {
    seen.first ??= performance.now();
    seen.pieces += 1;
  }
  if (piece) write(piece, chunk.system_fingerprint);
  calls.forEach(takeCall);
  seen.finish = choice?.finish_reason ?? seen.finish;
  if (choice?.precision) drawShapes(choice.precision);
  seen.last = piece || calls.length ? performance.now() : seen.last;
  const elapsed = seen.last - seen.first;
  const num = seen.usage?.completion_tokens ?? seen.pieces;
  const rate = num > 1 && elapsed > 0 ? `${count(((num - 1) * 1000) / elapsed)} tokens/s` : "";
  const first = seen.first === null ? "" : `first after ${seconds((seen.first - seen.began) / 1000)}`;
  const parts = [`${num} tokens`, first, rate, seen.finish && `ended: ${seen.finish}`];
  text(view.numbers, parts.filter(Boolean).join(" · "));
}

/** A call begins with its name; its arguments come in pieces. */
function takeCall({ index, function: { name, arguments: piece } = {} }) {
  const call = (view.calls[index] ??= { name: "", words: "", item: view.callList.appendChild(h("li")) });
  call.name = name ?? call.name;
  call.words += piece ?? "";
  text(call.item, `${call.name}(${call.words})`);
}

/** Appends to the last element while the shape is the same: a long answer is few elements. */
function write(piece, fingerprint) {
  const last = view.output.lastElementChild;
  const isNear = view.output.scrollHeight - view.output.scrollTop - view.output.clientHeight < 40;
  if (last?.dataset.shape === fingerprint) last.firstChild.appendData(piece);
  else view.output.append(tinted(piece, fingerprint));
  if (isNear) view.output.scrollTop = view.output.scrollHeight;
}

const tinted = (piece, fingerprint) => h("span", {
  "data-shape": fingerprint, "data-kind": lowestIn(fingerprint), "data-depth": depthOf(fingerprint), title: fingerprint,
}, piece);

/** The depth of the colour, 1 to 4, by the share of the layers that are below full. */
function depthOf(fingerprint) {
  const names = tables.precisions.filter(({ bits }) => bits).map(({ name }) => name).join("|");
  const counts = (fingerprint ?? "").matchAll(new RegExp(`(?:${names})x([\\d.]+)`, "g"));
  const layers = [...counts].reduce((sum, [, num]) => sum + Number(num), 0);
  const all = store.state?.instances.find(({ model }) => model === view.model.input.value)?.num_layers ?? 1;
  return Math.max(1, Math.min(4, Math.ceil((4 * layers) / all)));
}

/** Shows how many tokens each shape made, by the spans at the answer's end. */
function drawShapes(spans) {
  const shapes = new Map();
  for (const { start, end, fingerprint } of spans) shapes.set(fingerprint, (shapes.get(fingerprint) ?? 0) + end - start);
  children(view.legend, [...shapes].map(([name, num]) =>
    h("li", {}, h("i.swatch", { "data-kind": lowestIn(name) }), `${name}: ${num} tokens`)));
}

function refuse(error) {
  if (error.name === "AbortError") {
    view.outcome.show("", "Stopped.");
    return;
  }
  const fields = {
    model: view.model, prompt: view.prompt, messages: view.prompt,
    max_tokens: view.length, temperature: view.heat, min_precision: view.floor, tool_choice: view.choice,
  };
  const message = error instanceof Refused ? error.message : "the gateway does not answer";
  const param = error instanceof Refused ? error.param ?? "" : "";
  const at = fields[param] ?? (param.startsWith("tools") ? view.tools : null);
  if (at === view.tools || at === view.choice) view.offer.open = true;
  if (at) at.fail(message);
  else view.outcome.show("bad", message);
}
