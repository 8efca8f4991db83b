/*
 * The first screen of a view: words with ribbons as thick as the weights, the output, the strip of all matrices from
 * inputs to output, and controls: head, scale, given weights. A small copy stays docked while details scroll.
 *
 * The view computes all numbers; this file keeps only the chosen head and word.
 */

import { dot, filled, fixed, largest, Matrix, range } from "./compute.js";
import { Heat } from "./kit/heat.js";
import { button, element, listed, phrase, wordAt, wordOf } from "./kit/page.js";
import { HeatMap, NumberLines, pixelColours } from "./kit/pictures.js";
import { Ribbons } from "./kit/ribbons.js";
import { OPS } from "./operations.js";

/** @typedef {import("./kit/page.js").Child} Child */
/** @typedef {import("./kit/page.js").Place} Place */
/** @typedef {import("./kit/pictures.js").Kind} Kind */
/** @typedef {import("./kit/pictures.js").Mark} Mark */
/** @typedef {import("./kit/pictures.js").PixelColours} PixelColours */
/** @typedef {import("./kit/ribbons.js").Chosen} Chosen */
/** @typedef {import("./numbers.js").NodeOfPage} NodeOfPage */
/** @typedef {import("./steps.js").View} View */

/**
 * @typedef {{ side: number, block: string, head: string, nodes: Record<string, string>, stages: Record<string,
 *   string> }} HeadData
 */

export const ROLES = ["inputs", "query", "key", "value", "scores", "mask", "weights", "output", "result"];
/** @type {Record<string, string>} */
const NAMES = { inputs: "x", query: "Q", key: "K", value: "V" }; // other names are words
/** @type {Record<string, string>} */
const SIGNS = { query: "·W", scores: "→", weights: "→", output: "→", result: "→" }; // signs before a matrix
const MOST_CELLS = 80; // a larger matrix is a picture, without numbers
const MOST_PARTS = 3; // words that a sentence names; one more if those are all
const WIDEST = 7; // a matrix of more than WIDEST + 1 columns is a picture
const NEAR = 12; // the marked word is one of these first words, so that it is in sight
const HIGH = 235; // pixels for the words of one text, until each has the least height
const FULL = 0.97; // of a screen, which the words fill, but for CAPTION
const CAPTION = 4.5; // letters' sizes that are kept for captions
export const SHORT = 2; // decimals

export class FirstScreen {
  /** @type {Chosen | null} */ hovered = null;
  grouped = false; // the strip
  fitted = -1; // the width for which the strip was filled
  /** @type {{ size: string, room: number } | undefined} */ measured = undefined;
  /** @type {PixelColours | undefined} */ colours = undefined;

  /** @param {View} view @param {HeadData[]} heads */
  constructor(view, heads) {
    this.view = view;
    this.texts = view.texts;
    this.heads = heads;
    this.block = heads[0].block;
    this.head = heads[0].head;
    this.sides = heads.some(({ side }) => side === 1) ? [0, 1] : [0];
    /** @type {Chosen} */
    this.pinned = { kind: "to", index: this.first() };
    this.ribbons = this.sides.map((side) => this.makeRibbons(side, false));
    this.docked = this.sides.map((side) => this.makeRibbons(side, true));
    this.out = new NumberLines();
    this.outHead = element("h4");
    this.outText = element("p.sa-out-text");
    this.sum = element("p.sa-sums");
    this.strip = element("div.sa-strip", { role: "group", ariaLabel: this.texts.strip });
    this.knobs = element("div.sa-knobs");
    this.dockKnob = element("span.sa-set");
    const panel = element("div.sa-out", this.outHead, this.out.node, this.outText);
    const [first, ...second] = this.ribbons.map(({ node }) => node);
    this.see = element(second.length ? "div.sa-see.sa-two" : "div.sa-see", first, panel, ...second);
    this.node = element(
      "section.sa-screen",
      { ariaLabel: this.texts.screen },
      this.see,
      this.knobs,
      this.strip,
      this.sum,
    );
    this.dock = element(
      "div.sa-dock",
      element(
        "div.sa-dock-inside",
        ...this.docked.map(({ node }) => node),
        this.dockKnob,
      ),
    );
    this.build();
    this.watch();
    new ResizeObserver(() => this.fit()).observe(this.node);
  }

