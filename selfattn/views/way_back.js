/*
 * The way back: two strips of matrices, gradients under their matrices, and one number at a time with its sum and a
 * check.
 */

import { filled, fixed, largest, range } from "./compute.js";
import { Heat } from "./kit/heat.js";
import { announce, button, element, phrase, shape, start, topOf, wordOf } from "./kit/page.js";
import { Tour } from "./kit/tour.js";
import { WayBackModel } from "./way_back_compute.js";

/** @typedef {import("./compute.js").Matrix} Matrix */
/** @typedef {import("./kit/page.js").Child} Child */
/** @typedef {import("./kit/tour.js").Stop} Stop */
/** @typedef {import("./way_back_compute.js").Stage} Stage */

/**
 * @typedef {object} WayBackData
 * @property {string[]} queries
 * @property {string[]} keys
 * @property {Record<string, number[][]>} forward x or Q, K and V
 * @property {Record<string, { weight: number[][], bias: number[] }> | null} weights of projections
 * @property {number} scale
 * @property {number[][]} closed
 * @property {number[][]} added to the scores
 * @property {number[][]} wish the gradient of the output
 * @property {number} row
 * @property {(Stop & { stage: number })[]} stops
 * @property {Record<string, string>} captions
 */

const BALANCE = { high: 236, top: 28, bottom: 196, left: 44, right: 46, least: 330, most: 700 }; // pixels
const LATEST = 12; // the largest scale
const STEP = 1e-4; // the step of a finite difference
const SATURATED = 0.97; // a weight above this is nearly 1
/** @type {Stage[][]} the gradients that each stop reveals */
const WAY = [["O"], ["V"], ["P"], ["S"], ["Q", "K"], ["x"]];
const GROUPS = "QSPO"; // stages with an arrow before them

class WayBackPage {
  /** @type {Record<string, Heat>} */ above = {};
  /** @type {Record<string, Heat>} */ below = {};
  /** @type {Record<string, HTMLElement>} */ heads = {};

