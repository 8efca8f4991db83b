/*
 * The way back: two strips of matrices, gradients under their matrices, and one number at a time with its sum and a
 * check.
 */

import { clamp, dot, filled, fixed, largest, range } from "./compute.js";
import { Heat } from "./kit/heat.js";
import { announce, bring, button, element, phrase, shape, start, topOf, wordOf } from "./kit/page.js";
import { Tour } from "./kit/tour.js";
import { Numbers } from "./numbers.js";
import { meanOf } from "./operations.js";
import { Words } from "./words.js";

/** @typedef {import("./kit/page.js").Child} Child */
/** @typedef {import("./kit/tour.js").Stop} Stop */
/** @typedef {import("./numbers.js").NodeOfPage} NodeOfPage */
/** @typedef {import("./numbers.js").PageData} PageData */

/**
 * @typedef {object} WayBackData
 * @property {Record<string, [string, string]>} pairs the nodes of each matrix and of its gradient
 * @property {string} scale the node of the scale
 * @property {number} row
 * @property {(Stop & { stage: number })[]} stops
 * @property {Record<string, string>} captions
 */
/**
 * @typedef {object} Column a matrix above its gradient
 * @property {string} name
 * @property {number} at the stop that reveals the gradient
 * @property {NodeOfPage[]} nodes
 * @property {Heat[]} heats
 * @property {HTMLElement} heading of the gradient
 * @property {HTMLElement} below
 */

const BALANCE = { high: 236, top: 28, bottom: 196, left: 44, right: 46, least: 330, most: 700 }; // pixels
const LATEST = 12; // the largest scale
const STEP = 1e-4; // the step of a finite difference
const SATURATED = 0.97; // a weight above this is nearly 1
const WAY = ["O", "V", "P", "S", "QK", "x"]; // the gradients that each stop reveals
const GROUPS = "QSPO"; // stages with an arrow before them

class WayBackPage {
  shown = WAY.length; // the gradients of these first stops are shown
  now = -1; // the stop

  /** @param {HTMLElement} root @param {WayBackData & PageData} data */
  constructor(root, data) {
    const { captions, labels, pairs, stops } = data;
    this.root = root;
    this.data = data;
    this.numbers = new Numbers(data);
    this.words = new Words(data, this.numbers);
    this.scale = this.numbers.node(data.scale);
    this.row = data.row;
    this.zeros = labels.t0.map(() => element("span", "Σ = 0"));
    this.columns = Object.entries(pairs).map(([name, ids], n) => this.column(name, ids, n));
    this.byName = Object.fromEntries(this.columns.map((column) => [column.name, column]));
    this.cell = { column: this.byName.S, i: data.row, j: 0 }; // the number that is checked
    this.rows = labels.t0.map((token, i) => button({ onclick: () => {
      this.row = i;
      this.draw();
    } }, element("bdi", token)));
    this.heading = element("h2");
    this.art = shape("svg", { role: "img", class: "sa-balance" });
    this.caption = element("figcaption");
    this.check = element("div.sa-check", { ariaLive: "polite" });
    this.slider = element("input", {
      type: "range",
      min: "0",
      max: String(LATEST),
      step: "0.01",
      ariaLabel: captions.scale,
      oninput: () => {
        const value = Number(this.slider.value), first = this.scale.kernel.at(0, 0);
        this.change(this.scale, 0, Math.abs(value - first) < 0.05 ? first : value);
      },
    });
    this.scaleText = element("output");
    this.look = element("p", ...phrase(captions.look));
    const tour = new Tour({
      stops,
      texts: captions,
      show: (stop, open) => this.stop(/** @type {(Stop & { stage: number }) | null} */ (stop), open),
    });
    const tabs = element("span.sa-tabs", { role: "group", ariaLabel: captions.row }, ...this.rows);
    this.balance = element(
      "figure.sa-balance-figure",
      element("div.sa-top", this.heading, tabs),
      this.art,
      this.caption,
    );
    const bar = element(
      "div.sa-bar",
      element("label", element("strong", captions.scale), " ", this.slider, " ", this.scaleText),
      button({ onclick: () => this.reset() }, captions.reset),
    );
    const side = element("div", this.check, bar, element("p.sa-soft", captions.try));
    root.replaceChildren(
      topOf(root, captions, this.look, "", () => this.draw()),
      ...(stops.length ? [tour.node] : []),
      this.strip(),
      element("div.sa-low", this.balance, side),
    );
    this.draw();
    new ResizeObserver(() => this.drawBalance()).observe(root);
  }

