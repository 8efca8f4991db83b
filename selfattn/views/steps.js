/*
 * Enhances the static tables of a steps page: shows where a number comes from, steps through the page, computes
 * anew in float64 when a number is changed. Everything it needs is in the page: the numbers to the last bit and
 * what they are made of (see graph.py). It touches nothing outside its view, so several can stand in a notebook,
 * and it handles keys only while the focus is inside. What it computes with is in compute.js.
 */

const MAX_TERMS = 12; // a longer sum is spelled with its first and last terms
const MAX_FAR = 4000; // numbers of a page that still lights up what the sources are made of
const MAX_FEW = 36; // numbers of a matrix that play shows one by one
const STEP_MS = 1600; // between two steps of the play button

function element(tag, options = {}, ...children) {
  const { data = {}, ...properties } = options;
  const made = Object.assign(document.createElement(tag), properties);
  Object.assign(made.dataset, data);
  made.append(...children);
  return made;
}

class View {
  constructor(root) {
    this.root = root;
    const data = JSON.parse(root.querySelector("script.sa-data").textContent);
    Object.assign(this, { texts: data.texts, labels: data.labels, precision: data.precision });
    this.nodes = new Map(data.nodes.map((node) => [node.id, this.prepare(node)]));
    this.numbers = data.nodes.reduce((n, { shape }) => n + shape[0] * shape[1], 0);
    this.cells = new WeakMap(); // td: {node, i, j} or {difference, i, j}
    this.differences = [];
    this.lit = [];
    this.pinned = this.hovered = null;
    for (const table of root.querySelectorAll("table.sa-m")) this.connect(table);
    this.stages = [...root.querySelectorAll(".sa-stage")];
    this.addControls();
    this.addScales();
    this.addBlanks();
    this.listen();
    root.dataset.live = "";
    this.follow("");
    if (this.alone) this.goToHash();
  }

  get alone() {
    return "alone" in this.root.dataset;
  }

  prepare(node) {
    const [rows, columns] = node.shape;
    node.kernel = new Matrix(rows, columns, decode(node.data));
    node.now = node.kernel;
    node.edits = new Map();
    node.tables = [];
    node.shown = new Map(); // index of a number: the cells that show it
    node.digits = node.decimals;
    node.revealed = new Set();
    return node;
  }

  /** Find out which number each cell of a table shows. */
  connect(table) {
    const { node: id, a, b } = table.dataset;
    const difference = a && { a: this.nodes.get(a), b: this.nodes.get(b), table, cells: [],
      size: Number(table.dataset.size), digits: Number(table.dataset.decimals) };
    if (difference) this.differences.push(difference);
    const node = this.nodes.get(id);
    if (node) node.tables.push(table);
    const numbers = (text, n) => (text === undefined ? range(n) : text === "" ? [] : text.split(",").map(Number));
    const lines = linesOf(table);
    const rows = numbers(table.dataset.rows, lines.length);
    lines.forEach((line, n) => {
      const tds = [...line.cells].filter((td) => td.tagName === "TD" && !td.classList.contains("sa-gap"));
      const columns = numbers(table.dataset.columns, tds.length);
      tds.forEach((td, m) => {
        const [i, j] = "t" in table.dataset ? [columns[m], rows[n]] : [rows[n], columns[m]];
        this.cells.set(td, { node, difference, i, j });
        if (difference) {
          difference.cells.push([td, i, j]);
        } else {
          const index = i * node.shape[1] + j;
          if (!node.shown.has(index)) node.shown.set(index, []);
          node.shown.get(index).push(td);
        }
      });
    });
    const first = table.querySelector("tbody td:not(.sa-gap)");
    if (first) first.tabIndex = 0;
  }

  /* -------------------------------------------------------------------------------- numbers and labels */

  hidden(node, i, j) {
    return node.blanks !== null && node.blanks[i] === j && !node.revealed.has(i);
  }

  text(node, i, j) {
    return this.hidden(node, i, j) ? "?" : write(node.now.at(i, j), node.digits, this.precision);
  }

  loose(value) {
    return write(value, this.precision, this.precision);
  }