  /**
   * The word that is marked at first: the named word, else a word that both texts have at one place, else the word that
   * gives another most weight.
   */
  first() {
    const { labels, numbers, texts } = this.view;
    const named = labels.t0.indexOf(texts.word);
    if (named >= 0) return named;
    const shared = this.sides.length === 2 ? labels.t0.findIndex((word, i) => word === labels.t1[i]) : -1;
    const weights = this.heads[0].nodes.weights && numbers.node(this.heads[0].nodes.weights).now;
    if (shared >= 0 || !weights) return Math.max(shared, 0);
    const most = range(Math.min(weights.rows, NEAR)).map((i) =>
      Math.max(
        0,
        ...range(weights.columns)
          .filter((j) => j !== i)
          .map((j) => weights.at(i, j) || 0),
      ),
    );
    return Math.max(0, most.indexOf(Math.max(...most)));
  }

  /** @param {number} side */
  current(side) {
    const { heads, block, head } = this;
    const found = heads.find((each) => each.side === side && each.block === block && each.head === head);
    return found ?? heads.filter((each) => each.side === side)[0];
  }

  /** @type {(side: number, role: string) => NodeOfPage | null} */
  nodeOf(side, role) {
    const id = this.current(side).nodes[role];
    return id === undefined ? null : this.view.numbers.node(id);
  }

  /** @type {(side: number, role: string) => Heat | HeatMap | undefined} its matrix in the strip */
  heatOf(side, role) {
    return this.matrices?.get(`${side} ${role}`);
  }

  /** @type {(side: number, small: boolean) => Ribbons} */
  makeRibbons(side, small) {
    const { texts, view: { labels } } = this, ends = { from: texts["goes in"], to: texts["comes out"] };
    const queries = labels[`t${side}`], keys = this.nodeOf(side, "scores") ? labels[`k${side}`] : queries;
    const heading = small ? undefined : element("h4", element("bdi", this.view.sideName(side)));
    const made = new Ribbons({
      keys,
      queries,
      side,
      small,
      high: HIGH,
      ...(small ? {} : { room: () => this.room() }),
      crossed: keys !== queries && keys.join("\n") !== queries.join("\n"),
      name: `${texts.screen}: ${this.view.sideName(side)}`,
      ends, heading, point: (chosen, pin) => this.point(chosen, pin),
    });
    if (Math.max(keys.length, queries.length) > 16) made.node.classList.add("sa-many");
    if (!small) made.caption.ariaLive = "polite";
    return made;
  }

  /** Pixels that a text's words have, if the picture is alone on a screen: the same until the screen changes. */
  room() {
    const { view, see } = this, { root } = view.lesson, [first] = this.ribbons ?? [];
    const { opened = "" } = root.dataset, isFirst = root.matches("[data-first]:not([data-paper])");
    const isAlone = view.alone && isFirst && (!opened || opened === "knobs");
    if (!isAlone || !first?.field.clientWidth) return 0;
    const size = `${innerWidth} ${innerHeight} ${getComputedStyle(first.field).fontSize} ${opened}`;
    if (this.measured?.size === size) return this.measured.room;
    const top = first.field.getBoundingClientRect().top + scrollY, type = parseFloat(size.split(" ")[2]);
    const left = FULL * innerHeight - top - CAPTION * type - this.knobs.offsetHeight;
    const isWide = getComputedStyle(see).gridTemplateColumns.includes(" "); // what is below one another is not grown
    const room = isWide && left > (HIGH * type) / 16 ? left : 0;
    this.measured = { size, room };
    return room;
  }

