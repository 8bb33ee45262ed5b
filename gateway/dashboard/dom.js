// Makes and changes elements with as little work as possible: the page is redrawn twice a second.

export const $ = (id) => document.getElementById(id);

/** h("li.row", {title: "x", onclick: f}, "text", element): properties, attributes with a dash or `role`. */
export function h(what, props = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Writes only a text that differs, so that no selection is lost and no layout repeated. */
export function text(element, value) {
  const wanted = String(value);
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function attribute(element, name, value) {
  if (value === null || value === undefined) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export function variable(element, name, value) {
  if (element.style.getPropertyValue(name) !== String(value)) element.style.setProperty(name, value);
}

/** Gives `parent` these children in this order, moving only what is out of place. */
export function children(parent, wanted) {
  wanted.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  while (parent.children.length > wanted.length) parent.lastElementChild.remove();
}

/** Sets the options of a select and keeps the choice if it is still among them. */
export function options(select, pairs) {
  const now = JSON.stringify(pairs);
  if (select.dataset.pairs === now) return;
  select.dataset.pairs = now;
  const chosen = select.value;
  select.replaceChildren(...pairs.map(([value, label]) => h("option", { value }, label)));
  if (pairs.some(([value]) => String(value) === chosen)) select.value = chosen;
}

/** Announces a text to screen readers. */
export function say(words) {
  text($("said"), words);
}

export const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
