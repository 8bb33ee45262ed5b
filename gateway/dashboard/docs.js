// The page of the API: draws /openapi.json, which asks for a key where one is configured.

import { $, h, text } from "./dom.js";
import { headers } from "./api.js";

const KEY = "instar-v1-key"; // as on the dashboard: gone with the tab

let schemas = {};
const named = (ref) => ref.split("/").at(-1);
const resolved = (schema) => (schema.$ref ? schemas[named(schema.$ref)] : schema);

async function load() {
  const answer = await fetch("/openapi.json", { headers: headers("v1"), cache: "no-store" });
  const body = await answer.json();
  $("key-form").hidden = answer.ok;
  $("paths").hidden = !answer.ok;
  if (answer.ok) show(body);
  else text($("key-why"), body.error?.message ?? `the gateway answered ${answer.status}`);
}

function show(api) {
  schemas = api.components.schemas;
  text($("version"), api.info.version);
  text($("about"), api.info.description);
  const operations = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods)
      .filter(([method]) => method !== "head")
      .map(([method, one]) => [path, method, one]),
  );
  $("paths").replaceChildren(h("h2", {}, "Routes"), ...operations.map(operation), h("h2", {}, "Types"), ...Object.entries(schemas).map(type));
}

function operation([path, method, one]) {
  const parts = [h("summary", {}, h("b", {}, method.toUpperCase()), h("code", {}, path))];
  parts.push(h("p", {}, one.summary));
  const given = (one.parameters ?? []).map((p) => [p.name, p.schema, p.required, `in ${p.in}`]);
  if (given.length) parts.push(h("h3", {}, "Parameters"), fields(given));
  if (one.requestBody) parts.push(h("h3", {}, "Body"), ...content(one.requestBody.content));
  parts.push(h("h3", {}, "Answers"));
  const answers = Object.entries(one.responses).map(([status, answer]) =>
    h("tr", {}, h("th", {}, status), h("td", {}, answer.description, ...content(answer.content ?? {}))),
  );
  parts.push(h("div.table", {}, h("table", {}, ...answers)));
  return h("details", { id: one.operationId }, ...parts);
}

function content(types) {
  return Object.entries(types).map(([kind, { schema, ...more }]) =>
    h("p.muted", {}, `${kind}: `, words(schema), ...(more["x-event-schema"] ? [", each event: ", words(more["x-event-schema"])] : [])),
  );
}

function type([name, schema]) {
  const required = schema.required ?? [];
  const given = Object.entries(schema.properties ?? {}).map(([field, one]) => [field, one, required.includes(field), ""]);
  return h("details", { id: name }, h("summary", {}, h("code", {}, name)), h("p", {}, schema.description ?? ""), fields(given));
}

function fields(given) {
  const rows = given.map(([name, schema, required, where]) =>
    h(
      "tr",
      {},
      h("th", {}, h("code", {}, name), h("br"), h("small", {}, [required ? "required" : "", where].filter(Boolean).join(", "))),
      h("td", {}, words(schema), defaultOf(schema)),
      h("td", {}, schema.description ?? ""),
    ),
  );
  return h("div.table", {}, h("table", {}, ...rows));
}

const defaultOf = (schema) => (schema.default === undefined || schema.default === null ? "" : h("small", {}, `; default ${JSON.stringify(schema.default)}`));

/** A type in words, with its limits; names of types lead to them. */
function words(schema) {
  if (schema.$ref) {
    const name = named(schema.$ref);
    const link = h("a", { href: `#${name}` }, name);
    link.addEventListener("click", () => ($(name).open = true));
    return link;
  }
  if (schema.anyOf) return joined(schema.anyOf.filter((one) => one.type !== "null").map(words), " or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(", ");
  if (schema.type === "array") return joined(["list of ", words(schema.items ?? {}), limits(schema)], "");
  return `${schema.type ?? "anything"}${limits(schema)}`;
}

function joined(parts, between) {
  return h("span", {}, ...parts.flatMap((one, i) => (i ? [between, one] : [one])));
}

const LIMITS = { minimum: "at least", exclusiveMinimum: "more than", maximum: "at most", minLength: "characters, at least", maxLength: "characters, at most", minItems: "items, at least", maxItems: "items, at most", maxProperties: "fields, at most", pattern: "like" };

function limits(schema) {
  const said = Object.entries(LIMITS).filter(([name]) => schema[name] !== undefined);
  return said.map(([name, before]) => `, ${before} ${schema[name]}`).join("");
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  load();
});

load().catch((error) => $("paths").replaceChildren(h("p", { role: "alert" }, `the gateway cannot be reached: ${error.message}`)));