  /** @type {(chosen: Chosen | null, pin: boolean) => void} */
  point(chosen, pin) {
    if (pin && chosen) this.pinned = chosen;
    this.hovered = chosen;
    this.draw();
    if (pin) this.view.lesson.link();
  }

  /** Choose the head and word that are chosen when a page opens. */
  restart() {
    const { block, head } = this.heads[0];
    this.choose({ block, head, word: this.first() });
  }

  /** @param {Partial<{ block: string, head: string, word: number }>} choice */
  choose({ block = this.block, head = this.head, word }) {
    this.block = block;
    this.head = head;
    if (word !== undefined) this.pinned = { kind: "to", index: word };
    this.hovered = null;
    this.build();
    this.draw();
  }

  /** Make the controls and the strip of the chosen head. */
  build() {
    /** @type {Map<string, Heat | HeatMap>} */
    this.matrices = new Map();
    this.fill();
    this.buildKnobs();
    this.fitted = -1;
    this.fit();
    this.view.exercise?.count();
  }

  /** Fill the strip: each matrix in its column or, grouped, in as many lines as there is room for. */
  fill() {
    this.matrices?.clear();
    const roles = ROLES.filter((role) => this.shows(role));
    this.strip.classList.toggle("sa-grouped", this.grouped);
    if (this.grouped) {
      return this.strip.replaceChildren(
        ...roles.map((role) =>
          element("div", this.stripHead(role), ...this.sides.map((side) => this.stripMatrix(side, role, true))),
        ),
      );
    }
    const signed = (/** @type {string} */ role) => role !== roles[0] && SIGNS[role];
    const cells = [
      element("span"),
      ...roles.flatMap((role) => [...(signed(role) ? [element("span")] : []), this.stripHead(role)]),
    ];
    this.strip.classList.toggle("sa-few", roles.length < 4);
    for (const side of this.sides) {
      cells.push(
        element(
          "span.sa-who",
          { data: { side: String(side) } },
          this.sides.length > 1 ? element("bdi", this.view.sideName(side)) : "",
        ),
      );
      for (const role of roles) {
        if (signed(role)) cells.push(element("span.sa-sign", { ariaHidden: "true" }, SIGNS[role]));
        cells.push(this.stripMatrix(side, role, role === roles[0]));
      }
    }
    this.strip.style.setProperty("--columns", String(1 + roles.length + roles.filter(signed).length));
    this.strip.replaceChildren(...cells);
  }

  /** Show numbers in one line if they have room, else smaller ones, else in groups, one below the other. */
  fit() {
    const { clientWidth, classList } = this.strip;
    if (clientWidth === this.fitted || !clientWidth) return;
    this.fitted = clientWidth;
    for (const [dense, grouped] of [[false, false], [true, false], [false, true]]) {
      if (grouped && this.strip.closest("[data-paper]")) return; // paper makes it smaller
      classList.toggle("sa-dense", dense);
      if (grouped !== this.grouped) {
        this.grouped = grouped;
        this.fill();
        this.draw();
      }
      if (this.strip.scrollWidth <= this.strip.clientWidth + 1) return;
    }
  }

  /** @param {string} role */
  shows(role) {
    const node = this.nodeOf(0, role);
    if (!node) return false;
    return (
      role !== "mask" ||
      !this.nodeOf(0, "inputs") ||
      this.sides.some((side) => this.nodeOf(side, role)?.kernel.data.some((x) => x === 0))
    );
  }

  /** @param {string} role */
  nameOf(role) {
    return NAMES[role] ?? this.texts[`matrix ${role}`];
  }

  /** @param {string} role */
  stripHead(role) {
    const { stages } = this.current(0);
    const name = this.nameOf(role);
    return button(
      {
        className: "sa-strip-head",
        title: filled(this.texts["open stage"], { name }),
        onclick: () => this.view.openStage(stages[role]),
      },
      name,
      element(
        "small",
        this.texts[role === "output" && !this.nodeOf(0, "weights") ? "strip linear" : `strip ${role}`],
      ),
    );
  }

