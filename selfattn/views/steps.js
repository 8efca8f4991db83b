/*
 * A view of a page: draws its data (see draw.py), shows how a number is computed, computes again in float64 when a
 * number is changed. A view changes nothing outside its root, so that a notebook can hold several. first_screen.js
 * and stage.js draw the numbers; lesson.js puts views together.
 */

import { same } from "./compute.js";
import { Exercise } from "./exercise.js";
import { FirstScreen } from "./first_screen.js";
import { bring, button, chooser, element } from "./kit/page.js";
import { Numbers } from "./numbers.js";
import { Stage } from "./stage.js";
import { Walk } from "./walk.js";
import { Words } from "./words.js";

/** @typedef {import("./kit/page.js").Child} Child */
/** @typedef {import("./lesson.js").Lesson} Lesson */
/** @typedef {import("./numbers.js").NodeOfPage} NodeOfPage */
/** @typedef {import("./numbers.js").PageData} PageData */
/** @typedef {import("./stage.js").Grid} Grid */

const SLICE_MS = 8; // of a frame, in which stages that are not in sight are written

export class View {
  /** @type {WeakMap<EventTarget, { grid: Grid, r: number, c: number }>} */ places = new WeakMap();
  /** @type {Map<NodeOfPage, Grid[]>} the tables that show a matrix */ grids = new Map();
  /** @type {[Element, string][]} */ lit = [];
  /** @type {Element | null} */ pinned = null;
  /** @type {Element | null} */ hovered = null;
  /** @type {[number, number]} */ pointer = [-1, -1];
  /** @type {Stage[]} */ stages = [];
  /** @type {FirstScreen | null} */ screen = null;
  /** @type {Set<Stage>} open stages whose tables are to be written */ stale = new Set();
  frame = 0;

  /** @param {HTMLElement} root @param {Lesson} lesson @param {PageData} data @param {number} n its place there */
  constructor(root, lesson, data, n) {
    this.root = root;
    this.lesson = lesson;
    this.data = data;
    this.texts = data.texts;
    this.labels = data.labels;
    this.numbers = new Numbers(data);
    this.words = new Words(data, this.numbers);
    this.walk = new Walk(this);
    this.exercise = new Exercise(this);
    this.details = element("div.sa-details");
    this.n = n;
  }

  /** Draw the view, when it is shown for the first time. */
  build() {
    if (this.details.isConnected) return;
    const { data, n } = this, start = this.alone ? `${n ? `view=${n + 1}&` : ""}stage=` : "";
    this.stages = data.stages.map((stage) => new Stage(this, stage, start && start + stage.name));
    this.bar = this.makeBar();
    this.details.append(
      this.bar,
      element("p.sa-hint", this.texts.hint),
      ...this.stages.map(({ node }) => node),
    );
    this.screen = data.heads.length ? new FirstScreen(this, data.heads) : null;
    this.root.append(...(this.screen ? [this.screen.dock, this.screen.node] : []), this.details);
    this.exercise.build(this.bar);
    this.listen();
    this.walk.follow("");
  }

  get alone() {
    return "alone" in this.lesson.root.dataset;
  }

  /** @param {number} side */
  sideName(side) {
    return this.texts[side ? "second" : "first"] || this.labels[`t${side}`].join(" ");
  }

  /** @param {NodeOfPage} node */
  gridsOf(node) {
    const found = this.grids.get(node) ?? [];
    this.grids.set(node, found);
    return found;
  }

  /** @type {(node: NodeOfPage, i: number, j: number) => Element[]} the cells that show a number */
  cellsOf(node, i, j) {
    return this.gridsOf(node).flatMap((grid) => {
      const [r, c] = grid.find(i, j) ?? [-1, -1];
      return grid.heat?.cells[r]?.[c] ?? [];
    });
  }

  /** @param {Element | null} td whose sources are outlined, and whose sum is written below its stage */
  light(td) {
    for (const [cell, name] of this.lit) cell.classList.remove(name);
    this.lit = [];
    for (const { said } of this.stages) said.replaceChildren();
    const place = td && this.places.get(td);
    if (!place) return;
    const cell = place.grid.cell(place.r, place.c), sources = this.numbers.sources(cell);
    const add = (/** @type {string} */ name, /** @type {Element[]} */ cells) => {
      for (const each of cells) {
        each.classList.add(name);
        this.lit.push([each, name]);
      }
    };
    for (const [colour, node, i, j] of sources) add(`sa-${colour}`, this.cellsOf(node, i, j));
    for (const [node, i, j] of this.numbers.ancestors(sources)) {
      add("sa-far", this.cellsOf(node, i, j).filter((other) => this.lit.every(([each]) => each !== other)));
    }
    place.grid.stage.said.replaceChildren(...this.words.sentence(cell));
  }

  /** @type {(stage: Stage | undefined, message: Child) => void} */
  tell(stage, message) {
    this.light(null);
    stage?.said.replaceChildren(message);
  }