  reset() {
    for (const node of this.numbers.nodes) node.edits.clear();
    this.row = this.data.row;
    this.draw();
  }

  /** @type {(name: string, ids: string[], n: number) => Column} */
  column(name, ids, n) {
    const { captions, labels: all } = this.data, areAlike = all.t0.length === all.k0.length;
    const nodes = ids.map((id) => this.numbers.node(id));
    const heats = nodes.map((node, which) => {
      const [rows, columns] = node.shape;
      const labels = (/** @type {string} */ list, /** @type {number} */ count) => all[list] ?? range(count).map(String);
      return new Heat({
        name: captions[`${which ? "gradient" : "name"}.${name}`],
        rows,
        columns,
        kind: name === "P" && !which ? "share" : "signed",
        rowLabels: n === 0 || (!areAlike && "KS".includes(name)) ? labels(node.rows, rows) : undefined,
        columnLabels: labels(node.columns, columns),
        point: (place) => {
          if (!place) return;
          this.cell = { column: this.byName[name], ...place };
          this.drawCheck();
          announce(this.root, { stage: name, row: place.i, column: place.j });
        },
        edit: node.editable
          ? (i, j, value) => {
              if (which && value !== 0) this.row = i;
              this.change(node, i * columns + j, value);
            }
          : undefined,
      });
    });
    const formula = element("small", captions[`formula.${name}`]);
    const heading = element("div.sa-stage-name", captions[`gradient.${name}`], formula);
    const below = element("div.sa-gradient", { data: { stage: name } }, heats[1].node);
    if (name === "S") below.append(element("div.sa-zeros", ...this.zeros));
    return { name, at: WAY.findIndex((some) => some.includes(name)), nodes, heats, heading, below };
  }

  strip() {
    const { captions } = this.data;
    /** @type {(lead: string, sign: string, make: (column: Column) => HTMLElement) => HTMLElement[]} */
    const row = (lead, sign, make) => [
      element("span.sa-side", lead),
      ...this.columns.flatMap((column, n) => [
        ...(n && GROUPS.includes(column.name)
          ? [element("span.sa-op", { ariaHidden: "true" }, sign)]
          : []),
        make(column),
      ]),
    ];
    const rows = [
      row("", "", ({ name }) => element("div.sa-stage-name", captions[`name.${name}`])),
      row(captions.in, "→", ({ heats }) => heats[0].node),
      row("", "", ({ heading }) => heading),
      row(captions.back, "←", ({ below }) => below),
    ];
    const strip = element("div.sa-strip", { role: "group", ariaLabel: captions.strip }, ...rows.flat());
    strip.style.setProperty("--columns", String(rows[0].length));
    return strip;
  }

  /** @type {(node: NodeOfPage, index: number, value: number) => void} */
  change(node, index, value) {
    if (Number.isFinite(value)) node.edits.set(index, value);
    this.draw();
  }

  /** @type {(stop: (Stop & { stage: number }) | null, open: boolean) => void} */
  stop(stop, open) {
    this.now = stop?.stage ?? -1;
    this.shown = stop ? stop.stage + Number(open) : WAY.length;
    this.draw();
    const asked = this.columns.find(({ at }) => at === this.now);
    if (asked) bring(asked.heading, "nearest"); // a strip that is wider than a phone scrolls
  }