  /** @type {(side: number, role: string, first: boolean) => HTMLSpanElement} */
  stripMatrix(side, role, first) {
    const node = this.nodeOf(side, role);
    if (!node) return element("span");
    const [rows, columns] = node.shape;
    const { labels } = this.view;
    const label = (/** @type {string} */ list, /** @type {number} */ n) => labels[list] ?? range(n).map(String);
    const options = {
      name: `${this.nameOf(role)}, ${this.view.sideName(side)}`, rows, columns, side, kind: kindOf(role),
      point: (/** @type {Place | null} */ place) => this.explain(side, role, place),
    };
    const large = rows * columns > MOST_CELLS || columns > WIDEST + 1;
    const made = large
      ? new HeatMap(options)
      : new Heat({
          ...options,
          ...(first ? { rowLabels: label(node.rows, rows) } : {}),
          columnLabels: label(node.columns, columns),
          toggle: role === "mask",
          asks: node.blanks ? (i, j) => this.view.numbers.hidden({ node, i, j }) : undefined,
          answer: (i, j, text) => this.view.exercise?.count(this.view.exercise.judge({ node, i, j }, text)),
          edit: node.editable ? (i, j, value) => this.view.change(node, i, j, value) : undefined,
        });
    if (large) {
      const [wide, high] = [Math.min(9, Math.max(2.5, 0.45 * columns)), Math.min(11, Math.max(1, 0.45 * rows))];
      Object.assign(made.node.style, { aspectRatio: "auto", width: `${wide}em`, height: `${high}em` });
    }
    made.node.classList.add(`sa-is-${role}`);
    this.matrices?.set(`${side} ${role}`, made);
    return made.node;
  }

  buildKnobs() {
    const kids = [
      ...this.tabs("block", [...new Set(this.heads.map(({ block }) => block))]),
      ...this.tabs("head", [
        ...new Set(this.heads.filter(({ block }) => block === this.block).map(({ head }) => head)),
      ]),
    ];
    /** @type {{ slider: HTMLInputElement, output: HTMLOutputElement }[]} */
    this.scales = [];
    this.dockKnob.replaceChildren();
    const scale = this.nodeOf(0, "scale");
    if (scale) {
      const given = scale.kernel.at(0, 0),
        stops = [...new Set([0, given, 1, 8])].filter((x) => (given > 0 && given <= 8 ? true : x === given));
      const jumps = stops.map((x) => button({ onclick: () => this.view.change(scale, 0, 0, x) }, this.scaleText(x)));
      kids.push(element("span.sa-set", this.slider(scale, stops), ...jumps));
      this.dockKnob.append(this.slider(scale, stops));
    }
    const use = this.nodeOf(0, "switch");
    /** @type {HTMLButtonElement[]} */
    this.switches = [];
    if (use) {
      this.switches = [
        ["as given", 1],
        ["as computed", 0],
      ].map(([text, value]) =>
        button(
          { data: { value: String(value) }, onclick: () => this.view.change(use, 0, 0, Number(value)) },
          this.texts[text],
        ),
      );
      kids.push(element("span.sa-tabs", { role: "group" }, ...this.switches));
    }
    this.resetButton = button({ data: { do: "reset" }, onclick: () => this.view.reset() }, this.texts.reset);
    kids.push(this.resetButton);
    this.knobs.replaceChildren(...kids);
  }

  /** @type {(what: "block" | "head", names: string[]) => HTMLSpanElement[]} */
  tabs(what, names) {
    if (names.length < 2) return [];
    const buttons = names.map((name) => {
      const pressed = String(this[what] === name);
      return button({ ariaPressed: pressed, onclick: () => {
        this.choose({ [what]: name });
        this.view.lesson.link();
      } }, filled(this.texts[what], { n: name }));
    });
    return [
      element(
        "span.sa-tabs",
        { role: "group", ariaLabel: filled(this.texts[what], { n: "" }).trim() },
        ...buttons,
      ),
    ];
  }

