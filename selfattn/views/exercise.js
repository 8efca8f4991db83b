/*
 * An exercise: blanks to fill in, in the strip of the first screen or in the stages, checked against the answers; how
 * many are left; buttons that reveal them; and for paper a list of those that it shows, and of their answers.
 */

import { read, same } from "./compute.js";
import { brief, ROLES, SHORT } from "./first_screen.js";
import { Heat } from "./kit/heat.js";
import { button, element } from "./kit/page.js";

/** @typedef {import("./kit/page.js").Child} Child */
/** @typedef {import("./numbers.js").Cell} Cell */
/** @typedef {import("./numbers.js").NodeOfPage} NodeOfPage */
/** @typedef {import("./steps.js").View} View */

/** @typedef {{ node: NodeOfPage, i: number, j: number }} Blank */
/** @typedef {Blank & { name: () => Child[], answer: string }} Line a blank in words, and what is to be filled in */

export class Exercise {
  /** @type {Blank[]} */ blanks = [];

  /** @param {View} view */
  constructor(view) {
    this.view = view;
    this.left = element("p.sa-left", { role: "status" });
    this.sheet = element("div.sa-sheet");
    this.answers = element("div");
  }

  /** @param {HTMLElement} bar */
  build(bar) {
    const { texts, numbers, screen, details, stages } = this.view;
    this.blanks = numbers.nodes
      .flatMap((node) => (node.blanks ?? []).map((j, i) => ({ node, i, j })))
      .filter(({ node, i, j }) => this.view.gridsOf(node).some((grid) => grid.find(i, j)));
    if (!this.blanks.length) return;
    bar.append(button({ data: { do: "reveal all" }, onclick: () => this.reveal(numbers.nodes) }, texts["reveal all"]));
    stages[0].node.before(element("p.sa-hint", texts.exercise));
    const summary = element("summary", texts.answers);
    details.append(element("details.sa-answers", summary, this.answers));
    screen?.strip.before(this.left);
    screen?.sum.after(this.sheet);
  }

  /** @param {string} [said] about a guess. Say this and how many blanks are left; list them and all answers. */
  count(said = "") {
    if (!this.blanks.length) return;
    const parts = this.parts(), asked = parts.flatMap(({ lines }) => lines);
    const isLeft = (/** @type {Blank} */ { node, i }) => !node.revealed.has(i);
    const n = asked.filter(isLeft).length;
    this.left.textContent = `${said} ` + this.view.words.fill(n ? "left" : "none left", { n, all: asked.length });
    const list = (/** @type {(line: Line) => Child[]} */ written) =>
      parts.flatMap(({ title, lines }) => {
        const items = lines.map((line) => written(line)).filter(({ length }) => length);
        return items.length
          ? [element("h4", title), element("ul", ...items.map((item) => element("li", ...item)))]
          : [];
      });
    this.sheet.replaceChildren(...list((line) => (isLeft(line) ? [...line.name(), " = "] : [])));
    this.answers.replaceChildren(...list(({ name, answer }) => [...name(), " = ", answer]));
  }

  /** What has blanks that the reader sees: the strip, with its names and decimals, and open stages. */
  parts() {
    const { words, screen, stages } = this.view, sides = screen?.sides ?? [];
    const parts = sides.map((side) => ({
      title: this.view.sideName(side),
      lines: ROLES.flatMap((role) =>
        this.blanks
          .filter(({ node }) => screen?.nodeOf(side, role) === node && screen.heatOf(side, role) instanceof Heat)
          .map((blank) => ({
            ...blank,
            name: () => words.name(blank, true, screen?.nameOf(role)),
            answer: brief(blank.node.now.at(blank.i, blank.j), Math.min(SHORT, blank.node.digits)),
          })),
      ),
    }));
    const listed = new Set(parts.flatMap(({ lines }) => lines.map(({ node }) => node)));
    for (const stage of stages.filter(({ isOpen }) => isOpen)) {
      const own = this.blanks.filter(
        ({ node, i, j }) =>
          !listed.has(node) && this.view.gridsOf(node).some((grid) => grid.stage === stage && grid.find(i, j)),
      );
      for (const { node } of own) listed.add(node);
      const lines = own.map((blank) => {
        const { node, i, j } = blank;
        const of = sides.length > 1 ? ` (${this.view.sideName(Number(node.id.endsWith("~1")))})` : "";
        const answer = words.write(node.now.at(i, j), node.digits);
        return { ...blank, name: () => [...words.name(blank, true, node.name), of], answer };
      });
      parts.push({ title: stage.heading, lines });
    }
    return parts;
  }

  /**
   * What to say about a guess, which is right if the answer rounds to it: to its own decimals, but at least to two or
   * to all that the answer shows. A right one is uncovered.
   * @type {(cell: Cell, text: string) => string}
   */
  judge({ node, i, j }, text) {
    const { words, numbers } = this.view, guess = read(text), answer = node.now.at(i, j);
    if (guess === null) return words.fill("not a number", { text: JSON.stringify(text) });
    const typed = (text.split(/[.,]/)[1] ?? "").length;
    const decimals = Math.min(node.digits, Math.max(typed, Math.min(2, node.digits)));
    const right = same(guess, answer, 0) || Math.abs(guess - answer) <= 0.5000001 * 10 ** -decimals;
    if (!right) return words.fill("wrong", { guess: text });
    node.revealed.add(i);
    this.view.draw();
    return words.fill("right", { answer: words.spell({ node, i, j }) ?? numbers.text(node, i, j) });
  }

  /** @param {NodeOfPage[]} nodes */
  reveal(nodes) {
    for (const node of nodes) for (const i of (node.blanks ?? []).keys()) node.revealed.add(i);
    this.view.draw();
  }
}
