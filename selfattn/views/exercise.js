/*
 * An exercise: blanks to fill in, in the strip of the first screen or in the stages, checked against the answers; how
 * many are left; buttons that reveal them; and for paper a list of those that it shows, and of their answers.
 */

import { read, same } from "./compute.js";
import { brief, ROLES, SHORT } from "./first_screen.js";
import { Heat } from "./kit/heat.js";
import { button, element } from "./kit/page.js";
import { stageOf } from "./walk.js";

/** @typedef {import("./kit/page.js").Child} Child */
/** @typedef {import("./numbers.js").NodeOfPage} NodeOfPage */
/** @typedef {import("./steps.js").View} View */

/** @typedef {{ node: NodeOfPage, i: number, j: number }} Blank */
/** @typedef {Blank & { name: () => Child[], answer: string }} Line a blank in words, and what is to be filled in */

export class Exercise {
  /** @param {View} view */
  constructor(view) {
    this.view = view;
    /** @type {Blank[]} */
    this.blanks = view.numbers.nodes
      .flatMap((node) => (node.blanks ?? []).map((j, i) => ({ node, i, j })))
      .filter(({ node, i, j }) => view.shownAs(node, i, j).length);
    for (const { node, i, j } of this.blanks) this.addField(node, i, j);
    this.left = element("p", { className: "sa-left", role: "status" });
    this.sheet = element("div", { className: "sa-sheet" });
    this.answers = view.root.querySelector(".sa-answers");
    if (this.answers) this.addButtons();
  }

  /** @type {(node: NodeOfPage, i: number, j: number) => void} */
  addField(node, i, j) {
    const td = this.view.shownAs(node, i, j).find((cell) => cell.closest("table.sa-result"));
    if (!td) return;
    const name = this.view.words.plainName({ node, i, j });
    const field = element("input", { ariaLabel: this.view.words.fill("predict", { name }), autocomplete: "off" });
    field.onkeydown = (event) => {
      if (event.key !== "Enter") return;
      const said = this.judge(node, i, j, field.value);
      if (node.revealed.has(i)) this.view.focus(td);
      this.view.tell(stageOf(td), said);
    };
    td.replaceChildren(field);
  }

  addButtons() {
    const { texts, stages, bar, numbers, screen } = this.view;
    const named = (/** @type {string} */ name, /** @type {NodeOfPage[]} */ nodes) =>
      button({ data: { do: name }, onclick: () => this.reveal(nodes) }, texts[name]);
    bar?.append(named("reveal all", numbers.nodes));
    screen?.strip.before(this.left);
    screen?.sum.after(this.sheet);
    this.count();
    stages[0]?.before(element("p", { className: "sa-hint" }, texts.exercise));
    for (const stage of stages) {
      const tables = /** @type {NodeListOf<HTMLTableElement>} */ (stage.querySelectorAll("table.sa-result"));
      const nodes = [...tables]
        .flatMap((table) => numbers.byId.get(table.dataset.node ?? "") ?? [])
        .filter(({ blanks }) => blanks);
      if (nodes.length) this.view.lineOf(stage).before(named("reveal", nodes));
    }
  }

  /** @param {string} [said] about a guess. Say this and how many blanks are left; list them and all answers. */
  count(said = "") {
    const summary = this.answers?.querySelector("summary");
    if (!summary) return;
    const parts = this.parts(), asked = parts.flatMap(({ lines }) => lines);
    const isLeft = (/** @type {Blank} */ { node, i }) => !node.revealed.has(i);
    const n = asked.filter(isLeft).length;
    this.left.textContent = `${said} ` + this.view.words.fill(n ? "left" : "none left", { n, all: asked.length });
    const list = (/** @type {(line: Line) => Child[]} */ written) =>
      parts.flatMap(({ title, lines }) => {
        const items = lines.map((line) => written(line)).filter(({ length }) => length);
        return items.length
          ? [element("h4", {}, title), element("ul", {}, ...items.map((item) => element("li", {}, ...item)))]
          : [];
      });
    this.sheet.replaceChildren(...list((line) => (isLeft(line) ? [...line.name(), " = "] : [])));
    this.answers?.replaceChildren(summary, ...list(({ name, answer }) => [...name(), " = ", answer]));
  }

  /** What has blanks that the reader sees: the strip, with its names and decimals, and open stages. */
  parts() {
    const { words, screen, stages } = this.view, sides = screen?.sides ?? [];
    const parts = sides.map((side) => ({
      title: screen?.sideName(side) ?? "",
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
    for (const stage of stages) {
      if ("closed" in stage.dataset) continue;
      const own = this.blanks.filter(
        ({ node, i, j }) => !listed.has(node) && this.view.shownAs(node, i, j).some((td) => stageOf(td) === stage),
      );
      for (const { node } of own) listed.add(node);
      const lines = own.map((blank) => {
        const { node, i, j } = blank, side = Number(node.id.endsWith("~1"));
        const of = sides.length > 1 ? ` (${screen?.sideName(side)})` : "";
        const answer = words.write(node.now.at(i, j), node.digits);
        return { ...blank, name: () => [...words.name(blank, true, node.name), of], answer };
      });
      parts.push({ title: stage.querySelector(".sa-fold")?.textContent ?? "", lines });
    }
    return parts;
  }

  /**
   * What to say about a guess, which is right if the answer rounds to it: to its own decimals, but at least to two or
   * to all that the answer shows. A right one is uncovered.
   * @type {(node: NodeOfPage, i: number, j: number, text: string) => string}
   */
  judge(node, i, j, text) {
    const { words, numbers } = this.view, guess = read(text), answer = node.now.at(i, j);
    if (guess === null) return words.fill("not a number", { text: JSON.stringify(text) });
    const typed = (text.split(/[.,]/)[1] ?? "").length;
    const decimals = Math.min(node.digits, Math.max(typed, Math.min(2, node.digits)));
    const right = same(guess, answer, 0) || Math.abs(guess - answer) <= 0.5000001 * 10 ** -decimals;
    if (!right) return words.fill("wrong", { guess: text });
    this.uncover(node, i, "sa-right");
    return words.fill("right", { answer: words.spell({ node, i, j }) ?? numbers.text(node, i, j) });
  }

  /** @param {NodeOfPage[]} nodes */
  reveal(nodes) {
    for (const node of nodes) if (node.blanks) for (const i of node.blanks.keys()) this.uncover(node, i, "sa-revealed");
  }

  /** @type {(node: NodeOfPage, i: number, mark: string) => void} */
  uncover(node, i, mark) {
    if (node.revealed.has(i) || !node.blanks) return;
    node.revealed.add(i);
    for (const td of this.view.shownAs(node, i, node.blanks[i])) {
      td.classList.remove("sa-blank");
      td.classList.add(mark);
      td.replaceChildren();
    }
    this.view.draw(node);
    this.view.drawDifferences();
    this.view.screen?.draw();
    this.count();
  }
}
