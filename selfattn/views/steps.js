/*
 * Enhances the static tables of a steps page: shows where a number comes from, steps through the page, computes
 * anew in float64 when a number is changed. Everything it needs is in the page: the numbers to the last bit and
 * what they are made of (see graph.py). It touches nothing outside its view, so several can stand in a notebook,
 * and it handles keys only while the focus is inside. assets.py puts the files that it needs before this one, all in one
 * function in strict mode, so that nothing is left behind in the page.
 */

class View {
  constructor(root) {
    this.root = root;
    const data = JSON.parse(root.querySelector("script.sa-data").textContent);
    this.texts = data.texts;
    this.labels = data.labels;
    this.numbers = new Numbers(data);
    this.words = new Words(data, this.numbers);
    this.walk = new Walk(this);
    this.cells = new WeakMap(); // td: {node, i, j} or {difference, i, j}
    this.shown = new Map(this.numbers.nodes.map((node) => [node, new Map()])); // node: index of a number: its cells
    this.tables = new Map(); // node: the first table that shows it
    this.differences = [];
    this.lit = [];
    this.pinned = this.hovered = null;
    for (const table of root.querySelectorAll("table.sa-m")) this.connect(table);
    this.stages = [...root.querySelectorAll(".sa-stage")];
    this.addControls();
    this.addScales();
    this.exercise = new Exercise(this);
    this.listen();
    root.dataset.live = "";
    this.walk.follow("");
    if (this.alone) this.walk.goToHash();
  }

  get alone() {
    return "alone" in this.root.dataset;
  }

  /** The cells that show a number. */
  shownAs(node, i, j) {
    return this.shown.get(node).get(i * node.shape[1] + j) ?? [];
  }

  /** Find out which number each cell of a table shows. */
  connect(table) {
    const { byId } = this.numbers;
    const { node: id, a, b } = table.dataset;
    const node = byId.get(id);
    const difference = a && { a: byId.get(a), b: byId.get(b), cells: [],
      size: Number(table.dataset.size), digits: Number(table.dataset.decimals) };
    if (difference) this.differences.push(difference);
    else if (!this.tables.has(node)) this.tables.set(node, table);
    const indices = (text, n) => (text === undefined ? range(n) : text === "" ? [] : text.split(",").map(Number));
    const lines = linesOf(table);
    const rows = indices(table.dataset.rows, lines.length);
    lines.forEach((line, n) => {
      const tds = [...line.cells].filter((td) => td.tagName === "TD" && !td.classList.contains("sa-gap"));
      const columns = indices(table.dataset.columns, tds.length);
      tds.forEach((td, m) => {
        const [i, j] = "t" in table.dataset ? [columns[m], rows[n]] : [rows[n], columns[m]];
        this.cells.set(td, { node, difference, i, j });
        if (difference) {
          difference.cells.push([td, i, j]);
        } else {
          const cells = this.shown.get(node), index = i * node.shape[1] + j;
          if (!cells.has(index)) cells.set(index, []);
          cells.get(index).push(td);
        }
      });
    });
    table.role = "grid"; // one stop for Tab, arrow keys inside
    table.ariaReadOnly = String(!node?.editable);
    const first = table.querySelector("tbody td:not(.sa-gap)");
    if (first) first.tabIndex = 0;
  }

  /* --------------------------------------------------------------------------------------- lighting up */

  light(td) {
    for (const [cell, name] of this.lit) {
      cell.classList.remove(name);
      delete cell.dataset.lit;
    }
    this.lit = [];
    for (const stage of this.stages) stage.say?.replaceChildren();
    const cell = td && this.cells.get(td);
    if (!cell) return;
    const sources = this.numbers.sources(cell);
    for (const [colour, node, i, j] of sources) {
      for (const other of this.shownAs(node, i, j)) this.add(other, `sa-${colour}`);
    }
    for (const [node, index] of this.numbers.ancestors(sources)) {
      for (const other of this.shown.get(node).get(index) ?? []) if (!other.dataset.lit) this.add(other, "sa-far");
    }
    this.add(td, "sa-here");
    td.closest(".sa-stage").say.replaceChildren(...this.words.sentence(cell));
  }

  add(td, name) {
    if (td.classList.contains(name)) return;
    td.classList.add(name);
    td.dataset.lit = "";
    this.lit.push([td, name]);
  }

  tell(stage, message) {
    this.light(null);
    stage?.say?.replaceChildren(message);
  }

  /* ------------------------------------------------------------------------------------------- controls */

