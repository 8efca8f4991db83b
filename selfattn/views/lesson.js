/*
 * All views of a document or of a cell's output: tabs choose the view that is shown, and the tour moves between views.
 */

import { speak } from "./compute.js";
import { button, element, isForeign, moveAlong, phrase, tools } from "./kit/page.js";
import { Tour } from "./kit/tour.js";
import { dataOf, fits, ownWords, takesWords, wordsOf } from "./own_words.js";
import { View } from "./steps.js";

/** @typedef {import("./kit/tour.js").Stop} Stop */
/** @typedef {import("./numbers.js").PageData} PageData */
/** @typedef {import("./own_words.js").Table} Table */

/**
 * @typedef {object} LessonStop what a stop of the tour shows, apart from its texts
 * @property {number} view
 * @property {string} [block]
 * @property {string} [head]
 * @property {number} word
 * @property {[string, number, number, number][]} before changes: node, row, column, value
 * @property {[string, number, number, number][]} after more changes once the answer is open
 * @property {string} hide what is hidden until the answer is open: "scores", "weights", "output", or ""
 * @property {string} opens what it names, and so shows: "knobs", "strip", "details" and a stage
 */
/**
 * A page that was joined with others: its first view.
 * @typedef {{ first: number, name: string, stops: (Stop & LessonStop)[] }} Home
 */

const OWN_TEXTS = ["text", "compare"]; // of an address

export class Lesson {
  /** @type {string[][] | null} */ written = null; // the reader's words, if they are shown
  /** @type {View | null} */ shown = null;

