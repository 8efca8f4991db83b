/*
 * An exercise: blanks to fill in, in the strip of the first screen or in the stages, checked against the answers; how
 * many are left; buttons that reveal them; and for paper a list of the strip's blanks.
 */

class Exercise {
  /** @param {View} view */
  constructor(view) {
    this.view = view;
    /** @type {{ node: NodeOfPage, i: number, j: number }[]} */
    this.blanks = view.numbers.nodes
      .flatMap((node) => (node.blanks ?? []).map((j, i) => ({ node, i, j })))
      .filter(({ node, i, j }) => view.shownAs(node, i, j).length);
    for (const { node, i, j } of this.blanks) this.addField(node, i, j);
    this.left = element("p", { className: "sa-left", role: "status" });
    this.sheet = element("div", { className: "sa-sheet" });
    if (view.root.querySelector(".sa-answers")) this.addButtons();
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

  /** @param {string} [said] about a guess. Say this and how many blanks are left, and list the strip's for paper. */
  count(said = "") {
    const { words, screen } = this.view, left = this.blanks.filter(({ node, i }) => !node.revealed.has(i));
    this.left.textContent =
      `${said} ` + words.fill(left.length ? "left" : "none left", { n: left.length, all: this.blanks.length });
    this.sheet.replaceChildren(
      ...(screen?.sides ?? []).flatMap((side) => [
        element("h4", {}, screen?.sideName(side) ?? ""),
        element(
          "ul",
          {},
          ...ROLES.flatMap((role) =>
            left
              .filter(({ node }) => screen?.heads.some((head) => head.side === side && head.nodes[role] === node.id))
              .map(({ node, i, j }) =>
                element(
                  "li",
                  {},
                  node.where,
                  `${NAMES[role]}[`,
                  wordOf(words.label(node.rows, i)),
                  ", ",
                  wordOf(words.label(node.columns, j)),
                  "] = ",
                ),
              ),
          ),
        ),
      ]),
    );
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