  label(list, index) {
    return list && this.labels[list] ? this.labels[list][index] : String(index);
  }

  /** The name of a number, such as scores[bank, river], as elements. */
  name({ node, difference, i, j }) {
    const first = node ?? difference.a, second = node ?? difference.b;
    const inside = [];
    for (const [axis, index] of [["rows", i], ["columns", j]]) {
      if (first[axis] === "one") continue;
      const [x, y] = [this.label(first[axis], index), this.label(second[axis], index)];
      inside.push(inside.length ? ", " : "", element("bdi", {}, x === y ? x : `${x} → ${y}`));
    }
    const name = (difference ? `${this.texts.difference}: ` : "") + first.where + first.name;
    return inside.length ? [name, "[", ...inside, "]"] : [name];
  }

  /** Second minus first; what differs by rounding alone is 0, as in draw.py. */
  minus({ a, b }, i, j) {
    const value = b.now.at(i, j) - a.now.at(i, j);
    return Math.abs(value) <= 1e-12 * a.size ? 0 : value;
  }

  sum(n, term) {
    if (n === 0) return "0";
    if (n <= MAX_TERMS) return range(n).map(term).join(" + ");
    const ends = [...range(MAX_TERMS - 4).map(term), "…", term(n - 2), term(n - 1)];
    return `${ends.join(" + ")} [${this.fill("terms", { n })}]`;
  }

  fill(key, values) {
    return filled(this.texts[key], values);
  }

  /** How a number is made, in figures; with ≈ where a figure is rounded. */
  spell({ node, difference, i, j }) {
    let rounded = false;
    const figure = (n, row, column) => {
      const text = this.text(n, row, column);
      const value = n.now.at(row, column);
      rounded ||= text !== "?" && Number.isFinite(value) && Number(text) !== value;
      return text;
    };
    let formula, result;
    if (difference) {
      formula = `${figure(difference.b, i, j)} - ${paren(figure(difference.a, i, j), true)}`;
      result = this.hidden(difference.a, i, j) || this.hidden(difference.b, i, j)
        ? "?" : write(this.minus(difference, i, j), difference.digits, this.precision);
    } else {
      const op = OPS[node.op];
      if (!op) return null;
      const args = node.args.map((id) => this.nodes.get(id));
      const t = (which, row, column) => paren(figure(args[which], row, column), true);
      formula = op.spell(t, args.map((arg) => arg.now), i, j, node.options, this);
      result = figure(node, i, j);
    }
    return `${formula} ${rounded ? "≈" : "="} ${result}`;
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
    const sources = this.sources(cell);
    for (const [colour, node, i, j] of sources) {
      for (const other of node.shown.get(i * node.shape[1] + j) ?? []) this.add(other, `sa-${colour}`);
    }
    for (const [node, index] of this.ancestors(sources)) {
      for (const other of node.shown.get(index) ?? []) if (!other.dataset.lit) this.add(other, "sa-far");
    }
    this.add(td, "sa-here");
    this.say(td.closest(".sa-stage"), cell);
  }

  add(td, name) {
    if (td.classList.contains(name)) return;
    td.classList.add(name);
    td.dataset.lit = "";
    this.lit.push([td, name]);
  }

  /** The number itself and what it is made of: [colour, node, row, column]. */
  sources({ node, difference, i, j }) {
    if (difference) return [["a", difference.a, i, j], ["b", difference.b, i, j]];
    const itself = [["to", node, i, j]];
    const op = OPS[node.op];
    if (!op) return itself;
    const args = node.args.map((id) => this.nodes.get(id));
    const made = op.made(args.map((arg) => arg.now), i, j, node.options);
    return [...itself, ...made.map(([colour, which, row, column]) => [colour, args[which], row, column])];
  }

  /** What the sources are made of in turn, back to what is given; on a large page that would be too much to light. */
  *ancestors(sources) {
    if (this.numbers > MAX_FAR) return;
    const queue = sources.map(([, ...source]) => source);
    const seen = new Set();
    for (const [node, i, j] of queue) {
      const index = i * node.shape[1] + j;
      const name = `${node.id} ${index}`;
      if (seen.has(name)) continue;
      seen.add(name);
      yield [node, index];
      for (const [, ...source] of this.sources({ node, i, j }).slice(1)) queue.push(source);
    }
  }