  /** @param {HTMLElement} root */
  constructor(root) {
    this.root = root;
    root.dataset.live = "";
    const data = root.querySelector("script.sa-tour-data")?.textContent;
    /** @type {Home[]} */
    const homes = data ? JSON.parse(data) : [];
    this.toured = homes.some(({ stops }) => stops.length);
    const roots = /** @type {HTMLElement[]} */ ([...root.querySelectorAll(".sa-steps")]);
    /** @type {PageData[]} */
    this.data = roots.map((each) => JSON.parse(each.querySelector("script.sa-data")?.textContent ?? ""));
    const numbers = root.querySelector("script.sa-known")?.textContent;
    /** @type {Record<string, Table>[]} */
    this.known = numbers ? JSON.parse(numbers) : [];
    this.views = roots.map((each, n) => new View(each, this, this.data[n], n));
    this.texts = this.views[0].texts;
    speak(this.texts.lang);
    const top = element("div.sa-top");
    this.look = element("p.sa-look");
    root.prepend(top, this.look);
    this.homes = homes.map(({ first, name, stops }) => ({
      first,
      name,
      tour: stops.length
        ? new Tour({
            stops,
            texts: this.texts,
            show: (stop, open) => this.visit(/** @type {(Stop & LessonStop) | null} */ (stop), open, first),
          })
        : null,
    }));
    const tours = this.homes.flatMap(({ tour }) => tour ?? []);
    this.whole = button(
      { data: { do: "everything" }, onclick: () => this.showAll(root.hasAttribute("data-first")) },
      this.texts["everything shown"],
    );
    const more = this.toured ? [this.whole] : [];
    top.append(element("h1", root.dataset.title ?? ""), tools(root, this.texts, () => this.redraw(), ...more));
    this.showAll(!this.toured);
    this.tabs = element(
      "div.sa-tabs.sa-view-tabs",
      { role: "tablist", ariaLabel: this.texts.tabs },
      ...this.views.map((view, n) =>
        button(
          { role: "tab", title: view.texts.title, onclick: () => this.open(this.views[n]) },
          this.views.length > 1 ? `${n + 1} ` : "",
          this.homes.length > 1 ? `${this.homeOf(n).name}: ` : "",
          view.texts.tab || view.texts.title,
        ),
      ),
    );
    this.tabs.hidden = this.views.length < 2;
    const tabs = /** @type {HTMLElement[]} */ ([...this.tabs.children]);
    moveAlong(this.tabs, () => tabs, (n) => {
      this.open(this.views[n]);
      tabs[n].focus();
    });
    const { t0, t1 } = this.views[0].labels,
      one = this.views.every(({ labels, data }) => takesWords(data) && labels.t0.join("\n") === t0.join("\n"));
    this.reader = ownWords(this.texts, t1 ? [t0, t1] : [t0], (texts) => {
      this.write(texts);
      this.link();
    });
    this.look.after(
      ...tours.map(({ node }) => node),
      this.tabs,
      ...(one ? [this.reader] : []),
    );
    this.takes = one ? (t1 ? 2 : 1) : 0; // texts of the reader's own
    root.style.setProperty("--guess", JSON.stringify(this.texts["guess first"]));
    root.addEventListener("keydown", (event) => this.key(event));
    if ("alone" in root.dataset) {
      document.addEventListener(
        "keydown",
        (event) => event.target === document.body && !root.hidden && this.key(event),
      );
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    this.show(this.first);
    if ("alone" in root.dataset) {
      window.addEventListener("resize", () => this.redraw());
      // newURL, since the page may have changed the address in the meantime.
      window.addEventListener("hashchange", (event) => this.goToHash(new URL(event.newURL).hash));
      this.goToHash(location.hash);
    }
  }

  /** @param {number} n a view @returns the page that it came with, which has the tour of its views */
  homeOf(n) {
    return this.homes.filter(({ first }) => first <= n).at(-1) ?? { first: 0, name: "", tour: null };
  }

  /** @param {string[][] | null} texts the words of each text; null: those of the page, of which its tour speaks */
  write(texts) {
    if (texts) for (const { tour } of this.homes) tour?.leave();
    const at = this.shown ? this.views.indexOf(this.shown) : 0;
    this.views = this.views.map((view, n) => {
      const root = element("div.sa-steps"), data = this.data[n];
      view.root.replaceWith(root);
      const wanted = texts && { texts, known: this.known[n] ?? {}, made: new Set() };
      return new View(root, this, wanted ? dataOf(data, wanted) : data, n);
    });
    this.shown = null;
    this.written = texts;
    this.show(this.views[at]);
  }

  /** The tour of the view that is shown. */
  get tour() {
    return this.homeOf(this.shown ? this.views.indexOf(this.shown) : 0).tour;
  }

  /** @param {boolean} all everything, or the tour and one picture alone */
  showAll(all) {
    this.root.toggleAttribute("data-first", !all);
    this.whole.ariaPressed = String(all);
    this.shown?.screen?.draw();
  }

  /** The view that is shown first. */
  get first() {
    return this.views[Number(this.root.dataset.opens ?? 0)] ?? this.views[0];
  }

  /** @param {View} view */
  show(view) {
    if (this.shown === view) return;
    this.shown?.walk.stop();
    this.look.replaceChildren(
      ...phrase(view.texts.look),
      ...(view.texts["made up"] ? [" ", element("span.sa-made-up", view.texts["made up"])] : []),
    );
    view.build(); // its picture fills the screen below the text
    this.shown = view;
    this.views.forEach((each, n) => {
      each.root.toggleAttribute("data-hidden", each !== view);
      const tab = /** @type {HTMLElement} */ (this.tabs.children[n]);
      tab.ariaSelected = String(each === view);
      tab.tabIndex = each === view ? 0 : -1;
    });
    for (const { tour } of this.homes) if (tour) tour.node.hidden = tour !== this.tour;
    const { tour } = this, stop = tour?.stops[tour.at];
    this.ask(/** @type {(Stop & LessonStop) | undefined} */ (stop) ?? null, !!tour?.open);
    view.screen?.draw();
  }

  /** @type {(stop: LessonStop | null, open: boolean) => void} hide what answers its question, show what it names */
  ask(stop, open) {
    const { root, shown, tour } = this, opens = stop?.opens ?? "", named = opens.split(" ");
    const next = /** @type {LessonStop | undefined} */ (stop && tour?.stops[tour.at + 1]);
    root.toggleAttribute("data-asking", stop !== null && !open);
    // The output waits for the next question, if that asks for it.
    const later = stop?.hide === "weights" && next?.view === stop.view && next.hide === "output" ? "output" : "";
    root.dataset.hide = open ? later : (stop?.hide ?? "");
    root.dataset.opened = opens;
    for (const stage of shown?.stages ?? []) {
      const isNamed = named.includes(stage.name);
      if (isNamed || root.hasAttribute("data-first")) stage.open(isNamed);
    }
  }

  /** @param {View} view whose tab is chosen */
  open(view) {
    this.show(view);
    this.link();
  }

  redraw() {
    for (const { screen, stale } of this.views) {
      screen?.redraw();
      for (const stage of stale) stage.draw();
    }
  }

  /** @param {string} hash */
  goToHash(hash) {
    const at = new URLSearchParams(hash.slice(1)), [stop, place] = [Number(at.get("stop")), Number(at.get("view"))];
    if (at.has("stage")) return (this.views[place - 1] ?? this.views[0]).walk.goToHash(hash);
    if (!hash) return;
    const own = OWN_TEXTS.flatMap((name) => at.get(name) ?? []).map(wordsOf);
    if (own.length && own.length === this.takes && own.every(fits)) this.write(own);
    else if (this.written) this.write(null);
    const view = this.views[place - 1] ?? this.shown, { t0 } = view.labels, word = at.get("word") ?? "";
    this.show(view);
    const { screen } = view;
    if (this.tour?.stops[stop - 1]) return this.tour.go(stop - 1);
    if (screen) {
      screen.choose({
        ...screen.heads.find(
          ({ block, head }) => (at.get("block") ?? block) === block && (at.get("head") ?? head) === head,
        ),
        word: t0.includes(word) ? t0.indexOf(word) : word && t0[Number(word)] ? Number(word) : undefined,
      });
    }
  }

  /**
   * Make the address a link to what is shown: a stop of the tour, or the view, the head and the word, by its place if
   * it is not the first of its kind.
   */
  link() {
    const { tour, shown, views } = this, screen = shown?.screen, at = new URLSearchParams();
    if (!("alone" in this.root.dataset) || !screen) return;
    if (views.length > 1) at.set("view", String(views.indexOf(shown) + 1));
    if (tour && tour.at >= 0) at.set("stop", String(tour.at + 1));
    else {
      const { block, head, heads, pinned } = screen, { t0 } = shown.labels;
      if (heads.some((each) => each.block !== block || each.head !== head)) {
        for (const [name, value] of Object.entries({ block, head })) if (value) at.set(name, value);
      }
      if (pinned.kind === "to") {
        at.set("word", t0.indexOf(t0[pinned.index]) === pinned.index ? t0[pinned.index] : String(pinned.index));
      }
    }
    this.written?.forEach((words, n) => at.set(OWN_TEXTS[n], words.join(",")));
    shown.walk.address(`#${at}`);
  }

  /** Scroll back to the first screen. */
  toTop() {
    if ("alone" in this.root.dataset) {
      window.scrollTo({ top: window.scrollY + Math.min(0, this.root.getBoundingClientRect().top) });
    } else {
      this.root.scrollTop = 0;
    }
  }

  /**
   * Show a stop of the tour; null: the page without the tour.
   * @type {(stop: (Stop & LessonStop) | null, open: boolean, first: number) => void}
   */
  visit(stop, open, first) {
    if (stop && this.written) this.reader?.reset(); // the tour speaks of the page's words
    if (stop && !open) this.toTop();
    const view = stop ? this.views[stop.view] : first ? this.views[first] : this.first;
    this.show(view);
    this.ask(stop, open);
    view.set(stop ? [...stop.before, ...(open ? stop.after : [])] : []);
    if (stop) view.screen?.choose(stop);
    else for (const { screen } of this.views) screen?.restart();
    this.link();
  }

  /**
   * Keys of the tour; in the details the same keys go number by number.
   * @param {KeyboardEvent} event
   */
  key(event) {
    const { tour, shown } = this;
    const target = /** @type {Element} */ (event.target);
    const combined = event.ctrlKey || event.metaKey || event.altKey || (event.shiftKey && event.key === "Enter");
    // The browser searches for numbers of closed stages too.
    if (combined && event.key === "f") for (const stage of shown?.stages ?? []) stage.draw();
    if (combined || event.key === "Tab") return; // keys of the surrounding page: saving, running a cell
    event.stopPropagation(); // "d" "d" would delete a cell of a notebook
    if (isForeign(event)) return;
    const walking = target.closest(".sa-stage, .sa-bar") || !tour;
    /** @type {Record<string, (() => void) | undefined>} */
    const acts = walking
      ? { n: () => shown?.walk.step(1), b: () => shown?.walk.step(-1), p: () => shown?.walk.toggle() }
      : { n: () => tour.forward(), b: () => tour.go(tour.at - 1), p: () => tour.toggle() };
    const act = Object.hasOwn(acts, event.key) ? acts[event.key] : undefined;
    if (!act) return;
    act();
    event.preventDefault();
  }
}

for (const root of document.querySelectorAll(".sa-lesson:not([data-live])")) {
  if (root.querySelector("script.sa-data")) new Lesson(/** @type {HTMLElement} */ (root));
}