  /** @type {(scale: NodeOfPage, stops: number[]) => HTMLLabelElement} a slider that stays at the stops for a while */
  slider(scale, stops) {
    const top = Math.max(8, 2 * Math.abs(scale.kernel.at(0, 0)));
    const slider = element("input", {
      type: "range",
      min: String(scale.kernel.at(0, 0) < 0 ? -top : 0),
      max: String(top),
      step: "0.01",
      ariaLabel: this.texts.scale,
    });
    slider.addEventListener("input", () => {
      const value = Number(slider.value);
      this.view.change(scale, 0, 0, stops.find((stop) => Math.abs(stop - value) < 0.05) ?? value);
    });
    const output = element("output");
    this.scales?.push({ slider, output });
    return element("label.sa-set", element("b", this.texts.scale), slider, output);
  }

  /** @param {number} x */
  scaleText(x) {
    const square = x > 0 ? 1 / (x * x) : 0, whole = Math.abs(square - Math.round(square)) < 1e-9 && square > 1.5;
    return whole ? `1/√${Math.round(square)}` : String(Number(x.toFixed(3)));
  }

  /**
   * A number with few decimals; "?" if the reader is to guess it.
   * @type {(node: NodeOfPage, i: number, j: number) => string}
   */
  short(node, i, j) {
    const { numbers } = this.view;
    return numbers.hidden({ node, i, j }) ? "?" : brief(node.now.at(i, j), Math.min(SHORT, node.digits));
  }

  /** @param {number} side */
  weights(side) {
    const node = this.nodeOf(side, "weights"), n = this.view.labels[`t${side}`].length;
    return node ? node.now : Matrix.of(n, n, (i, j) => (i === j ? 1 : 0));
  }

  /** Draw again in colours that may have changed. */
  redraw() {
    this.colours = undefined;
    this.fit();
    this.draw();
  }

  draw() {
    const chosen = this.hovered ?? this.pinned;
    for (const side of this.sides) this.drawRibbons(side, chosen);
    this.drawStrip(chosen);
    this.drawOut(chosen.kind === "to" ? chosen.index : this.pinned.kind === "to" ? this.pinned.index : chosen.index);
    for (const { slider, output } of this.scales ?? []) {
      const now = this.nodeOf(0, "scale")?.now.at(0, 0) ?? 1;
      slider.value = String(now);
      const text = this.scaleText(now);
      output.textContent = `× ${brief(now, SHORT)}${text.startsWith("1/") ? ` = ${text}` : ""}`;
    }
    const use = this.nodeOf(0, "switch");
    for (const each of this.switches ?? []) each.ariaPressed = String(use?.now.at(0, 0) === Number(each.dataset.value));
    if (this.resetButton) this.resetButton.disabled = !this.view.numbers.edited;
    if (!this.explained) this.explainRow();
  }

  /** @type {(side: number, chosen: Chosen) => void} */
  drawRibbons(side, chosen) {
    const node = this.nodeOf(side, "weights"), weights = this.weights(side);
    const limit = chosen.kind === "to" ? weights.rows : weights.columns;
    const selected = chosen.index < limit ? chosen : { kind: chosen.kind, index: limit - 1 };
    const guessing = ["scores", "weights"].includes(this.view.lesson.root.dataset.hide ?? "");
    // Ribbons must not show the answer.
    const even = Matrix.of(weights.rows, weights.columns, () => 1 / weights.columns);
    const state = {
      weights: guessing ? even : weights,
      selected,
      now: guessing,
      ...(!guessing && node && node.now !== node.kernel ? { before: node.kernel } : {}),
      write: (/** @type {number} */ value, /** @type {number} */ i, /** @type {number} */ j) =>
        node ? this.short(node, i, j) : value ? brief(value, 0) : "",
    };
    this.ribbons[side].update(state);
    if (this.dock.hasAttribute("data-shown")) this.docked[side].update({ ...state, now: true });
    this.ribbons[side].caption.replaceChildren(...this.caption(side, selected, weights, node));
  }