  say(stage, cell) {
    const { node, difference, i, j } = cell;
    const spelled = this.spell(cell);
    const line = [element("b", {}, ...this.name(cell))];
    if (spelled !== null) line.push(" = ", element("span", { className: "sa-sum" }, spelled));
    else line.push(` = ${this.text(node, i, j)} `, this.texts[node.editable ? "can be changed" : "is given"]);
    const before = difference ? undefined : node.kernel.at(i, j);
    if (!difference && !same(node.now.at(i, j), before, 0)) {
      line.push(" ", element("i", {}, this.fill("was", { before: write(before, node.decimals, this.precision) })));
    }
    stage.say.replaceChildren(...line);
  }

  tell(stage, message) {
    this.light(null);
    stage?.say?.replaceChildren(message);
  }

  /* ------------------------------------------------------------------------------------------- controls */

  addControls() {
    const button = (name, act) => {
      const made = element("button", { type: "button", onclick: act }, this.texts[name]);
      made.dataset.do = name;
      return made;
    };
    const others = this.labels.t1 ?? this.labels.t0;
    const tokens = this.labels.t0.map((token, i) => (others[i] === token || i >= others.length ? token : `${token} / ${others[i]}`));
    this.chooser = element(
      "select", { onchange: () => this.follow(this.chooser.value) },
      element("option", { value: "" }, this.texts.everything),
      ...tokens.map((token, i) => element("option", { value: String(i) }, token)),
    );
    this.places = element(
      "select", { onchange: () => this.goTo(this.stages[Number(this.places.value)]) },
      ...this.stages.map((stage, n) => element("option", { value: String(n) }, stage.querySelector("h3").textContent)),
    );
    this.counter = element("span", { className: "sa-count" });
    this.playButton = button("play", () => this.toggle());
    this.resetButton = button("reset", () => this.reset());
    this.resetButton.disabled = true;
    const bar = element(
      "div", { className: "sa-bar", role: "toolbar", ariaLabel: this.texts.title },
      button("previous", () => this.step(-1)), this.playButton, button("next", () => this.step(1)), this.counter,
      element("label", {}, this.texts["go to"], " ", this.places),
      element("label", {}, this.texts.follow, " ", this.chooser), this.resetButton,
      button("theme", () => this.changeTheme()),
      button("projector", () => this.root.toggleAttribute("data-projector")),
    );
    if (this.root.querySelector(".sa-answers")) bar.append(button("reveal all", () => this.reveal(this.nodes.values())));
    const hint = element("p", { className: "sa-hint" }, this.texts.hint);
    this.stages[0]?.before(bar, hint);
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
    for (const node of this.nodes.values()) {
      if (node.name !== "scale") continue;
      const value = node.kernel.at(0, 0);
      const top = Math.max(1, 2 * Math.abs(value));
      node.slider = element("input", { type: "range", min: "0", max: String(top), step: String(top / 200) });
      node.slider.value = String(value);
      node.slider.addEventListener("input", () => this.change(node, 0, 0, Number(node.slider.value)));
      const stage = node.tables[0].closest(".sa-stage");
      stage.say.before(element("label", { className: "sa-scale" }, this.texts.scale, " ", node.slider));
    }
  }

  /* ------------------------------------------------------------------------------------------- stepping */