  addControls() {
    const { texts, labels, walk } = this;
    const button = (name, act) => element("button", { type: "button", data: { do: name }, onclick: act }, texts[name]);
    const others = labels.t1 ?? labels.t0;
    const tokens = labels.t0.map((token, i) => (others[i] === token || i >= others.length ? token : `${token} / ${others[i]}`));
    this.chooser = element(
      "select", { onchange: () => walk.follow(this.chooser.value) },
      element("option", { value: "" }, texts.everything),
      ...tokens.map((token, i) => element("option", { value: String(i) }, token)),
    );
    this.places = element(
      "select", { onchange: () => walk.goTo(this.stages[Number(this.places.value)]) },
      ...this.stages.map((stage, n) => element("option", { value: String(n) }, stage.querySelector("h3").textContent)),
    );
    this.counter = element("span", { className: "sa-count" });
    this.playButton = button("play", () => walk.toggle());
    this.resetButton = button("reset", () => this.reset());
    this.resetButton.disabled = true;
    const projector = button("projector", () => {
      projector.ariaPressed = String(this.root.toggleAttribute("data-projector"));
    });
    projector.ariaPressed = "false";
    this.bar = element(
      "div", { className: "sa-bar", role: "group", ariaLabel: texts.title },
      button("previous", () => walk.step(-1)), this.playButton, button("next", () => walk.step(1)), this.counter,
      element("label", {}, texts["go to"], " ", this.places),
      element("label", {}, texts.follow, " ", this.chooser), this.resetButton,
      button("theme", () => this.changeTheme()), projector,
    );
    this.stages[0]?.before(this.bar, element("p", { className: "sa-hint" }, texts.hint));
    for (const stage of this.stages) {
      if (stage.id) {
        const heading = stage.querySelector("h3");
        heading.replaceChildren(element("a", { href: `#${stage.id}` }, ...heading.childNodes));
      }
      stage.say = element("p", { className: "sa-say", ariaLive: "polite" });
      stage.append(stage.say);
    }
  }

  changeTheme() {
    const dark = getComputedStyle(this.root).getPropertyValue("--dark").trim() === "1";
    const views = this.alone ? document.querySelectorAll(".sa-steps") : [this.root];
    for (const root of views) root.dataset.theme = dark ? "light" : "dark";
  }

  /** A slider for every scale, in the stage that uses it. */
  addScales() {
    this.sliders = new Map();
    for (const node of this.numbers.nodes) {
      if (node.name !== "scale") continue;
      const value = node.kernel.at(0, 0);
      const top = Math.max(1, 2 * Math.abs(value));
      const slider = element("input", { type: "range", min: value < 0 ? -top : 0, max: top, step: top / 200 });
      slider.value = value;
      slider.addEventListener("input", () => this.change(node, 0, 0, Number(slider.value)));
      this.sliders.set(node, slider);
      const stage = this.tables.get(node).closest(".sa-stage");
      stage.say.before(element("label", { className: "sa-scale" }, this.texts.scale, " ", slider));
    }
  }

  /* ---------------------------------------------------------------------------------- changing numbers */

  edit(td) {
    const cell = this.cells.get(td);
    if (!cell?.node?.editable || td.querySelector("input")) return;
    this.walk.stop();
    const { node, i, j } = cell;
    if (node.name === "mask") return this.change(node, i, j, node.now.at(i, j) === 0 ? 1 : 0, td);
    const field = element("input", { value: String(node.now.at(i, j)), ariaLabel: this.words.plainName(cell) });
    const close = (keep, back) => {
      if (!field.isConnected) return;
      const value = read(field.value);
      field.onblur = null;
      td.replaceChildren(this.numbers.text(node, i, j));
      if (back) this.focus(td);
      if (keep && value === null) {
        this.tell(td.closest(".sa-stage"), this.words.fill("not a number", { text: JSON.stringify(field.value) }));
      } else if (keep) this.change(node, i, j, value, td);
    };
    field.onblur = () => close(true, false);
    field.onkeydown = (event) => {
      if (event.key === "Enter" || event.key === "Escape") {
        event.preventDefault();
        close(event.key === "Enter", true);
      }
    };
    td.replaceChildren(field);
    field.focus();
    field.select();
  }

  change(node, i, j, value, td = this.tables.get(node)) {
    node.edits.set(i * node.shape[1] + j, value);
    this.compute();
    this.tell(td.closest(".sa-stage"), this.words.whatMoved());
  }

  reset() {
    for (const node of this.numbers.nodes) node.edits.clear();
    this.compute();
    this.tell(this.stages.find((s) => s.classList.contains("sa-now")) ?? this.stages[0], this.texts["is reset"]);
  }

  compute() {
    this.numbers.compute();
    for (const node of this.numbers.nodes) this.draw(node);
    this.drawDifferences();
    for (const [node, slider] of this.sliders) slider.value = node.now.at(0, 0);
    this.resetButton.disabled = !this.numbers.edited;
  }