  /** @param {HTMLElement} root @param {WayBackData} data */
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.captions = data.captions;
    this.model = new WayBackModel(data);
    this.row = data.row;
    /** @type {{ stage: Stage, i: number, j: number }} */
    this.cell = { stage: "S", i: data.row, j: 0 };
    this.shown = WAY.length; // the gradients of these first stages are shown
    this.now = -1;
    this.forward = this.model.forward();
    this.back = this.model.backward(this.forward);
    this.zeros = data.queries.map(() => element("span", {}, "Σ = 0"));
    this.balance = new Balance(this.captions);
    this.rows = data.queries.map((token, i) => button({ onclick: () => {
      this.row = i;
      this.draw();
    } }, element("bdi", {}, token)));
    this.check = element("div", { className: "sa-check", ariaLive: "polite" });
    this.slider = element("input", {
      type: "range",
      min: "0",
      max: String(LATEST),
      step: "0.01",
      ariaLabel: this.captions.scale,
      oninput: () => {
        const value = Number(this.slider.value);
        this.model.scale = Math.abs(value - data.scale) < 0.05 ? data.scale : value;
        this.draw();
      },
    });
    this.scaleText = element("output");
    this.tour = data.stops.length
      ? new Tour({
          stops: data.stops,
          texts: this.captions,
          show: (stop, open) => this.stop(/** @type {(Stop & { stage: number }) | null} */ (stop), open),
        })
      : null;
    const strip = this.strip();
    root.replaceChildren(
      topOf(root, this.captions, element("p", {}, ...phrase(this.captions.look)), "", () => this.draw()),
      ...(this.tour ? [this.tour.node] : []),
      strip,
      element(
        "div",
        { className: "sa-low" },
        element(
          "figure",
          { className: "sa-balance-figure" },
          element(
            "div",
            { className: "sa-top" },
            this.balance.heading,
            element("span", { className: "sa-tabs", role: "group", ariaLabel: this.captions.row }, ...this.rows),
          ),
          this.balance.art,
          this.balance.caption,
        ),
        element(
          "div",
          {},
          this.check,
          element(
            "div",
            { className: "sa-bar" },
            element("label", {}, element("strong", {}, this.captions.scale), " ", this.slider, " ", this.scaleText),
            button({ onclick: () => this.reset() }, this.captions.reset),
          ),
          element("p", { className: "sa-soft" }, this.captions.try),
        ),
      ),
    );
    this.draw();
    new ResizeObserver(() => this.drawBalance()).observe(root);
  }

  reset() {
    this.model = new WayBackModel(this.data);
    this.row = this.data.row;
    this.draw();
  }

  /** @type {(stage: Stage) => string[]} */
  rowLabels(stage) {
    return stage === "K" || stage === "V" ? this.data.keys : this.data.queries;
  }

  /** @type {(stage: Stage) => string[]} */
  columnLabels(stage) {
    return stage === "S" || stage === "P" ? this.data.keys : range(this.forward[stage].columns).map(String);
  }

  strip() {
    const { captions, model } = this, { stages } = model;
    const rows = this.data.queries.length === this.data.keys.length;
    const arrow = (/** @type {Stage} */ stage, /** @type {string} */ sign) =>
      GROUPS.includes(stage) && stage !== stages[0]
        ? [element("span", { className: "sa-op", ariaHidden: "true" }, sign)]
        : [];
    const heat = (/** @type {Stage} */ stage, /** @type {boolean} */ gradient) => {
      const { rows: count, columns } = this.forward[stage],
        name = captions[`${gradient ? "gradient" : "name"}.${stage}`];
      const first = stage === stages[0] || !rows && (stage === "K" || stage === "S");
      const given = gradient ? stage === "O" : stage in model.inputs;
      return new Heat({ name, rows: count, columns, kind: stage === "P" && !gradient ? "share" : "signed",
        ...(first ? { rowLabels: this.rowLabels(stage) } : {}), columnLabels: this.columnLabels(stage),
        point: (place) => {
          if (place) this.look(stage, place.i, place.j);
        },
        ...(given
          ? {
              edit: (/** @type {number} */ i, /** @type {number} */ j, /** @type {number} */ value) =>
                this.edit(gradient, stage, i, j, value),
            }
          : {}),
      });
    };
    /** @type {(lead: HTMLElement, sign: string, make: (stage: Stage) => HTMLElement) => HTMLElement[]} */
    const row = (lead, sign, make) => [lead, ...stages.flatMap((stage) => [...arrow(stage, sign), make(stage)])];
    const arrows = stages.filter((stage) => GROUPS.includes(stage) && stage !== stages[0]).length;
    const strip = element(
      "div",
      { className: "sa-strip", role: "group", ariaLabel: captions.strip },
      ...row(element("span"), "", (stage) => element("div", { className: "sa-stage-name" }, captions[`name.${stage}`])),
      ...row(
        element("span", { className: "sa-side" }, captions.in),
        "→",
        (stage) => (this.above[stage] = heat(stage, false)).node,
      ),
      ...row(
        element("span"),
        "",
        (stage) =>
          (this.heads[stage] = element(
            "div",
            { className: "sa-stage-name" },
            captions[`gradient.${stage}`],
            element("small", {}, captions[`formula.${stage}`]),
          )),
      ),
      ...row(element("span", { className: "sa-side" }, captions.back), "←", (stage) => {
        const { node } = (this.below[stage] = heat(stage, true));
        const zeros = () =>
          element(
            "div",
            { className: "sa-with-zeros" },
            node,
            element("div", { className: "sa-zeros" }, ...this.zeros),
          );
        return element("div", { className: "sa-gradient", data: { stage } }, stage === "S" ? zeros() : node);
      }));
    strip.style.setProperty("--columns", String(1 + stages.length + arrows));
    return strip;
  }

  /** @type {(gradient: boolean, stage: Stage, i: number, j: number, value: number) => void} */
  edit(gradient, stage, i, j, value) {
    const target = gradient ? this.model.wish : this.model.inputs[stage];
    if (Number.isFinite(value)) target.data[i * target.columns + j] = value;
    if (gradient && value !== 0) this.row = i;
    this.draw();
  }

  /** @type {(stage: Stage, i: number, j: number) => void} */
  look(stage, i, j) {
    this.cell = { stage, i, j };
    this.drawCheck();
    announce(this.root, { stage, row: i, column: j });
  }

  /** @type {(stop: (Stop & { stage: number }) | null, open: boolean) => void} */
  stop(stop, open) {
    this.now = stop ? stop.stage : -1;
    this.shown = stop ? stop.stage + (open ? 1 : 0) : WAY.length;
    this.draw();
  }

  draw() {
    this.forward = this.model.forward();
    this.back = this.model.backward(this.forward);
    const { forward, back, model } = this;
    const size = Math.max(
      0,
      ...model.stages.filter((stage) => !"SP".includes(stage)).map((stage) => largest(forward[stage].data)),
    );
    for (const stage of model.stages) {
      const row = stage === "K" || stage === "V" ? -1 : this.row;
      this.above[stage].update({
        matrix: forward[stage],
        size: stage === "P" ? 1 : stage === "S" ? largest(forward.S.data) : size,
        row,
        write: (x) => (Number.isFinite(x) ? figure(x, 2) : this.captions.closed),
      });
      const gradient = back.gradients[stage];
      this.below[stage].update({
        matrix: gradient,
        size: largest(gradient.data),
        row,
        write: (x) => (x === 0 ? "0" : stage === "O" ? figure(x, 1) : signedFigure(x, 3)),
      });
      const at = WAY.findIndex((some) => some.includes(stage));
      this.below[stage].node.closest(".sa-gradient")?.toggleAttribute("data-later", at >= this.shown);
      this.heads[stage].classList.toggle("sa-now", at === this.now);
    }
    this.root.toggleAttribute("data-waits", this.shown < 4);
    this.zeros.forEach((zero, i) => zero.classList.toggle("sa-on", i === this.row));
    this.rows.forEach((button, i) => (button.ariaPressed = String(i === this.row)));
    this.slider.value = String(model.scale);
    const most = Math.max(...forward.P.row(this.row));
    this.scaleText.textContent = `× ${figure(model.scale, 2)}${most > SATURATED ? `: ${this.captions.saturated}` : ""}`;
    this.drawBalance();
    this.drawCheck();
  }

  drawBalance() {
    const { forward, back, row, data } = this, of = (/** @type {Matrix} */ m) => [...m.row(row)];
    this.balance.update({
      word: data.queries[row],
      keys: data.keys,
      shares: of(forward.P),
      said: of(back.gradients.P),
      gradients: of(back.gradients.S),
      mean: back.means[row],
    });
  }

  drawCheck() {
    const { captions, forward, back, model } = this, { stage, i, j } = this.cell;
    for (const each of model.stages) {
      const place = each === stage ? { i, j } : null;
      this.above[each].mark(place);
      this.below[each].mark(place);
    }
    const value = forward[stage].at(i, j), gradient = back.gradients[stage].at(i, j);
    const place = [
      captions[`name.${stage}`],
      "[",
      wordOf(this.rowLabels(stage)[i]),
      ", ",
      wordOf(this.columnLabels(stage)[j]),
      "]",
    ];
    const closed = !Number.isFinite(value);
    const slope = closed ? 0 : model.slope(forward, stage, i, j, STEP);
    const agrees = Math.abs(slope - gradient) < 1e-5 * Math.max(1, Math.abs(gradient));
    const says = closed
      ? captions["closed means"]
      : Math.abs(gradient) < 5e-5
        ? captions["no help"]
        : filled(captions[gradient > 0 ? "gains" : "loses"], { gain: figure(Math.abs(gradient) / 10, 3) });
    const line = (/** @type {string} */ name, /** @type {Child[]} */ ...parts) => [
      element("dt", {}, captions[name]),
      element("dd", {}, ...parts),
    ];
    this.check.replaceChildren(
      element("h2", {}, ...phrase(captions.now, { place, value: closed ? captions.closed : figure(value, 3) })),
      element(
        "dl",
        {},
        ...line("gradient", element("strong", {}, signedFigure(gradient, 4)), ` = ${this.sum(stage, i, j)}`),
        ...line("means", says),
        ...(closed
          ? []
          : line(
              "nudged",
              filled(captions.measured, { step: STEP, slope: signedFigure(slope, 4) }),
              agrees ? ` ${captions.same}` : "",
            )),
      ),
    );
  }

  /** @type {(stage: Stage, i: number, j: number) => string} how a gradient is computed, in figures */
  sum(stage, i, j) {
    const { forward: { Q, K, V, P }, back: { gradients: g, means }, model } = this;
    const terms = (/** @type {number} */ n, /** @type {(k: number) => [number, number]} */ term) =>
      range(n).map((k) => term(k).map((x) => (x < 0 ? `(${figure(x, 3)})` : figure(x, 3))).join("·")).join(" + ");
    const scaled = (/** @type {string} */ sum) => `(${sum}) × ${figure(model.scale, 2)}`;
    switch (stage) {
      case "O": return this.captions.chosen;
      case "V": return terms(P.rows, (k) => [P.at(k, i), g.O.at(k, j)]);
      case "P": return terms(V.columns, (k) => [g.O.at(i, k), V.at(j, k)]);
      case "S":
        return (
          `${figure(P.at(i, j), 3)} · (${figure(g.P.at(i, j), 3)} − ` +
          `${means[i] < 0 ? `(${figure(means[i], 3)})` : figure(means[i], 3)})`
        );
      case "Q": return scaled(terms(K.rows, (k) => [g.S.at(i, k), K.at(k, j)]));
      case "K": return scaled(terms(Q.rows, (k) => [g.S.at(k, i), Q.at(k, j)]));
      default:
        return (
          ["Q", "K", "V"].map((name) => figure(model.way(g, name).at(i, j), 3)).join(" + ") + ` (${this.captions.ways})`
        );
    }
  }
}