  draw() {
    this.numbers.compute();
    const { columns, row, shown, byName: { S, P } } = this, { captions } = this.data;
    const size = Math.max(...columns.map((each) => (each === S || each === P ? 0 : largest(each.nodes[0].now.data))));
    for (const column of columns) {
      const { name, at, nodes: [{ now: matrix, rows }, { now: gradient }], heats: [above, under] } = column;
      const marked = rows === "t0" ? row : -1;
      above.update({
        matrix,
        size: column === P ? 1 : column === S ? largest(matrix.data) : size,
        row: marked,
        write: (x) => (Number.isFinite(x) ? figure(x, 2) : captions.closed),
      });
      under.update({
        matrix: gradient,
        size: largest(gradient.data),
        row: marked,
        write: (x) => (x === 0 ? "0" : name === "O" ? figure(x, 1) : signedFigure(x, 3)),
      });
      for (const part of [column.heading, column.below]) part.toggleAttribute("data-later", at >= shown);
      column.heading.classList.toggle("sa-now", at === this.now);
    }
    for (const part of [this.balance, this.look]) part.toggleAttribute("data-later", S.at >= shown);
    this.rows.forEach((button, i) => {
      button.ariaPressed = String(i === row);
      this.zeros[i].classList.toggle("sa-on", i === row);
    });
    const scale = this.scale.now.at(0, 0), isSaturated = Math.max(...P.nodes[0].now.row(row)) > SATURATED;
    this.slider.value = String(scale);
    this.scaleText.textContent = `× ${figure(scale, 2)}${isSaturated ? `: ${captions.saturated}` : ""}`;
    this.drawBalance();
    this.drawCheck();
  }

  drawCheck() {
    const { numbers, words, columns, cell: { column, i, j } } = this, { captions } = this.data;
    const { name, nodes: [node, back] } = column, isLater = column.at >= this.shown;
    this.check.toggleAttribute("data-later", isLater);
    const sources = isLater ? [] : numbers.sources({ node: back, i, j }).slice(1);
    for (const { nodes, heats } of columns) {
      heats.forEach((heat, which) => {
        const from = sources.filter(([, of]) => of === nodes[which]).map(([, , i, j]) => ({ i, j }));
        heat.mark(node === nodes[0] ? { i, j } : null, from);
      });
    }
    const value = node.now.at(i, j), gradient = back.now.at(i, j), isClosed = !Number.isFinite(value);
    const slope = this.slope(node, i * node.shape[1] + j);
    const agrees = Math.abs(slope - gradient) < 1e-5 * Math.max(1, Math.abs(gradient));
    const says = isClosed
      ? captions["closed means"]
      : Math.abs(gradient) < 5e-5
        ? captions["no help"]
        : filled(captions[gradient > 0 ? "gains" : "loses"], { gain: figure(Math.abs(gradient) / 10, 3) });
    const line = (/** @type {string} */ term, /** @type {Child[]} */ ...parts) => [
      element("dt", captions[term]),
      element("dd", ...parts),
    ];
    const [sum] = (words.spell({ node: back, i, j }) ?? captions.chosen).replaceAll("-", "−").split(/ [=≈] /);
    const place = words.name({ node, i, j }, false, captions[`name.${name}`]);
    const measured = filled(captions.measured, { step: STEP, slope: signedFigure(slope, 4) });
    this.check.replaceChildren(
      element("h2", ...phrase(captions.now, { place, value: isClosed ? captions.closed : figure(value, 3) })),
      element(
        "dl",
        ...line(
          "gradient",
          element("strong", signedFigure(gradient, 4)),
          ` = ${sum}${name === "x" ? ` (${captions.ways})` : ""}`,
        ),
        ...line("means", says),
        ...(isClosed ? [] : line("nudged", `${measured}${agrees ? ` ${captions.same}` : ""}`)),
      ),
    );
  }

  /** @type {(node: NodeOfPage, index: number) => number} the finite difference of the sum of output · dO */
  slope(node, index) {
    const [output, wish] = this.byName.O.nodes, { edits } = node, value = node.now.data[index];
    const [more, less] = [STEP, -STEP].map((by) => {
      node.edits = new Map(edits).set(index, value + by);
      this.numbers.compute();
      return dot(wish.mine.data.length, (k) => output.mine.data[k] * wish.mine.data[k]);
    });
    node.edits = edits;
    this.numbers.compute();
    return (more - less) / (2 * STEP);
  }