  draw(node) {
    for (const [index, tds] of this.shown.get(node)) {
      const i = Math.floor(index / node.shape[1]), j = index % node.shape[1];
      const moved = this.numbers.moved(node, i, j);
      for (const td of tds) this.paint(td, node.now.data[index], this.numbers.hidden(node, i, j), node.size, node.digits, moved);
    }
  }

  drawDifferences() {
    const { numbers } = this;
    for (const difference of this.differences) {
      const { a, b, cells, size, digits } = difference;
      for (const [td, i, j] of cells) {
        const moved = numbers.moved(a, i, j) || numbers.moved(b, i, j);
        const hidden = numbers.hidden(a, i, j) || numbers.hidden(b, i, j);
        this.paint(td, numbers.minus(difference, i, j), hidden, size, Math.max(digits, a.digits, b.digits), moved);
      }
    }
  }

  paint(td, value, hidden, size, digits, moved) {
    if (hidden) {
      if (!td.querySelector("input")) td.textContent = "____";
      return;
    }
    const text = this.words.write(value, digits);
    if (td.textContent !== text) td.textContent = text;
    td.classList.toggle("sa-moved", moved);
    const level = shade(value, size);
    if (td.sa !== level) {
      td.classList.remove(...[...td.classList].filter((name) => /^([pn]\d|x)$/.test(name)));
      if (level) td.classList.add(level);
      td.sa = level;
    }
  }

  /* ---------------------------------------------------------------------------------- mouse and keyboard */

  listen() {
    const cellOf = (event) => {
      const td = event.target.closest?.("td");
      return td && this.cells.has(td) ? td : null;
    };
    this.root.addEventListener("pointerover", (event) => {
      const td = cellOf(event);
      const still = event.screenX === this.pointer?.[0] && event.screenY === this.pointer[1];
      this.pointer = [event.screenX, event.screenY];
      if (td === this.hovered || still) return; // the page moved under the pointer: not what was pointed at
      this.hovered = td;
      if (td) this.light(td);
    });
    this.root.addEventListener("pointerleave", () => {
      this.hovered = null;
      if (this.pinned) this.light(this.pinned);
    });
    this.root.addEventListener("focusin", (event) => {
      const td = cellOf(event);
      if (td && event.target === td) this.pin(td);
    });
    this.root.addEventListener("click", (event) => {
      const td = cellOf(event);
      if (!td || event.target !== td) return;
      this.focus(td);
      if (this.cells.get(td).node?.name === "mask") this.edit(td);
    });
    this.root.addEventListener("dblclick", (event) => {
      const td = cellOf(event);
      if (td && this.cells.get(td).node?.name !== "mask") this.edit(td);
    });
    this.root.addEventListener("keydown", (event) => this.key(event));
    if (this.alone) window.addEventListener("hashchange", () => this.walk.goToHash());
  }

  pin(td) {
    this.pinned = td;
    this.walk.arrive(td);
    this.light(td);
  }

  focus(td) {
    const table = td.closest("table");
    for (const other of table.querySelectorAll("td[tabindex='0']")) other.tabIndex = -1;
    td.tabIndex = 0;
    td.focus({ preventScroll: false });
  }

  key(event) {
    const { target, key } = event;
    const combined = event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && key === "Enter");
    if (combined || key === "Tab") return; // saving, running a cell and the like stay with the page around
    event.stopPropagation(); // a plain letter does not: "d" "d" deletes a cell of a notebook
    const typed = target.tagName === "INPUT" || target.tagName === "SELECT";
    if (!typed && this.act(target, key)) event.preventDefault();
  }

  act(target, key) {
    const letters = { n: () => this.walk.step(1), b: () => this.walk.step(-1), p: () => this.walk.toggle() };
    if (letters[key]) {
      letters[key]();
      return true;
    }
    const cell = target.tagName === "TD" && this.cells.get(target);
    if (!cell) return false;
    if ((key === "Enter" || key === " " || key === "F2") && cell.node?.editable) {
      this.edit(target);
      return true;
    }
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -1e9], End: [0, 1e9] };
    if (!moves[key]) return false;
    const lines = linesOf(target.closest("table"));
    const column = (line) => [...line.cells].filter((td) => this.cells.has(td));
    const clamp = (x, n) => Math.min(Math.max(x, 0), n - 1);
    const line = lines[clamp(lines.indexOf(target.parentElement) + moves[key][0], lines.length)];
    const tds = column(line);
    this.focus(tds[clamp(column(target.parentElement).indexOf(target) + moves[key][1], tds.length)]);
    return true;
  }
}

for (const root of document.querySelectorAll(".sa-steps:not([data-live])")) {
  if (root.querySelector("script.sa-data")) new View(root);
}