/** @type {(x: number, decimals: number) => string} */
function figure(x, decimals) {
  const plain = fixed(x, decimals);
  return (Number(plain) === 0 ? plain.replace("-", "") : plain).replace("-", "−");
}

/** @type {(x: number, decimals: number) => string} */
function signedFigure(x, decimals) {
  const plain = figure(x, decimals);
  return plain.startsWith("−") ? plain : `+${plain}`;
}

/**
 * A row of dS as areas: the width is the weight, the height is dP minus the mean. The areas above the line add up to
 * those below.
 */
class Balance {
  /** @param {Record<string, string>} captions */
  constructor(captions) {
    this.captions = captions;
    this.heading = element("h2");
    this.art = shape("svg", { role: "img", class: "sa-balance" });
    this.caption = element("figcaption");
  }

  /**
   * @type {(row: { word: string, keys: string[], shares: number[], said: number[], gradients: number[],
   *   mean: number }) => void}
   */
  update({ word, keys, shares, said, gradients, mean }) {
    const { captions } = this, empty = said.every((x) => x === 0);
    const wide = Math.max(BALANCE.least, Math.min(BALANCE.most, this.art.parentElement?.clientWidth || 660));
    this.art.setAttribute("viewBox", `0 0 ${wide} ${BALANCE.high}`);
    const top = Math.max(0.01, ...said), low = Math.min(0, ...said);
    const across = (/** @type {number} */ x) => BALANCE.left + x * (wide - BALANCE.left - BALANCE.right);
    const up = (/** @type {number} */ y) => BALANCE.bottom - ((y - low) / (top - low)) * (BALANCE.bottom - BALANCE.top);
    /** @type {SVGElement[]} */
    const drawn = [];
    const write = (
      /** @type {number} */ x,
      /** @type {number} */ y,
      /** @type {string} */ text,
      /** @type {string} */ look,
      anchor = "middle",
    ) => drawn.push(shape("text", { x: x.toFixed(1), y: y.toFixed(1), class: look, "text-anchor": anchor }, text));
    const box = (
      /** @type {number} */ from,
      /** @type {number} */ to,
      /** @type {number} */ a,
      /** @type {number} */ b,
      /** @type {string} */ look,
    ) =>
      drawn.push(
        shape("rect", {
          x: (from + 1).toFixed(1),
          width: Math.max(0, to - from - 2).toFixed(1),
          y: Math.min(a, b).toFixed(1),
          height: Math.abs(a - b).toFixed(1),
          class: look,
        }),
      );
    let at = 0;
    shares.forEach((share, j) => {
      const from = across(at), to = across((at += share)), above = said[j] > mean, middle = (from + to) / 2;
      box(from, to, up(0), up(above ? mean : said[j]), "sa-plain");
      box(from, to, up(said[j]), up(mean), above ? "sa-gain" : "sa-loss");
      if (share <= 0.07) return;
      const y = Math.min(up(said[j]), up(mean)), high = Math.abs(up(said[j]) - up(mean));
      write(middle, 214, keys[j], "sa-strong-text");
      write(middle, 231, filled(captions.share, { share: figure(share, 2) }), "sa-note");
      write(
        middle,
        above ? y - 6 : Math.min(y + high + 17, BALANCE.bottom - 4),
        filled(captions.says, { value: figure(said[j], 2) }),
        "sa-note",
      );
      write(
        middle,
        high > 24 ? y + high / 2 + 5 : above ? y + high + 18 : y - 8,
        signedFigure(gradients[j], 3),
        "sa-strong-text",
      );
    });
    drawn.push(
      shape("line", {
        x1: BALANCE.left,
        x2: wide - BALANCE.right + 4,
        y1: up(mean).toFixed(1),
        y2: up(mean).toFixed(1),
        class: "sa-mean",
      }),
    );
    write(BALANCE.left - 4, up(mean) + 5, figure(mean, 3), "sa-note", "end");
    write(wide - BALANCE.right + 7, up(mean) + 5, captions.mean, "sa-note", "start");
    this.art.replaceChildren(...drawn);
    this.heading.replaceChildren(...phrase(captions[empty ? "empty" : "balance"], { word: wordOf(word) }));
    const sum = gradients.map((x) => signedFigure(x, 4)).join(" ");
    this.caption.replaceChildren(...phrase(captions[empty ? "choose another" : "balance sum"], { sum }));
    const parts = keys.map((key, j) =>
      filled(captions["picture part"], {
        word: key,
        share: figure(shares[j], 2),
        says: figure(said[j], 2),
        gradient: signedFigure(gradients[j], 3),
      }),
    );
    this.art.setAttribute(
      "aria-label",
      filled(captions.picture, { word, list: parts.join("; "), mean: figure(mean, 3) }),
    );
  }
}

start("sa-way-back", WayBackPage);