  /**
   * A word's weights, as a sentence.
   * @type {(side: number, chosen: Chosen, weights: Matrix, node: NodeOfPage | null) => Child[]}
   */
  caption(side, { kind, index }, weights, node) {
    const { texts, view } = this;
    const queries = view.labels[`t${side}`], keys = node ? view.labels[`k${side}`] : queries;
    const word = wordAt(kind === "to" ? queries : keys, index);
    if (!node) return phrase(texts.alone, { word });
    const crossed = this.ribbons[side].options.crossed;
    if (kind === "from") {
      const parts = range(weights.rows).sort((p, q) => weights.at(q, index) - weights.at(p, index))
        .map((i) => phrase(texts.taker, { word: wordAt(queries, i), weight: this.short(node, i, index) }));
      return phrase(texts["given to"], { word, parts: listed(parts.slice(0, 2 * MOST_PARTS), texts.and) });
    }
    if (range(weights.columns).every((j) => weights.at(index, j) === 0)) {
      return phrase(texts["takes nothing"], { word });
    }
    const apart = range(weights.columns)
      .filter((j) => crossed || j !== index)
      .sort((p, q) => weights.at(index, q) - weights.at(index, p));
    const taken = apart.filter((j) => weights.at(index, j) !== 0), others = taken.length ? taken : apart;
    const named = others.slice(0, others.length === MOST_PARTS + 1 ? MOST_PARTS + 1 : MOST_PARTS),
      rest = others.slice(named.length);
    const parts = named.map((j) => phrase(texts.part, { weight: this.short(node, index, j), word: wordAt(keys, j) }));
    if (!crossed) parts.unshift(phrase(texts.itself, { weight: this.short(node, index, index) }));
    if (rest.length) {
      parts.push(
        phrase(texts.rest, {
          weight: brief(
            dot(rest.length, (k) => weights.at(index, rest[k])),
            SHORT,
          ),
        }),
      );
    }
    return phrase(texts.takes, { word, parts: listed(parts, texts.and) });
  }

  /**
   * @param {NodeOfPage} node
   * @returns its numbers, with 0 where the reader is to guess, so that no colour shows the answer
   */
  seen({ now, blanks, revealed }) {
    return blanks
      ? Matrix.of(now.rows, now.columns, (i, j) => (blanks[i] === j && !revealed.has(i) ? 0 : now.at(i, j)))
      : now;
  }

  /** @param {Chosen} chosen */
  drawStrip({ kind, index }) {
    const row = kind === "to" ? index : -1;
    const colours = (this.colours ??= pixelColours(this.node));
    for (const role of ROLES) {
      const nodes = this.sides.flatMap((side) => this.nodeOf(side, role) ?? []);
      const size = role === "weights" ? 1 : Math.max(0, ...nodes.map((node) => largest(this.seen(node).data))) || 1;
      for (const side of this.sides) {
        const node = this.nodeOf(side, role);
        if (!node) continue;
        this.heatOf(side, role)?.update({
          matrix: this.seen(node),
          size,
          row: ["key", "value"].includes(role) && this.ribbons[side].options.crossed ? -1 : row,
          colours,
          write: (_, i, j) => this.short(node, i, j),
          moved: (i, j) => this.view.numbers.moved({ node, i, j }),
        });
      }
    }
  }

