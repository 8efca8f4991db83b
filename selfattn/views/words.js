/*
 * Numbers in words: the name of a number, its sum, and the sentences of the page with values filled in. Makes elements,
 * so that tokens stay text with their own direction of writing, but changes nothing in the page.
 */

import { filled, range, write } from "./compute.js";
import { element, phrase, placeOf } from "./kit/page.js";
import { OPS, paren } from "./operations.js";

/** @typedef {import("./kit/page.js").Child} Child */
/** @typedef {import("./numbers.js").Cell} Cell */
/** @typedef {import("./numbers.js").NodeOfPage} NodeOfPage */
/** @typedef {import("./numbers.js").Numbers} Numbers */
/** @typedef {import("./numbers.js").PageData} PageData */
/** @typedef {import("./operations.js").Figure} Figure */

const MAX_TERMS = 12; // a longer sum shows its first and last terms

export class Words {
  /** @param {PageData} data @param {Numbers} numbers */
  constructor({ texts, labels }, numbers) {
    this.texts = texts;
    this.labels = labels;
    this.numbers = numbers;
  }

  /** @type {(key: string, values: Record<string, string | number>) => string} */
  fill(key, values) {
    return filled(this.texts[key], values);
  }

  /** @type {(node: NodeOfPage, second: NodeOfPage, axis: "rows" | "columns", index: number) => string} of two texts */
  labelOf(node, second, axis, index) {
    const [x, y] = [node, second].map((each) => this.labels[each[axis]]?.[index] ?? String(index));
    return x === y ? x : `${x} → ${y}`;
  }

  /**
   * The name of a number, such as head 0: scores[bank, river], as elements; `head` false leaves the head out. On
   * a sheet its matrix is `called` so, and words that are there twice have their places.
   * @type {(cell: Cell, head?: boolean, called?: string) => Child[]}
   */
  name({ node, second, i, j }, head = true, called = "") {
    /** @type {Child[]} */
    const inside = [];
    for (const [axis, index] of /** @type {const} */ ([["rows", i], ["columns", j]])) {
      if (node[axis] === "one") continue;
      const label = this.labelOf(node, second ?? node, axis, index), all = called && this.labels[node[axis]];
      inside.push(inside.length ? ", " : "", element("bdi", label), all ? placeOf(all, index) : "");
    }
    const name = (second ? `${this.texts.difference}: ` : "") + (head ? node.where : "") + (called || node.name);
    return inside.length ? [name, "[", ...inside, "]"] : [name];
  }

  /** @param {number} value */
  write(value, digits = this.numbers.precision) {
    return write(value, digits, this.numbers.precision);
  }

  /** @type {(n: number, term: (k: number) => string) => string} */
  sum(n, term) {
    if (n === 0) return "0";
    if (n <= MAX_TERMS) return range(n).map(term).join(" + ");
    const ends = [...range(MAX_TERMS - 4).map(term), "…", term(n - 2), term(n - 1)];
    return `${ends.join(" + ")} [${this.fill("terms", { n })}]`;
  }

  /**
   * How a number is computed, in figures, with ≈ where a figure is rounded; null for a given number.
   * @param {Cell} cell @param {boolean} [guessed] the reader is to find the result
   */
  spell(cell, guessed = false) {
    const { numbers } = this, { node, second, i, j } = cell;
    let rounded = false;
    const figure = (/** @type {NodeOfPage} */ n, /** @type {number} */ row, /** @type {number} */ column) => {
      const text = numbers.text(n, row, column);
      const value = n.now.at(row, column);
      rounded ||= text !== "?" && Number.isFinite(value) && Number(text) !== value;
      return text;
    };
    let formula, result;
    if (second) {
      formula = `${figure(second, i, j)} - ${paren(figure(node, i, j), true)}`;
      result = numbers.hidden(cell) ? "?" : this.write(numbers.valueOf(cell), Math.max(node.digits, second.digits));
    } else {
      const op = OPS[node.op];
      if (!op) return null;
      const args = numbers.args(node);
      /** @type {Figure} */
      const t = (which, row, column) => paren(figure(args[which], row, column), true);
      /** @type {Figure} */
      const nameOf = (which, row, column) =>
        element(
          "span",
          ...this.name({ node: args[which], i: row, j: column }, args[which].where !== node.where),
        ).textContent ?? "";
      formula = op.spell(t, args.map((arg) => arg.now), i, j, node.options, this, nameOf);
      result = guessed ? "?" : figure(node, i, j);
    }
    return `${formula} ${rounded ? "≈" : "="} ${result}`;
  }

  /** @type {(cell: Cell, guessed?: boolean) => Child[]} its name, and how it is computed, for the line below a stage */
  sentence(cell, guessed = false) {
    const { node, second, i, j } = cell;
    const spelled = this.spell(cell, guessed);
    /** @type {Child[]} */
    const line = [element("b", ...this.name(cell)), " = "];
    if (spelled !== null) line.push(element("span.sa-sum", spelled));
    else {
      line.push(
        `${this.numbers.text(node, i, j)}, `,
        this.texts[node.name === "mask" ? "can be closed" : node.editable ? "can be changed" : "is given"],
      );
    }
    if (!second && this.numbers.moved({ node, i, j })) {
      const before = this.write(node.kernel.at(i, j), node.decimals);
      line.push(" ", element("i", this.fill("was", { before })));
    }
    return line;
  }

  whatMoved() {
    const { n, most } = this.numbers.mostMoved();
    if (!most) return this.texts.unmoved;
    const { node, before, value, i, j } = most;
    if (this.numbers.hidden({ node, i, j })) return this.fill("moved", { n });
    return element("span", ...phrase(this.texts["moved most"], {
      n,
      name: element("b", ...this.name({ node, i, j })),
      before: this.write(before, node.decimals),
      after: this.write(value, node.digits),
    }));
  }
}
