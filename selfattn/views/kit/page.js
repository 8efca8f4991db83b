/*
 * What every page has: elements and sentences, which take tokens as text and never as markup; arrow keys within a
 * group, of which Tab reaches one element; light or dark; the start of its views.
 */

import { clamp, counted, speak } from "../compute.js";

/** @typedef {{ i: number, j: number }} Place a number of a matrix */
/** @typedef {string | Node} Child */
/** @typedef {Record<string, any> & { data?: Record<string, string> }} Properties */

/**
 * @template {string} K
 * @typedef {K extends `${infer T extends keyof HTMLElementTagNameMap}.${string}` ? HTMLElementTagNameMap[T] :
 *   K extends keyof HTMLElementTagNameMap ? HTMLElementTagNameMap[K] : never} Made
 */

/**
 * An HTML element: its tag, with classes after dots; properties, and `data` for data-* attributes, if there are any;
 * children.
 * @template {string} K
 * @param {K} kind
 * @param {[options?: Properties | Child, ...children: Child[]]} given
 * @returns {Made<K>}
 */
export function element(kind, ...given) {
  const [tag, ...classes] = kind.split("."), [first] = given;
  const { data = {}, ...properties } = /** @type {Properties} */ (
    typeof first === "string" || first instanceof Node ? {} : (given.shift() ?? {})
  );
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  Object.assign(made, properties);
  Object.assign(made.dataset, data);
  made.append(.../** @type {Child[]} */ (given));
  return /** @type {Made<K>} */ (made);
}

/** @type {(properties: Properties, ...children: Child[]) => HTMLButtonElement} */
export const button = (properties, ...children) => element("button", { type: "button", ...properties }, ...children);

/**
 * An SVG element with attributes.
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, string | number>} [attributes]
 * @param {Child[]} children
 * @returns {SVGElementTagNameMap[T]}
 */