  /** @param {number} i the word whose output is drawn: in both texts, or with the values that it is the mean of */
  drawOut(i) {
    const { texts, view } = this;
    const there = this.sides.flatMap((side) => {
      const node = this.nodeOf(side, "output"), word = view.labels[`t${side}`][i];
      return node && word !== undefined ? [{ side, node, word }] : [];
    });
    this.outHead.replaceChildren();
    if (!there.length) return;
    const shown = range(there[0].node.shape[1]).slice(0, 8), { word } = there[0], other = there.at(-1)?.word ?? word;
    const hidden = shown.some((c) => there.some(({ node }) => view.numbers.hidden({ node, i, j: c })));
    this.outHead.append(
      ...phrase(texts[word === other ? "coming out" : "coming out both"], { word: wordOf(word), other: wordOf(other) }),
    );
    const lines = shown.map((c) => ({
      name: String(c),
      marks: hidden
        ? []
        : [
            ...this.parts(i, c),
            ...there.map(({ side, node }) => ({
              value: node.now.at(i, c),
              look: `sa-mark-${side}`,
              text: this.short(node, i, c),
            })),
          ],
    }));
    this.out.update(
      lines,
      there
        .map(({ side, node }) => `${this.view.sideName(side)}: ${shown.map((c) => this.short(node, i, c)).join(", ")}`)
        .join("; "),
    );
    this.outText.replaceChildren(
      ...(hidden
        ? []
        : there.length === 2
          ? this.difference(i, shown)
          : this.sides.length === 1 && this.nodeOf(0, "weights")
            ? [texts.mix]
            : []),
    );
  }

  /** @type {(i: number, c: number) => Mark[]} the words' values as rings, if there is one text */
  parts(i, c) {
    const value = this.nodeOf(0, "value")?.now, weights = this.nodeOf(0, "weights")?.now;
    if (this.sides.length > 1 || !value || !weights) return [];
    return range(value.rows)
      .filter((j) => weights.at(i, j) > 0)
      .map((j) => ({ value: value.at(j, c), look: "sa-mark-part", size: 2 + 9 * Math.sqrt(weights.at(i, j)) }));
  }

  /**
   * The difference of two texts' outputs in each of these columns of a row, and the column with the largest.
   * @type {(i: number, columns: number[]) => { by: number[], most: number }}
   */
  mostDifferent(i, columns) {
    const [a, b] = this.sides.map((side) => /** @type {NodeOfPage} */ (this.nodeOf(side, "output")).now);
    const by = columns.map((c) => Math.abs(a.at(i, c) - b.at(i, c)) || 0);
    return { by, most: Math.max(0, by.indexOf(Math.max(...by))) };
  }

  /** @type {(i: number, shown: number[]) => Child[]} */
  difference(i, shown) {
    const { texts } = this;
    const { by, most } = this.mostDifferent(i, shown);
    return [
      ...this.sides.flatMap((side) => [this.key(side, side ? "■ " : "● "), " "]),
      element("br"),
      ...phrase(by[most] < 0.005 ? texts["not different"] : texts["most different"], {
        n: most,
        by: brief(by[most], SHORT),
      }),
    ];
  }

  /** @type {(side: number, sign?: string) => HTMLElement} the name of a text, in its colour */
  key(side, sign = "") {
    return element("span.sa-key", { data: { side: String(side) } }, sign, element("bdi", this.view.sideName(side)));
  }

  /**
   * Outline the sources of a number in the strip, and write its sum.
   * @type {(side: number, role: string, place: Place | null) => void}
   */
  explain(side, role, place) {
    for (const made of this.matrices?.values() ?? []) if (made instanceof Heat) made.mark(null);
    this.explained = place !== null;
    this.sum.ariaLive = place ? "polite" : "off"; // without a number, screen readers read the caption of the word
    const node = this.nodeOf(side, role);
    if (!place || !node) return this.explainRow();
    const { numbers, words } = this.view;
    /** @type {Map<Heat, Place[]>} */
    const marked = new Map();
    for (const [, source, i, j] of this.reached(node, place)) {
      for (const other of ROLES) {
        const made = this.heatOf(side, other);
        if (this.nodeOf(side, other) === source && source !== node && made instanceof Heat) {
          marked.set(made, [...(marked.get(made) ?? []), { i, j }]);
        }
      }
    }
    for (const [made, places] of marked) made.mark(null, places);
    const here = this.heatOf(side, role);
    if (here instanceof Heat) here.mark(place, marked.get(here));
    const all = role === "scores" ? this.chain(node) : [node];
    const guessed = numbers.hidden({ node, ...place });
    const chain = guessed ? all.slice(0, 1) : all; // later numbers on the way show the answer
    this.sum.replaceChildren(
      ...chain.flatMap((each, n) => [n ? element("br") : "", ...words.sentence({ node: each, ...place }, guessed)]),
    );
    this.sum.dataset.side = String(side);
  }

