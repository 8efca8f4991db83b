/*
 * Makes elements and sentences. Whatever a token holds goes in as text, never as markup.
 */

/** @typedef {string | Node} Child */
/** @typedef {Record<string, any> & { data?: Record<string, string> }} Properties */

/**
 * An HTML element with properties, `data` for data-* attributes, and children.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Properties} [options]
 * @param {Child[]} children
 * @returns {HTMLElementTagNameMap[T]}
 */
function element(tag, options = {}, ...children) {
  const { data = {}, ...properties } = options;
  const made = Object.assign(document.createElement(tag), properties);
  Object.assign(made.dataset, data);
  made.append(...children);
  return made;
}

/**
 * An SVG element with attributes.
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {Child[]} children
 * @returns {SVGElementTagNameMap[T]}
 */
function shape(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/** @param {string} text a token; it keeps its direction of writing to itself */
const wordOf = (text) => element("bdi", { className: "sa-word" }, text);

/**
 * A sentence of ours as nodes: *word* stands out, {name} is replaced by a value, which is text or a node.
 * @param {string} sentence
 * @param {Record<string, Child | Child[] | number>} [values]
 * @returns {Child[]}
 */
function phrase(sentence, values = {}) {
  return sentence.split(/(\*[^*]+\*)/).flatMap((part) => {
    const strong = /^\*.+\*$/.test(part);
    const nodes = (strong ? part.slice(1, -1) : part).split(/(\{\w+\})/).flatMap((piece) => {
      const name = /^\{(\w+)\}$/.exec(piece)?.[1];
      if (name === undefined || !Object.hasOwn(values, name)) return [piece];
      const value = values[name];
      return Array.isArray(value) ? value : [typeof value === "number" ? String(value) : value];
    });
    return strong ? [element("strong", {}, ...nodes)] : nodes;
  });
}

/**
 * Parts of a list with a comma between them, and the last one after `and`.
 * @param {Child[][]} parts
 * @param {string} and
 * @returns {Child[]}
 */
function listed(parts, and) {
  return parts.flatMap((part, n) => [n === 0 ? "" : n === parts.length - 1 ? ` ${and} ` : ", ", ...part]);
}

/**
 * Say what was chosen to whoever listens outside of the page: the widget, or a script around a fragment.
 * @param {HTMLElement} root
 * @param {Record<string, string | number>} chosen
 */
function announce(root, chosen) {
  root.dispatchEvent(new CustomEvent("sa-chosen", { bubbles: true, detail: chosen }));
}