  /** What play shows, in order: number by number where a stage has few, else the first of each row. */
  follow(token) {
    this.stop();
    this.steps = [];
    for (const stage of this.stages) {
      const found = [];
      for (const group of stage.querySelectorAll(".sa-eq")) {
        const tables = [...group.querySelectorAll("table.sa-result:not(.sa-input)")].map(linesOf);
        const few = tables.every((lines) => lines.length * (lines[0]?.cells.length ?? 0) <= MAX_FEW);
        const lines = group.classList.contains("sa-compare")
          ? range(Math.max(0, ...tables.map((table) => table.length))).flatMap((n) => tables.flatMap((table) => table[n] ?? []))
          : tables.flat();
        for (const line of lines) {
          const kept = [...line.cells].filter((td) => this.cells.has(td) && this.concerns(td, token));
          found.push(...(few || token !== "" ? kept : kept.slice(0, 1)));
        }
      }
      if (found.length) this.steps.push(...found.map((td) => ({ stage, td })));
      else this.steps.push({ stage, td: null });
    }
    for (const line of this.root.querySelectorAll("tr.sa-row")) line.classList.remove("sa-row");
    if (token !== "") {
      for (const td of this.root.querySelectorAll("table.sa-m:not([data-t]) tbody td")) {
        const cell = this.cells.get(td);
        const rows = cell && (cell.node ?? cell.difference.a).rows;
        if (rows && /^[tk]\d$/.test(rows) && String(cell.i) === token) td.parentElement.classList.add("sa-row");
      }
    }
    this.at = -1;
    this.count();
  }

  /** Whether a number belongs to a token: its row, or the query of a table of weighted values. */
  concerns(td, token) {
    const { node, i } = this.cells.get(td);
    if (token === "" || !/^[tk]\d$/.test(node.rows)) return true;
    return String(node.op === "pairs" ? node.options.query : i) === token;
  }

  count() {
    this.counter.textContent = `${this.at + 1} / ${this.steps.length}`;
  }

  step(by) {
    const next = this.at + by;
    if (next < 0 || next >= this.steps.length) return this.stop();
    this.at = next;
    this.show(this.steps[next]);
    return true;
  }

  show({ stage, td }) {
    for (const other of this.stages) other.classList.toggle("sa-now", other === stage);
    this.places.value = String(this.stages.indexOf(stage));
    this.pinned = td;
    this.light(td);
    this.count();
    const smooth = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    const tall = stage.getBoundingClientRect().height > 0.8 * innerHeight;
    (tall && td ? td : stage).scrollIntoView({ block: tall && td ? "center" : "nearest", behavior: smooth ? "smooth" : "auto" });
    this.link(stage, td);
  }

  /** Let the address lead here; in a notebook stages have no ids, and the address is left alone. */
  link(stage, td) {
    if (stage.id) history.replaceState(history.state, "", `#${stage.id}${td ? `&row=${this.cells.get(td).i}` : ""}`);
  }

  toggle() {
    if (this.timer) return this.stop();
    if (this.at >= this.steps.length - 1) this.at = -1;
    this.playButton.textContent = this.texts.pause;
    this.timer = setInterval(() => this.step(1), STEP_MS);
    return this.step(1);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = undefined;
    this.playButton.textContent = this.texts.play;
  }

  /** Follow a link such as #stage=scores&row=2, the ids of the static page. */
  goToHash() {
    const [, id, row] = /^#(.*?)(?:&row=(\d+))?$/.exec(location.hash) ?? [];
    const stage = this.stages.find((s) => s.id && s.id === id);
    if (!stage) return;
    this.goTo(stage, row);
  }

  goTo(stage, row) {
    this.stop();
    const fits = (s) => s.stage === stage && (!s.td || row === undefined || this.cells.get(s.td).i === Number(row));
    const found = this.steps.findIndex(fits);
    this.at = found >= 0 ? found : this.steps.findIndex((s) => s.stage === stage);
    this.show(this.steps[this.at]);
  }

  /* ---------------------------------------------------------------------------------- changing numbers */

