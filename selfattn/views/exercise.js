/*
 * An exercise: blanks to fill in, checked against the answers, and buttons that reveal them.
 */

class Exercise {
  /** @param {View} view */
  constructor(view) {
    this.view = view;
    for (const node of view.numbers.nodes) if (node.blanks !== null) this.addFields(node);
    if (view.root.querySelector(".sa-answers")) this.addButtons();
  }

  /** @param {NodeOfPage} node */
  addFields(node) {
    node.blanks?.forEach((j, i) => {
      const td = this.view.shownAs(node, i, j).find((cell) => cell.closest("table.sa-result"));
      if (!td) return;
      const name = this.view.words.plainName({ node, i, j });
      const field = element("input", { ariaLabel: this.view.words.fill("predict", { name }), autocomplete: "off" });
      field.onkeydown = (event) => {
        if (event.key === "Enter") this.check(node, i, j, field, td);
      };
      td.replaceChildren(field);
    });
  }

  addButtons() {
    const { texts, stages, bar, numbers } = this.view;
    const named = (/** @type {string} */ name, /** @type {NodeOfPage[]} */ nodes) => button({ data: { do: name }, onclick: () => this.reveal(nodes) }, texts[name]);
    bar?.append(named("reveal all", numbers.nodes));
    stages[0]?.before(element("p", { className: "sa-hint" }, texts.exercise));
    for (const stage of stages) {
      const tables = /** @type {NodeListOf<HTMLTableElement>} */ (stage.querySelectorAll("table.sa-result"));
      const nodes = [...tables].flatMap((table) => numbers.byId.get(table.dataset.node ?? "") ?? []).filter(({ blanks }) => blanks);
      if (nodes.length) this.view.lineOf(stage).before(named("reveal", nodes));
    }
  }

  /**
   * A guess is right if the answer rounds to it: to its own decimals, but at least to two or to all that the answer shows.
   * @type {(node: NodeOfPage, i: number, j: number, field: HTMLInputElement, td: HTMLTableCellElement) => void}
   */
  check(node, i, j, field, td) {
    const { view } = this;
    const { words } = view;
    const guess = read(field.value);
    const stage = stageOf(td);
    const answer = node.now.at(i, j);
    if (guess === null) return view.tell(stage, words.fill("not a number", { text: JSON.stringify(field.value) }));
    const typed = (field.value.split(/[.,]/)[1] ?? "").length;
    const decimals = Math.min(node.digits, Math.max(typed, Math.min(2, node.digits)));
    const right = same(guess, answer, 0) || Math.abs(guess - answer) <= 0.5000001 * 10 ** -decimals;
    if (!right) return view.tell(stage, words.fill("wrong", { guess: field.value }));
    this.uncover(node, i, "sa-right");
    view.focus(td);
    return view.tell(stage, words.fill("right", { answer: words.spell({ node, i, j }) ?? view.numbers.text(node, i, j) }));
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
  }
}