  makeBar() {
    const { texts, labels, walk } = this, { toured } = this.lesson; // the tour has Back and Play
    const named = (/** @type {string} */ name, /** @type {() => void} */ act, text = texts[name]) =>
      button({ data: { do: name }, onclick: act }, text);
    const others = labels.t1 ?? labels.t0;
    const tokens = labels.t0.map((token, i) =>
      others[i] === token || i >= others.length ? token : `${token} / ${others[i]}`,
    );
    const goTo = chooser(texts["go to"], this.stages.map(({ heading }) => heading), 0, (n) =>
      walk.goTo(this.stages[n]),
    );
    this.chosen = goTo.querySelector("select");
    this.counter = element("span.sa-count");
    this.playButton = named("play", () => walk.toggle());
    this.openButton = named("open all", () => {
      const open = this.stages.some(({ isOpen }) => !isOpen);
      for (const stage of this.stages) stage.open(open);
    });
    return element(
      "div.sa-bar",
      { role: "group", ariaLabel: texts.title },
      this.openButton,
      named("previous", () => walk.step(-1), texts[toured ? "number before" : "previous"]),
      ...(toured ? [] : [this.playButton]),
      named("next", () => walk.step(1), texts[toured ? "number after" : "next"]),
      this.counter,
      goTo,
      chooser(texts.follow, [texts.everything, ...tokens], 0, (n) => walk.follow(n ? String(n - 1) : "")),
    );
  }

  /** A stage was opened or closed. */
  opened() {
    const closed = this.stages.some(({ isOpen }) => !isOpen);
    this.openButton?.replaceChildren(this.texts[closed ? "open all" : "close all"]);
    this.exercise.count();
  }

  /** @param {string} name of a stage to open and go to */
  openStage(name) {
    const stage = this.stages.find((each) => each.name === name);
    if (!stage) return;
    stage.open(true);
    bring(stage.node, "start");
    stage.fold.focus({ preventScroll: true });
  }

  /**
   * The stage says what changed.
   * @type {(node: NodeOfPage, i: number, j: number, value: number, stage?: Stage) => void}
   */
  change(node, i, j, value, stage = this.gridsOf(node)[0]?.stage) {
    this.walk.stop();
    if (same(value, node.now.at(i, j), 0)) return this.draw(); // what was typed is gone
    node.edits.set(i * node.shape[1] + j, value);
    this.compute();
    this.tell(stage, this.words.whatMoved());
  }

  /**
   * Set all numbers back, then make these changes.
   * @param {[string, number, number, number][]} changes node, row, column, value
   */
  set(changes) {
    if (!changes.length && !this.numbers.edited) return;
    for (const node of this.numbers.nodes) node.edits.clear();
    for (const [id, i, j, value] of changes) {
      const node = this.numbers.node(id);
      node.edits.set(i * node.shape[1] + j, value);
    }
    this.compute();
  }

  reset() {
    this.set([]);
    const now = this.stages.find(({ node }) => node.classList.contains("sa-now"));
    this.tell(now ?? this.stages[0], this.texts["is reset"]);
  }

  compute() {
    this.numbers.compute();
    this.draw();
  }

  draw() {
    this.screen?.draw();
    this.exercise.count();
    const open = this.stages.filter(({ isOpen }) => isOpen), inSight = open.filter(({ node }) => {
      const { top, bottom } = node.getBoundingClientRect();
      return bottom > 0 && top < innerHeight;
    });
    for (const stage of open) this.stale.add(stage);
    for (const stage of inSight) stage.draw();
    this.drawLater();
  }

  /** Write stages that are not in sight, some in each frame. */
  drawLater() {
    this.root.toggleAttribute("data-stale", this.stale.size > 0);
    cancelAnimationFrame(this.frame);
    if (!this.stale.size) return;
    this.frame = requestAnimationFrame(() => {
      const end = performance.now() + SLICE_MS;
      for (const stage of this.stale) {
        stage.draw();
        if (performance.now() > end) break;
      }
      this.drawLater();
    });
  }

  listen() {
    const cellOf = (/** @type {Event} */ event) => {
      const td = /** @type {Element} */ (event.target).closest("td");
      return td && this.places.has(td) ? td : null;
    };
    this.root.addEventListener("pointerover", (event) => {
      const td = cellOf(event);
      const still = event.screenX === this.pointer[0] && event.screenY === this.pointer[1];
      this.pointer = [event.screenX, event.screenY];
      if (td === this.hovered || still) return; // the page scrolled, the pointer did not move
      this.hovered = td;
      if (td) this.light(td);
    });
    this.root.addEventListener("pointerleave", () => {
      this.hovered = null;
      if (this.pinned) this.light(this.pinned);
    });
    this.root.addEventListener("focusin", (event) => {
      const td = cellOf(event), place = td && this.places.get(td);
      if (!place || event.target !== td) return;
      this.pinned = td;
      this.walk.arrive(place.grid, place.r, place.c);
      this.light(td);
    });
  }
}