export function shape(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/** @param {string} text a token, whose direction of writing is isolated */
export const wordOf = (text) => element("bdi.sa-word", text);

/** @type {(words: string[], n: number) => string} the place of a word that is there several times, as " (2)" */
export const placeOf = (words, n) => (words.indexOf(words[n]) === words.lastIndexOf(words[n]) ? "" : ` (${n})`);

/** @type {(words: string[], n: number) => HTMLElement} a word among others */
export const wordAt = (words, n) => wordOf(`${words[n] ?? ""}${placeOf(words, n)}`);

/**
 * A sentence as nodes: *word* is bold, {name} is replaced by a value, which is text or a node, and plurals by a form.
 * @type {(sentence: string, values?: Record<string, Child | Child[] | number>) => Child[]}
 */
export function phrase(sentence, values = {}) {
  return counted(sentence, values).split(/(\*[^*]+\*)/).flatMap((part) => {
    const strong = /^\*.+\*$/.test(part);
    const nodes = (strong ? part.slice(1, -1) : part).split(/(\{\w+\})/).flatMap((piece) => {
      const name = /^\{(\w+)\}$/.exec(piece)?.[1];
      if (name === undefined || !Object.hasOwn(values, name)) return [piece];
      const value = values[name];
      return Array.isArray(value) ? value : [typeof value === "number" ? String(value) : value];
    });
    return strong ? [element("strong", ...nodes)] : nodes;
  });
}

/** @type {(parts: Child[][], and: string) => Child[]} parts with commas between them, and `and` before the last one */
export function listed(parts, and) {
  return parts.flatMap((part, n) => [n === 0 ? "" : n === parts.length - 1 ? ` ${and} ` : ", ", ...part]);
}

/**
 * The cell to which a pressed key moves from (i, j); null if it does not move the focus.
 * @type {(key: string, i: number, j: number, rows: number, columns: number) => [number, number] | null}
 */
export function destination(key, i, j, rows, columns) {
  /** @type {Record<string, [number, number]>} */
  const moves = {
    ArrowUp: [i - 1, j],
    ArrowDown: [i + 1, j],
    ArrowLeft: [i, j - 1],
    ArrowRight: [i, j + 1],
    Home: [i, 0],
    End: [i, columns - 1],
  };
  if (!Object.hasOwn(moves, key)) return null;
  return [clamp(moves[key][0], 0, rows - 1), clamp(moves[key][1], 0, columns - 1)];
}

/** @type {(group: Iterable<HTMLElement>, target: HTMLElement) => void} focus the target, which Tab then reaches */
export function moveFocus(group, target) {
  for (const other of group) other.tabIndex = -1;
  target.tabIndex = 0;
  target.focus();
}

/**
 * Let left, right, Home and End move along a row of buttons: `go` gets the place.
 * @type {(row: HTMLElement, buttons: () => HTMLElement[], go: (n: number) => void) => void}
 */
export function moveAlong(row, buttons, go) {
  row.addEventListener("keydown", (event) => {
    const all = buttons(), n = all.findIndex((button) => button === event.target);
    const to =
      n < 0 || isForeign(event) || ["ArrowUp", "ArrowDown"].includes(event.key)
        ? null
        : destination(event.key, 0, n, 1, all.length);
    if (!to) return;
    event.preventDefault();
    go(to[1]);
  });
}

/** @type {(event: KeyboardEvent) => boolean} whether a key belongs to the surrounding page or to a field */
export function isForeign(event) {
  const { target } = event;
  const typed = target instanceof HTMLInputElement && target.type !== "range";
  return event.ctrlKey || event.metaKey || event.altKey || typed || target instanceof HTMLSelectElement;
}

/**
 * Let a number be typed into a cell; `done` gets the text, null after Escape, and whether a key ended the typing.
 * @type {(td: HTMLElement, value: number | "", name: string, done: (text: string | null, byKey: boolean) => void) =>
 *   void}
 */
export function typeInto(td, value, name, done) {
  const field = element("input", { value: String(value), ariaLabel: name, inputMode: "decimal" });
  const close = (/** @type {boolean} */ kept, /** @type {boolean} */ byKey) => {
    if (!field.isConnected) return;
    field.onblur = null;
    field.remove();
    done(kept ? field.value : null, byKey);
  };
  field.onblur = () => close(true, false);
  field.onkeydown = (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    close(event.key === "Enter", true);
  };
  td.append(field);
  field.focus();
  field.select();
}

/**
 * The number at the pointer.
 * @type {(event: MouseEvent, picture: HTMLElement, rows: number, columns: number) => Place}
 */
export function placeIn({ clientX, clientY }, picture, rows, columns) {
  const box = picture.getBoundingClientRect();
  const along = (/** @type {number} */ part, /** @type {number} */ n) => clamp(Math.floor(part * n), 0, n - 1);
  return { i: along((clientY - box.top) / box.height, rows), j: along((clientX - box.left) / box.width, columns) };
}

/**
 * A named list.
 * @type {(name: string, options: string[], first: number, choose: (n: number) => void) => HTMLLabelElement}
 */
export function chooser(name, options, first, choose) {
  const list = element(
    "select",
    { onchange: () => choose(list.selectedIndex) },
    ...options.map((text, n) => element("option", { selected: n === first }, text)),
  );
  return element("label", `${name} `, list);
}

/**
 * Buttons that show the other views of a document, one at a time.
 * @param {HTMLElement} root
 */
function otherViews(root) {
  const all = /** @type {HTMLElement[]} */ ([...document.querySelectorAll(".sa-page > .sa-view[data-alone]")]);
  root.hidden = all.indexOf(root) > 0;
  return all.filter((other) => other !== root).map((other) => button({ data: { do: "other" }, onclick: () => {
    for (const each of all) each.hidden = each !== other;
    window.scrollTo({ top: 0 });
    /** @type {HTMLElement | null} */ (other.querySelector(".sa-tools button"))?.focus();
  } }, other.dataset.name ?? ""));
}

/**
 * Buttons of the page, for colours and sizes; paper has its own.
 * @type {(root: HTMLElement, texts: Record<string, string>, changed: () => void, ...more: HTMLElement[]) =>
 *   HTMLElement}
 */
export function tools(root, texts, changed, ...more) {
  let { theme: before } = root.dataset;
  const onPaper = (/** @type {boolean} */ on) => {
    if (on) before = root.dataset.theme;
    root.toggleAttribute("data-paper", on);
    if (on) root.dataset.theme = "light";
    else if (before) root.dataset.theme = before;
    else delete root.dataset.theme;
    changed();
    for (const strip of /** @type {NodeListOf<HTMLElement>} */ (root.querySelectorAll(".sa-strip"))) {
      strip.style.setProperty("zoom", on ? String(Math.min(1, strip.clientWidth / strip.scrollWidth) || 1) : "");
    }
  };
  for (const name of ["beforeprint", "afterprint"]) {
    window.addEventListener(name, () => onPaper(name === "beforeprint"));
  }
  const theme = button({ data: { do: "theme" }, title: texts.theme, ariaLabel: texts.theme, onclick: () => {
    root.dataset.theme = getComputedStyle(root).getPropertyValue("--dark").trim() === "1" ? "light" : "dark";
    changed();
  } }, "◐");
  const larger = button(
    {
      data: { do: "projector" },
      title: texts.projector,
      ariaLabel: texts.projector,
      ariaPressed: "false",
      onclick: () => {
        larger.ariaPressed = String(root.toggleAttribute("data-projector"));
        changed();
      },
    },
    "A",
    element("small", "A"),
  );
  // Other pages of a folder that `selfattn pages` wrote; the one in another language opens the same lesson.
  const others = /** @type {NodeListOf<HTMLLinkElement>} */ (document.head.querySelectorAll("link[hreflang]"));
  const lang = new URLSearchParams(location.hash.slice(1)).get("lang"),
    own = [...others].find(({ rel, hreflang }) => rel === "alternate" && hreflang === lang);
  if (own) location.replace(own.href + location.hash);
  const links = [...("alone" in root.dataset ? others : [])].map(({ rel, hreflang, href, title }) =>
    element(
      "a",
      {
        href,
        hreflang,
        onclick: (/** @type {Event} */ event) => {
          if (rel === "alternate") {
            /** @type {HTMLAnchorElement} */ (event.currentTarget).hash = location.hash.replace(/&?\blang=\w+/, "");
          }
        },
      },
      title,
    ),
  );
  return element("div.sa-tools", ...links, ...more, ...otherViews(root), theme, larger);
}

/**
 * The first line of a page that its script draws: its title, with `more` in small letters after it, what to look for,
 * and tools.
 * @type {(root: HTMLElement, texts: Record<string, string>, look: HTMLElement, more: string, changed: () => void) =>
 *   HTMLElement}
 */
export function topOf(root, texts, look, more, changed) {
  const title = element("h1", ...root.querySelector("h1")?.childNodes ?? []);
  if (more) title.append(" ", element("small", more));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  return element("div.sa-top", element("div", title, look), tools(root, texts, changed));
}

/**
 * Report what was chosen to listeners outside of the page: the widget, or a script around a fragment.
 * @type {(root: HTMLElement, chosen: Record<string, string | number>) => void}
 */
export function announce(root, chosen) {
  root.dispatchEvent(new CustomEvent("sa-chosen", { bubbles: true, detail: chosen }));
}

/**
 * Scroll there, smoothly unless motion is to be reduced.
 * @type {(target: Element, block: ScrollLogicalPosition) => void}
 */
export const bring = (target, block) => target.scrollIntoView({ block, behavior: isStill() ? "auto" : "smooth" });

export const isStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

const BUSY = 12; // milliseconds of a long job, after which the page answers
const PIECE = 2 ** 18; // letters of base64 that are read at a time: whole groups of four

/** @type {(base64: string) => Promise<ArrayBuffer>} the bytes of a page, which are deflated and in base64 */
export function inflate(base64) {
  const { DecompressionStream } = /** @type {any} */ (globalThis);
  let at = 0;
  const pieces = new ReadableStream({ pull: async (to) => {
    if (at) await new Promise((on) => setTimeout(on)); // so that the page answers between pieces
    const text = atob(base64.slice(at, (at += PIECE))), bytes = new Uint8Array(text.length);
    for (let n = 0; n < bytes.length; n++) bytes[n] = text.charCodeAt(n);
    to.enqueue(bytes);
    if (at >= base64.length) to.close();
  } });
  return new Response(pieces.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

/**
 * Do something with each item, in slices of one frame each; a new call with the same `own` ends the last one.
 * @type {<T>(own: { frame: number }, items: T[], act: (item: T) => void) => void}
 */
export function inSlices(own, items, act) {
  let n = 0;
  cancelAnimationFrame(own.frame);
  const slice = () => {
    for (const end = performance.now() + BUSY; n < items.length && performance.now() < end; n++) act(items[n]);
    if (n < items.length) own.frame = requestAnimationFrame(slice);
  };
  slice();
}

/**
 * Draw each view of a kind that is not drawn yet, from its data and the bytes of its numbers, if it has any.
 * @param {string} kind the class of its root
 * @param {new (root: HTMLElement, data: any, bytes: ArrayBuffer) => unknown} View
 */
export function start(kind, View) {
  for (const root of document.querySelectorAll(`.${kind}:not([data-live])`)) {
    const data = root.querySelector(".sa-data")?.textContent, packed = root.querySelector(".sa-bytes")?.textContent;
    if (!(root instanceof HTMLElement) || !data) continue;
    root.dataset.live = "";
    const draw = (/** @type {ArrayBuffer} */ bytes) => {
      const read = JSON.parse(data);
      speak(read.captions.lang);
      new View(root, read, bytes);
      root.dataset.ready = "";
    };
    if (packed) inflate(packed).then(draw);
    else draw(new ArrayBuffer(0));
  }
}
