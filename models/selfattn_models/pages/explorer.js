/*
 * The explorer: texts, all heads as small maps, one as a large map, a word's rollout through all layers, next tokens.
 */

import { Off } from "./explorer_ablation.js";
import { HeadGrid, NextTokens, TextData, WayMap } from "./explorer_parts.js";
import { dot, filled, fixed, range } from "../../../selfattn/views/compute.js";
import {
  announce, button, element, moveAlong, moveFocus, phrase, placeIn, start, topOf, wordAt, wordOf,
} from "../../../selfattn/views/kit/page.js";
import { paint, Picture, pixelColours } from "../../../selfattn/views/kit/pictures.js";
import { Ribbons } from "../../../selfattn/views/kit/ribbons.js";

/** @typedef {import("./explorer_ablation.js").StoredOff} StoredOff */
/** @typedef {import("./explorer_parts.js").Habit} Habit */
/** @typedef {import("./explorer_parts.js").Head} Head */
/** @typedef {import("./explorer_parts.js").Mode} Mode */
/** @typedef {import("./explorer_parts.js").StoredText} StoredText */
/** @typedef {import("../../../selfattn/views/compute.js").Matrix} Matrix */
/** @typedef {import("../../../selfattn/views/kit/page.js").Child} Child */
/** @typedef {import("../../../selfattn/views/kit/page.js").Place} Place */
/** @typedef {import("../../../selfattn/views/kit/ribbons.js").Chosen} Chosen */

/**
 * @typedef {object} ExplorerData
 * @property {string} name of the model
 * @property {number[]} heads of each layer
 * @property {Habit[][]} habits
 * @property {string[]} names of habits, in the order of shares
 * @property {StoredText[]} texts
 * @property {number} ribbons tokens whose ribbons are drawn, at most
 * @property {StoredOff | null} off what the model says with heads off
 * @property {Record<string, string>} captions
 */

const LETTERS = ["A", "B"]; // names of texts
const LISTED = 3; // words that a caption lists
const SMALLEST = 0.005; // a smaller weight is written 0.00, and no find
const RIBBONS_HIGH = 290; // pixels

// A colour as a canvas holds it.
const cssOf = (/** @type {number} */ colour) => `rgb(${colour & 255},${(colour >> 8) & 255},${(colour >> 16) & 255})`;

export class ExplorerPage {
  /** @type {{ side: number, chosen: Chosen } | null} */ pointed = null;

  /**
   * @param {HTMLElement} root
   * @param {ExplorerData} data
   * @param {ArrayBuffer} bytes
   * @param {ExplorerPage | undefined} [before] whose choices are kept
   */
  constructor(root, data, bytes, before) {
    this.root = root;
    this.data = data;
    this.captions = data.captions;
    this.texts = data.texts.map((text) => new TextData(text, bytes));
    this.words = data.texts.map(({ chosen }) => chosen);
    const [first, second] = this.texts;
    this.alike = second !== undefined && first.rows === second.rows && first.columns === second.columns;
    /** @type {Mode} */
    this.mode = "0";
    this.off = data.off && new Off(data.off, bytes, data);
    /** @type {HeadGrid} */
    this.grid =
      before?.grid.renew(data, this.texts, (head) => this.choose(head)) ??
      new HeadGrid(data, this.texts, (head) => this.choose(head), this.off);
    /** @type {Head} */
    this.head = before
      ? this.grid.all[before.head.n]
      : this.off
        ? this.grid.all[this.off.first()]
        : this.most(0, this.words[0]).head;
    this.colours = before?.colours ?? pixelColours(root);
    const { captions } = data;
    const wide = this.texts.every((text) => Math.max(text.rows, text.columns) <= data.ribbons);
    this.lists = this.texts.map((text, side) =>
      text.stored.queries.map((token, i) =>
        button(
          { tabIndex: i === this.words[side] ? 0 : -1, onclick: () => this.take(side, i) },
          element("bdi", token),
        ),
      ),
    );
    this.look = element("p.sa-lede");
    /** @type {Mode[]} */
    const modes = [
      "0",
      ...(second ? /** @type {Mode[]} */ (["1"]) : []),
      ...(this.alike ? /** @type {Mode[]} */ (["difference"]) : []),
      "word",
      ...(this.off ? /** @type {Mode[]} */ (["off"]) : []),
    ];
    if (before && modes.includes(before.mode)) this.mode = before.mode;
    this.modes = new Map(modes.map((mode) => [mode, button({ onclick: () => {
      this.mode = mode;
      this.draw();
    } })]));
    this.scale = element("span.sa-key", { ariaHidden: "true" });
    this.finds = element("div.sa-finds");
    this.heading = element("h2");
    this.means = element("p.sa-means");
    this.shares = element("div.sa-shares", { role: "img" });
    this.ribbons = wide
      ? this.texts.map(
          (text, side) =>
            new Ribbons({
              keys: text.stored.keys,
              queries: text.stored.queries,
              side,
              name: this.label("ribbons", side),
              crossed: text.stored.crossed,
              high: RIBBONS_HIGH,
              ends: { from: captions["goes in"], to: captions["comes out"] },
              heading: element("b", second ? LETTERS[side] : ""),
              point: (chosen, pin) => this.point(side, chosen, pin),
            }),
        )
      : [];
    this.captionsOf = this.texts.map(() => element("p.sa-takes"));
    this.maps = [...this.texts.map((_, side) => this.map(side)), ...(this.alike ? [this.map(2)] : [])];
    this.line = element("p.sa-line", { ariaLive: "polite" });
    this.way = new WayMap(this.texts, captions, (side, j, layer) => this.sayWay(side, j, layer));
    this.next = this.texts.map((text, side) =>
      text.stored.next ? new NextTokens(text, captions, side, (place) => this.take(side, place)) : null,
    );
    this.arrange();
    this.draw();
  }

