// Elements, and lists of them that are kept while what they show changes.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const s = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
export const $ = (id) => document.getElementById(id);

export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

// Make `parent` have one child for each item, in order. Those of items that were there before stay, and so does focus.
export function keyed(parent, items, key, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = known.get(name);
    known.delete(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    update(child, item);
  }
  for (const child of known.values()) child.remove();
}