  /**
   * The sources of a number that the strip shows, through matrices that it does not show.
   * @type {(node: NodeOfPage, place: Place) => [string, NodeOfPage, number, number][]}
   */
  reached(node, { i, j }) {
    const { numbers } = this.view,
      visible = new Set(
        this.sides.flatMap((side) => ROLES.filter((role) => role !== "mask").map((role) => this.nodeOf(side, role))),
      );
    return numbers.sources({ node, i, j }).slice(1).flatMap((source) => {
      const [, from, row, column] = source;
      return visible.has(from) || !OPS[from.op] ? [source] : this.reached(from, { i: row, j: column });
    });
  }

  /**
   * @param {NodeOfPage} node masked scores
   * @returns scores, scaled scores, masked scores, without stages that change nothing
   */
  chain(node) {
    const { numbers } = this.view, found = [node];
    while (["mask", "scale"].includes(found[0].op)) found.unshift(numbers.args(found[0])[0]);
    const mask = this.nodeOf(0, "mask");
    return found.filter((each) => each.op !== "mask" || mask?.now.data.some((x) => x === 0) || each.args.length > 2);
  }

  /** If the pointer is on no number, show how the most different number of the chosen word is computed. */
  explainRow() {
    const { view, pinned } = this, { kind, index } = this.hovered ?? pinned, i = kind === "to" ? index : pinned.index;
    const nodes = this.sides.map((side) => this.nodeOf(side, "output"));
    const both = nodes.length === 2 && nodes.every((node) => node && i < node.shape[0]);
    const c = both ? this.mostDifferent(i, range(Math.min(...nodes.map((node) => node?.shape[1] ?? 0)))).most : 0;
    const lines = nodes.flatMap((node, side) =>
      node && i < node.shape[0] && c < node.shape[1]
        ? [[...(nodes.length > 1 ? [this.key(side), ": "] : []), ...view.words.sentence({ node, i, j: c })]]
        : [],
    );
    this.sum.replaceChildren(
      ...lines.flatMap((line, n) => [n ? element("br") : "", ...line]),
      element("span.sa-hint", ` ${this.texts.point}`),
    );
    delete this.sum.dataset.side;
  }

  /** Show the dock when the strip has scrolled away. */
  watch() {
    const scroller = this.view.root.closest(".sa-view");
    const observer = new IntersectionObserver(
      ([{ isIntersecting, boundingClientRect, rootBounds }]) => {
        const away =
          !isIntersecting && boundingClientRect.height > 0 && boundingClientRect.bottom <= (rootBounds?.top ?? 0) + 1;
        this.dock.toggleAttribute("data-shown", away);
        if (away) this.draw();
      },
      { root: this.view.alone ? null : scroller },
    );
    observer.observe(this.see);
    const inside = /** @type {HTMLElement} */ (this.dock.firstElementChild);
    // 0 while the dock is hidden.
    new ResizeObserver(() => this.view.root.style.setProperty("--dock", `${inside.offsetHeight}px`)).observe(inside);
  }
}

/** @type {(role: string) => Kind} */
const kindOf = (role) => (role === "weights" ? "share" : role === "mask" ? "mask" : "signed");

/** @type {(x: number, decimals: number) => string} a short number: no -0.00 */
export function brief(x, decimals) {
  if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : x > 0 ? "∞" : "-∞";
  if (Math.abs(x) >= 1e5) return x.toExponential(1);
  const text = fixed(x, decimals);
  return Number(text) === 0 ? text.replace("-", "") : text;
}