  /** @type {(side: number, i: number) => HTMLElement} */
  word(side, i) {
    return wordAt(this.texts[side].stored.queries, i);
  }

  /** @type {(side: number, j: number) => HTMLElement} */
  key(side, j) {
    return wordAt(this.texts[side].stored.keys, j);
  }

  arrange() {
    const { root, captions, data } = this;
    const texts = element(
      "div.sa-texts",
      ...this.lists.map((buttons, side) => {
        const line = element(
          "div.sa-text",
          { role: "toolbar", ariaLabel: this.label("text", side), data: { side: String(side) } },
          ...(this.texts.length > 1 ? [element("b", LETTERS[side])] : []),
          ...buttons,
        );
        moveAlong(
          line,
          () => buttons,
          (n) => moveFocus(buttons, buttons[n]),
        );
        return line;
      }),
    );
    const model =
      data.name && filled(captions.model, { name: data.name, layers: data.heads.length, heads: this.grid.all.length });
    root.style.setProperty("--heads", String(Math.max(...data.heads)));
    root.style.setProperty("--letters", String(this.grid.letters));
    root.replaceChildren(
      this.top(model),
      texts,
      element(
        "div.sa-columns",
        element(
          "section",
          { ariaLabel: captions["all heads"] },
          element(
            "div.sa-bar",
            element("span.sa-soft", captions["small maps"]),
            element(
              "span.sa-tabs",
              { role: "group", ariaLabel: captions["small maps"] },
              ...this.modes.values(),
            ),
            this.scale,
          ),
          this.grid.node,
          this.grid.filters(() => this.small(false)),
          this.finds,
        ),
        element(
          "section",
          { ariaLabel: captions["one head"] },
          this.heading,
          this.means,
          ...(this.off ? [this.off.node] : []),
          this.shares,
          element(
            "div.sa-pair",
            ...this.texts.map((_, side) =>
              element("div", ...(this.ribbons[side] ? [this.ribbons[side].node] : []), this.captionsOf[side]),
            ),
          ),
          element(
            "div",
            { className: `sa-maps${this.ribbons.length ? " sa-below-ribbons" : ""}` },
            ...this.maps.map(({ node }) => node),
          ),
          this.line,
        ),
      ),
      element(
        "div.sa-columns.sa-below",
        ...(this.way.there ? [this.way.node] : []),
        ...this.next.flatMap((each) => (each ? [each.node] : [])),
      ),
    );
  }

  /** @type {(model: string) => HTMLElement} the first line */
  top(model) {
    return topOf(this.root, this.captions, this.look, model, () => this.recolour());
  }

  /**
   * A name for screen readers, with the letter of the text if there are two.
   * @type {(name: string, side: number, values?: Record<string, string>) => string}
   */
  label(name, side, values = {}) {
    return filled(this.captions[this.texts.length > 1 ? name : `${name} alone`], { text: LETTERS[side], ...values });
  }