  /**
   * Draw a row of dS as areas: the width is the weight, the height is dP minus the mean. The areas above the line add
   * up to those below.
   */
  drawBalance() {
    const { row, art, byName: { S, P }, data: { captions, labels } } = this, [p, dp] = P.nodes;
    const { high, top, bottom, left, right, least, most } = BALANCE;
    const [shares, said, gradients] = [p, dp, S.nodes[1]].map(({ now }) => [...now.row(row)]);
    const word = labels.t0[row], mean = meanOf(p.now, dp.now, row), isEmpty = said.every((x) => x === 0);
    const wide = clamp(this.balance.clientWidth || 660, least, most);
    art.setAttribute("viewBox", `0 0 ${wide} ${high}`);
    const highest = Math.max(0.01, ...said), low = Math.min(0, ...said);
    const up = (/** @type {number} */ y) => bottom - ((y - low) / (highest - low)) * (bottom - top), line = up(mean);
    /** @type {SVGElement[]} */
    const drawn = [];
    /** @type {(x: number, y: number, text: string, look: string, anchor?: string) => number} */
    const write = (x, y, text, look, anchor = "middle") =>
      drawn.push(shape("text", { x, y, class: look, "text-anchor": anchor }, text));
    let x = left;
    const parts = shares.map((share, j) => {
      const long = share * (wide - left - right), middle = x + long / 2, says = up(said[j]), isAbove = said[j] > mean;
      const values = {
        word: labels.k0[j],
        share: figure(share, 2),
        says: figure(said[j], 2),
        gradient: signedFigure(gradients[j], 3),
      };
      /** @type {(a: number, b: number, look: string) => number} */
      const box = (a, b, look) =>
        drawn.push(shape("rect", {
          x: x + 1,
          width: Math.max(0, long - 2),
          y: Math.min(a, b),
          height: Math.abs(a - b),
          class: look,
        }));
      box(up(0), isAbove ? line : says, "sa-plain");
      box(says, line, isAbove ? "sa-gain" : "sa-loss");
      if (share > 0.07) {
        const y = Math.min(says, line), tall = Math.abs(says - line);
        write(middle, 214, values.word, "sa-strong-text");
        write(middle, 231, filled(captions.share, values), "sa-note");
        const beyond = isAbove ? y - 6 : Math.min(y + tall + 17, bottom - 4);
        write(middle, beyond, filled(captions.says, { value: values.says }), "sa-note");
        const inside = tall > 24 ? y + tall / 2 + 5 : isAbove ? y + tall + 18 : y - 8;
        write(middle, inside, values.gradient, "sa-strong-text");
      }
      x += long;
      return filled(captions["picture part"], values);
    });
    drawn.push(shape("line", { x1: left, x2: wide - right + 4, y1: line, y2: line, class: "sa-mean" }));
    write(left - 4, line + 5, figure(mean, 3), "sa-note", "end");
    write(wide - right + 7, line + 5, captions.mean, "sa-note", "start");
    art.replaceChildren(...drawn);
    art.ariaLabel = filled(captions.picture, { word, list: parts.join("; "), mean: figure(mean, 3) });
    this.heading.replaceChildren(...phrase(captions[isEmpty ? "empty" : "balance"], { word: wordOf(word) }));
    const sum = gradients.map((gradient) => signedFigure(gradient, 4)).join(" ");
    this.caption.replaceChildren(...phrase(captions[isEmpty ? "choose another" : "balance sum"], { sum }));
  }
}

/** @type {(x: number, decimals: number) => string} with a true minus sign, which 0 never has */
function figure(x, decimals) {
  const plain = fixed(x, decimals);
  return plain.replace("-", Number(plain) === 0 ? "" : "−");
}

/** @type {(x: number, decimals: number) => string} */
function signedFigure(x, decimals) {
  const plain = figure(x, decimals);
  return plain.startsWith("−") ? plain : `+${plain}`;
}

start("sa-way-back", WayBackPage);