  edit(td) {
    const cell = this.cells.get(td);
    if (!cell?.node?.editable || td.querySelector("input")) return;
    this.stop();
    const { node, i, j } = cell;
    if (node.name === "mask") return this.change(node, i, j, node.now.at(i, j) === 0 ? 1 : 0, td);
    const field = element("input", { value: String(node.now.at(i, j)), ariaLabel: td.closest("table").caption.textContent });
    const close = (keep, back) => {
      if (!field.isConnected) return;
      const value = read(field.value);
      field.onblur = null;
      td.replaceChildren(this.text(node, i, j));
      if (back) this.focus(td);
      if (keep && value === null) this.tell(td.closest(".sa-stage"), this.fill("not a number", { text: JSON.stringify(field.value) }));
      else if (keep) this.change(node, i, j, value, td);
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

  change(node, i, j, value, td) {
    node.edits.set(i * node.shape[1] + j, value);
    this.compute();
    const stage = (td ?? node.tables[0]).closest(".sa-stage");
    this.tell(stage, this.whatMoved());
  }

  reset() {
    for (const node of this.nodes.values()) node.edits.clear();
    this.compute();
    this.tell(this.stages.find((s) => s.classList.contains("sa-now")) ?? this.stages[0], this.texts["is reset"]);
  }

  /**
   * Compute anew in float64. The kernel's own numbers stand wherever an edit changes nothing: `base` is what
   * float64 gives without edits, and a number has moved if it differs from that.
   */
  compute() {
    const edited = [...this.nodes.values()].some((node) => node.edits.size);
    for (const node of this.nodes.values()) {
      const args = node.args.map((id) => this.nodes.get(id));
      const op = OPS[node.op];
      if (!edited) {
        node.now = node.kernel;
      } else if (!op) {
        node.base = node.kernel;
        const data = node.kernel.data.slice();
        for (const [index, value] of node.edits) data[index] = value;
        node.mine = node.now = new Matrix(...node.shape, data);
      } else {
        node.base ??= op.all(args.map((arg) => arg.base), node.shape, node.options);
        node.mine = op.all(args.map((arg) => arg.mine), node.shape, node.options);
        const { data } = node.mine;
        const tolerance = 1e-12 * node.size;
        const keep = (x, index) => (same(x, node.base.data[index], tolerance) ? node.kernel.data[index] : x);
        node.now = new Matrix(...node.shape, data.map(keep));
      }
      this.draw(node);
    }
    for (const difference of this.differences) this.drawDifference(difference);
    for (const node of this.nodes.values()) if (node.slider) node.slider.value = String(node.now.at(0, 0));
    this.resetButton.disabled = !edited;
  }

  draw(node) {
    node.digits = node.now === node.kernel ? node.decimals : Math.max(node.decimals, decimalsOf(node.now.data, this.precision));
    for (const [index, tds] of node.shown) {
      const i = Math.floor(index / node.shape[1]), j = index % node.shape[1];
      const value = node.now.data[index];
      const moved = !same(value, node.kernel.data[index], 0);
      for (const td of tds) this.paint(td, value, this.hidden(node, i, j), node.size, node.digits, moved);
    }
  }

  drawDifference({ a, b, cells, size, digits }) {
    for (const [td, i, j] of cells) {
      const moved = !same(a.now.at(i, j), a.kernel.at(i, j), 0) || !same(b.now.at(i, j), b.kernel.at(i, j), 0);
      this.paint(td, this.minus({ a, b }, i, j), this.hidden(a, i, j) || this.hidden(b, i, j), size, Math.max(digits, a.digits, b.digits), moved);
    }
  }

  paint(td, value, hidden, size, digits, moved) {
    if (hidden) {
      if (!td.querySelector("input")) td.textContent = "____";
      return;
    }
    const text = write(value, digits, this.precision);
    if (td.textContent !== text) td.textContent = text;
    td.classList.toggle("sa-moved", moved);
    const level = shade(value, size);
    if (td.sa !== level) {
      td.classList.remove(...[...td.classList].filter((name) => /^([pn]\d|x)$/.test(name)));
      if (level) td.classList.add(level);
      td.sa = level;
    }
  }

  whatMoved() {
    let n = 0, most = null;
    for (const node of this.nodes.values()) {
      node.now.data.forEach((value, index) => {
        const before = node.kernel.data[index];
        if (node.edits.has(index) || same(value, before, 0)) return;
        n++;
        const by = Math.abs(value - before) / (node.size || 1);
        if (!most || by > most.by) most = { node, by, before, value, i: Math.floor(index / node.shape[1]), j: index % node.shape[1] };
      });
    }
    if (!most) return this.texts.unmoved;
    const { node, before, value, i, j } = most;
    if (this.hidden(node, i, j)) return this.fill("moved", { n });
    const line = element("span", {});
    const [start, end] = this.texts["moved most"].split("{name}");
    const values = { n, before: write(before, node.decimals, this.precision), after: write(value, node.digits, this.precision) };
    const put = (text) => filled(text, values);
    line.append(put(start), ...(end === undefined ? [] : [element("b", {}, ...this.name({ node, i, j })), put(end)]));
    return line;
  }

  /* ------------------------------------------------------------------------------------------ exercise */

  addBlanks() {
    for (const node of this.nodes.values()) {
      if (node.blanks === null) continue;
      node.fields = new Map();
      node.blanks.forEach((j, i) => {
        const td = (node.shown.get(i * node.shape[1] + j) ?? []).find((cell) => cell.closest("table.sa-result"));
        if (!td) return;
        const name = element("span", {}, ...this.name({ node, i, j })).textContent;
        const field = element("input", { ariaLabel: this.fill("predict", { name }), autocomplete: "off" });
        field.onkeydown = (event) => event.key === "Enter" && this.check(node, i, j, field, td);
        td.replaceChildren(field);
        node.fields.set(i, field);
      });
    }
    if (!this.root.querySelector(".sa-answers")) return;
    this.stages[0]?.before(element("p", { className: "sa-hint" }, this.texts.exercise));
    for (const stage of this.stages) {
      const nodes = [...stage.querySelectorAll("table.sa-result")]
        .map((table) => this.nodes.get(table.dataset.node)).filter((node) => node?.blanks);
      if (!nodes.length) continue;
      const reveal = element("button", { type: "button", onclick: () => this.reveal(nodes) }, this.texts.reveal);
      reveal.dataset.do = "reveal";
      stage.say.before(reveal);
    }
  }

  /** Right is what rounds to the answer, with two decimals at least where the answer has them. */
  check(node, i, j, field, td) {
    const guess = read(field.value);
    const stage = td.closest(".sa-stage");
    const answer = node.now.at(i, j);
    if (guess === null) return this.tell(stage, this.fill("not a number", { text: JSON.stringify(field.value) }));
    const typed = (field.value.split(".")[1] ?? "").length;
    const decimals = Math.min(node.digits, Math.max(typed, Math.min(2, node.digits)));
    const right = same(guess, answer, 0) || Math.abs(guess - answer) <= 0.5000001 * 10 ** -decimals;
    if (!right) return this.tell(stage, this.fill("wrong", { guess: field.value }));
    this.uncover(node, i, "sa-right");
    this.focus(td);
    return this.tell(stage, this.fill("right", { answer: this.spell({ node, i, j }) ?? this.text(node, i, j) }));
  }

  reveal(nodes) {
    for (const node of nodes) if (node.blanks) for (const i of node.blanks.keys()) this.uncover(node, i, "sa-revealed");
  }

  uncover(node, i, mark) {
    if (node.revealed.has(i)) return;
    node.revealed.add(i);
    for (const td of node.shown.get(i * node.shape[1] + node.blanks[i]) ?? []) {
      td.classList.remove("sa-blank");
      td.classList.add(mark);
      td.replaceChildren();
    }
    this.draw(node);
    for (const difference of this.differences) this.drawDifference(difference);
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
    if (this.alone) window.addEventListener("hashchange", () => this.goToHash());
  }

  pin(td) {
    this.pinned = td;
    const found = this.steps.findIndex((s) => s.td === td);
    if (found >= 0) {
      this.at = found;
      this.count();
    }
    const stage = td.closest(".sa-stage");
    this.places.value = String(this.stages.indexOf(stage));
    this.link(stage, td);
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
    const letters = { n: () => this.step(1), b: () => this.step(-1), p: () => this.toggle() };
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

/** The rows of a table but for those that say that some are left out. */
function linesOf(table) {
  return [...table.tBodies[0].rows].filter((line) => !line.classList.contains("sa-gap"));
}

for (const root of document.querySelectorAll(".sa-steps:not([data-live])")) {
  if (root.querySelector("script.sa-data")) new View(root);
}