  /** @param {number} which a large map: of text 0 or 1, or 2 for the difference */
  map(which) {
    const side = which === 2 ? 0 : which, text = this.texts[side];
    const picture = new Picture({
      name: "",
      rows: text.rows,
      columns: text.columns,
      point: (place) => this.sayCell(place, which),
    });
    picture.canvas.addEventListener("click", (event) =>
      this.take(side, placeIn(event, picture.canvas, text.rows, text.columns).i),
    );
    const name = which === 2 ? this.captions.difference : this.texts.length > 1 ? LETTERS[side] : "";
    const save = button(
      {
        className: "sa-save",
        ariaLabel: this.captions.save,
        title: this.captions.save,
        onclick: () => savePicture(picture.canvas, `${this.data.name} ${this.grid.nameOf(this.head)} ${name}`),
      },
      "PNG",
    );
    return {
      picture,
      node: element(
        "figure.sa-large-map",
        { data: { side: String(side) } },
        element("figcaption", name, save),
        picture.node,
      ),
    };
  }

  /** @param {Head} head */
  choose(head) {
    if (head === this.head) return;
    this.head = head;
    this.small(false);
    this.large();
    this.announce(0);
  }

  /** @type {(side: number, i: number) => void} choose a word, and the same word in the other text */
  take(side, i) {
    const token = this.texts[side].stored.queries[i];
    if (token === undefined) return;
    this.words = this.words.map((old, other) =>
      other === side ? i : this.texts[other].stored.queries[old] === token ? old : this.texts[other].nearest(token, i),
    );
    this.pointed = null;
    this.draw(this.mode === "word");
    this.announce(side);
  }

  /** @param {number} side */
  announce(side) {
    announce(this.root, {
      text: side,
      layer: this.head.layer,
      head: this.head.head,
      place: this.words[side],
      token: this.texts[side].stored.queries[this.words[side]],
    });
  }

  /** @type {(side: number, chosen: Chosen | null, pin: boolean) => void} */
  point(side, chosen, pin) {
    if (pin && chosen?.kind === "to") return this.take(side, chosen.index);
    this.pointed = chosen && { side, chosen };
    this.large();
  }

  recolour() {
    this.colours = pixelColours(this.root);
    this.draw();
  }

  /** @param {boolean} repaint the small maps too */
  draw(repaint = true) {
    const { captions } = this, heads = this.grid.all.length;
    const common = ["first", "separators"]
      .map((kind) => ({ kind, count: this.grid.habits.filter((each) => each.kind === kind && each.clear).length }))
      .sort((a, b) => b.count - a.count)[0];
    const where = wordOf(captions[`place.${common.kind}`]);
    const word = element("strong", this.word(0, this.words[0]));
    this.look.replaceChildren(
      ...(common.count > 1
        ? phrase(captions.look, { parked: common.count, heads, where, word })
        : phrase(captions["look at one"], { word })),
    );
    this.lists.forEach((buttons, side) =>
      buttons.forEach((button, i) => {
        const on = i === this.words[side],
          { prompt, marks } = this.texts[side].stored;
        button.ariaPressed = String(on);
        button.tabIndex = on ? 0 : -1;
        const bar = this.off?.stored.words[side]?.[i];
        if (bar !== undefined) button.style.boxShadow = `inset 0 -4px ${cssOf(this.colours.difference(bar))}`;
        button.className =
          `${i >= prompt ? "sa-added" : ""} ${marks[i] && !this.texts[side].stored.crossed ? "sa-mark" : ""}`;
      }),
    );
    for (const [mode, button] of this.modes) {
      button.ariaPressed = String(mode === this.mode);
      const names = {
        0: this.texts.length > 1 ? LETTERS[0] : captions["all tokens"],
        1: LETTERS[1],
        difference: captions.difference,
        off: captions["off map"],
      };
      button.replaceChildren(
        ...(mode === "word" ? phrase(captions.only, { word: this.word(0, this.words[0]) }) : [names[mode]]),
      );
    }
    this.legend();
    this.small(repaint);
    this.suggest();
    this.way.update(this.words, this.colours);
    this.next.forEach((each, side) => each?.show(this.words[side]));
    this.large();
  }

  /** @param {boolean} repaint */
  small(repaint) {
    this.grid.update({ chosen: this.head, mode: this.mode, words: this.words, colours: this.colours, repaint });
  }

  legend() {
    const { colours, captions } = this, css = (/** @type {number} */ colour) => {
      const patch = element("i");
      patch.style.background = cssOf(colour);
      return patch;
    };
    const ends =
      this.mode === "off"
        ? [captions["speaks against"], captions["speaks for"]]
        : LETTERS.map((text) => filled(captions["more in"], { text }));
    this.scale.replaceChildren(...(this.mode === "difference" || this.mode === "off" ?
      [ends[0], ...[-0.6, -0.2, 0, 0.2, 0.6].map((d) => css(colours.difference(d))), ends[1]] :
      ["0", ...[0, 0.1, 0.3, 0.6, 1].map((w) => css(colours.weight(this.mode === "1" ? 1 : 0, w))), "1",
        ...(this.mode === "word" && this.texts.length > 1 ? [captions["above below"]] : [])]));
  }

  /**
   * The head in which a word attends most to another word that is neither next to it nor the first, which many heads
   * attend to; its weight is 0 if there is no such word.
   * @type {(side: number, i: number) => { head: Head; weight: number; j: number; }}
   */
  most(side, i) {
    const { marks, crossed } = this.texts[side].stored;
    let best = { head: this.grid.all[0], weight: 0, j: 0 };
    for (const head of this.grid.all) {
      this.texts[side].row(head, i).forEach((weight, j) => {
        if (weight > best.weight && !marks[j] && (crossed || (j > 0 && Math.abs(j - i) > 1))) {
          best = { head, weight, j };
        }
      });
    }
    return best;
  }

  /** @type {(at: { side: number, j: number, weight: number }) => Child[]} such as: bank takes 0.71 from river (A) */
  found({ side, j, weight }) {
    const values = {
      word: this.word(side, this.words[side]),
      weight: fixed(weight, 2),
      from: this.key(side, j),
      text: LETTERS[side],
    };
    return phrase(this.captions[this.texts.length > 1 ? "takes most" : "cell"], values);
  }

  suggest() {
    const { captions, texts } = this;
    /** @type {[Head, Child[], string][]} */
    const found = this.off
      ? [
          [
            this.grid.all[this.off.first()],
            this.off.sentence(this.off.first(), `off ${this.off.stored.kind} short`),
            captions["matters most"],
          ],
        ]
      : [];
    found.push(
      ...texts.flatMap((_, side) => {
        const { head, weight, j } = this.most(side, this.words[side]);
        return weight < SMALLEST
          ? []
          : [/** @type {[Head, Child[], string]} */ ([head, this.found({ side, weight, j }), captions["the most"]])];
      }),
    );
    if (this.alike) {
      const gap = (/** @type {Head} */ head) => {
        const [a, b] = texts.map((text, side) => text.row(head, this.words[side]));
        return dot(a.length, (j) => Math.abs(a[j] - b[j])) / 2;
      };
      const gaps = this.grid.all.map(gap), n = gaps.indexOf(Math.max(...gaps));
      if (gaps[n] >= SMALLEST) {
        found.push([
          this.grid.all[n],
          phrase(captions.moved, { weight: fixed(gaps[n], 2), word: this.word(0, this.words[0]) }),
          captions["most different"],
        ]);
      }
    }
    const local = ["before", "after", "itself"].map((name) => this.data.names.indexOf(name));
    const clearest = this.grid.habits
      .map(({ shares }, n) => ({ n, k: local.reduce((a, b) => (shares[b] > shares[a] ? b : a)), shares }))
      .reduce((a, b) => (b.shares[b.k] > a.shares[a.k] ? b : a));
    if (!texts[0].stored.crossed && clearest.shares[clearest.k] >= SMALLEST) {
      found.push([
        this.grid.all[clearest.n],
        phrase(captions.clearest, {
          habit: captions[`habit.${this.data.names[clearest.k]}`],
          share: fixed(clearest.shares[clearest.k], 2),
        }),
        captions["the clearest"],
      ]);
    }
    this.finds.replaceChildren(...found.map(([head, says, why]) => button({ onclick: () => this.choose(head) },
      element("b", ...says), element("small", filled(why, { head: this.grid.nameOf(head) })))));
  }

  large() {
    const { captions, head, data } = this, habit = this.grid.habits[head.n];
    const weights = this.texts.map((text) => text.weights(head));
    this.off?.draw(head.n);
    this.heading.textContent = filled(captions.heading, {
      layer: head.layer,
      head: head.head,
      kind: this.grid.kindOf(head.n),
    });
    const tops = weights.map((matrix, side) => {
      const row = [...matrix.row(this.words[side])];
      return { side, weight: Math.max(...row), j: row.indexOf(Math.max(...row)) };
    }).sort((a, b) => b.weight - a.weight)[0];
    const share = habit.shares[data.names.indexOf(habit.kind)];
    this.means.replaceChildren(
      captions[`means.${habit.kind}`],
      ...(habit.clear ? [] : [" ", filled(captions["in part"], { share: fixed(100 * share, 0) })]),
      ...(["broad", "mixed"].includes(habit.kind) && tops.weight > 0.4
        ? [" ", ...phrase(captions.exception, { found: this.found(tops) })]
        : []),
    );
    const order = range(data.names.length)
      .filter((k) => habit.shares[k] >= 0.01)
      .sort((a, b) => habit.shares[b] - habit.shares[a]);
    this.shares.ariaLabel = filled(captions.shares, {
      entropy: fixed(habit.entropy, 2),
      list: order.map((k) => `${captions[`kind.${data.names[k]}`]} ${fixed(habit.shares[k], 2)}`).join(", "),
    });
    this.shares.title = this.shares.ariaLabel;
    this.shares.replaceChildren(
      ...order.map((k, n) => {
        const part = element(
          "i",
          { className: n ? "" : "sa-most" },
          `${captions[`kind.${data.names[k]}`]}\u00a0${fixed(habit.shares[k], 2)}`,
        );
        part.style.flex = String(habit.shares[k]);
        return part;
      }),
    );
    this.texts.forEach((text, side) => {
      const pointed = this.pointed && this.pointed.side === side ? this.pointed.chosen : null;
      /** @type {Chosen} */
      const selected = pointed ?? { kind: "to", index: this.words[side] };
      this.ribbons[side]?.update({ weights: weights[side], selected });
      this.captionsOf[side].replaceChildren(...this.takes(side, weights[side], selected));
      this.drawMap(side, (i, j) => this.colours.weight(side, weights[side].at(i, j)),
        this.label("map", side, { head: this.grid.nameOf(head) }));
    });
    if (this.alike) {
      const [a, b] = weights;
      this.drawMap(
        2,
        (i, j) => this.colours.difference(b.at(i, j) - a.at(i, j)),
        filled(captions["map of difference"], { head: this.grid.nameOf(head) }),
      );
    }
    this.sayCell(null, 0);
  }

  /** @type {(which: number, colour: (i: number, j: number) => number, name: string) => void} */
  drawMap(which, colour, name) {
    const { picture } = this.maps[which], { rows, columns } = picture.options;
    paint(picture.canvas, rows, columns, colour);
    picture.canvas.ariaLabel = name;
    picture.outline(this.words[which % 2]);
  }

  /**
   * Such as: bank gives weight 0.71 to river, 0.07 to he.
   * @type {(side: number, weights: Matrix, selected: Chosen) => Child[]}
   */
  takes(side, weights, { kind, index }) {
    const to = kind === "to", n = to ? weights.columns : weights.rows;
    const most = range(n)
      .map((k) => ({ k, weight: to ? weights.at(index, k) : weights.at(k, index) }))
      .sort((a, b) => b.weight - a.weight)
      .filter(({ weight }, n) => n === 0 || (n < LISTED && weight >= SMALLEST));
    const parts = most.map(({ k, weight }) =>
      phrase(this.captions[to ? "part" : "takes from"], {
        word: to ? this.key(side, k) : this.word(side, k),
        weight: fixed(weight, 2),
      }),
    );
    return phrase(this.captions[to ? "takes" : "give"], {
      word: to ? this.word(side, index) : this.key(side, index),
      list: parts.flatMap((part, n) => (n ? [", ", ...part] : part)),
    });
  }

  /** @type {(place: Place | null, which: number) => void} */
  sayCell(place, which) {
    if (!place) return this.line.replaceChildren(this.captions.point);
    const { i, j } = place;
    const sides = this.alike ? range(this.texts.length) : [which];
    this.line.replaceChildren(
      ...sides.flatMap((side, n) => [
        ...(n ? [" · "] : []),
        ...(this.texts.length > 1 ? [element("b", { data: { side: String(side) } }, `${LETTERS[side]} `)] : []),
        ...phrase(this.captions.cell, {
          word: this.word(side, i),
          from: this.key(side, j),
          weight: fixed(this.texts[side].row(this.head, i)[j], 3),
        }),
      ]),
    );
  }

  /** @type {(side: number, j: number, layer: number) => Child[]} */
  sayWay(side, j, layer) {
    const share = this.texts[side].way(this.words[side])?.at(layer, j) ?? 0;
    return phrase(this.captions[layer ? "way cell" : "way cell in"], {
      layer,
      share: fixed(share, 3),
      word: this.word(side, this.words[side]),
      from: this.key(side, j),
    });
  }
}

const SHARP = 16; // pixels of a saved picture for each weight, about

/** @type {(canvas: HTMLCanvasElement, name: string) => void} save a picture as PNG, its cells enlarged */
function savePicture(canvas, name) {
  const large = element("canvas", { width: canvas.width * SHARP, height: canvas.height * SHARP }),
    context = large.getContext("2d");
  if (!context) return;
  context.imageSmoothingEnabled = false;
  context.drawImage(canvas, 0, 0, large.width, large.height);
  element("a", { href: large.toDataURL(), download: `${name.trim()}.png` }).click();
}

if (typeof document !== "undefined") start("sa-explorer", ExplorerPage); // a worker of a live page has none
