/*
 * A guided tour: at every stop a question, then the answer. Play moves through the tour at the chosen speed.
 */

import { button, element, phrase } from "./page.js";

/**
 * @typedef {object} Stop
 * @property {string} name
 * @property {string} ask text of this package; *word* is bold
 * @property {string[]} options
 * @property {number} right the number of the right option
 * @property {string} reveal
 */
/**
 * @typedef {object} TourOptions
 * @property {Stop[]} stops
 * @property {Record<string, string>} texts
 * @property {(stop: Stop | null, open: boolean) => void} show called when a stop is asked or its answer opens; null:
 *   before the tour
 */

const SECONDS = { slow: 10, normal: 6, fast: 3 }; // seconds between two steps of Play

export class Tour {
  /** @param {TourOptions} options */
  constructor({ stops, texts, show }) {
    this.stops = stops;
    this.texts = texts;
    this.show = show;
    this.at = -1; // -1 is before the first stop
    this.open = true;
    this.timer = 0;
    const named = (/** @type {string} */ name, /** @type {() => void} */ act) =>
      button({ data: { do: name }, onclick: act });
    this.place = element("span.sa-tour-at");
    this.words = element("span.sa-tour-say", { ariaLive: "polite" });
    this.guesses = element("span.sa-guesses", { role: "group", ariaLabel: texts["tour guess"] });
    this.dots = stops.map((stop, n) =>
      button({ title: stop.name, ariaLabel: `${n + 1}: ${stop.name}`, onclick: () => this.go(n) }),
    );
    this.back = named("tour back", () => this.go(this.at - 1));
    this.next = named("tour next", () => this.forward());
    this.playButton = named("tour play", () => this.toggle());
    this.back.append(texts.previous);
    this.speed = element(
      "select",
      { ariaLabel: texts["tour speed"], title: texts["tour speed"], onchange: () => this.pace() },
      ...Object.keys(SECONDS).map((name) => element("option", { value: name }, texts[`tour ${name}`])),
    );
    this.speed.value = "normal";
    this.node = element(
      "nav.sa-tour",
      { ariaLabel: texts.tour },
      this.place,
      this.words,
      this.guesses,
      element(
        "span.sa-tour-go",
        element("span.sa-dots", { role: "group", ariaLabel: texts["tour stops"] }, ...this.dots),
        this.back,
        this.next,
        this.playButton,
        this.speed,
      ),
    );
    this.draw();
  }

  /** @param {number} n the stop; -1 is the state before the tour */
  go(n) {
    this.at = n < -1 || n >= this.stops.length ? -1 : n;
    this.open = this.at < 0;
    this.show(this.stops[this.at] ?? null, this.open);
    this.draw();
    this.focus(this.open ? this.next : this.guesses.querySelector("button"));
  }

  /** End the tour where the page is: another one has begun. */
  leave() {
    this.stop();
    this.at = -1;
    this.open = true;
    this.draw();
  }

  /** @param {number} [guess] */
  reveal(guess) {
    if (this.open) return;
    this.open = true;
    this.show(this.stops[this.at], true);
    this.draw(guess);
    this.focus(this.next);
  }

  /**
   * Focus what comes next, so that keys go on: an answer, or the button after it. While the tour plays, or the reader
   * is elsewhere in the page, the focus stays.
   * @param {HTMLElement | null} target
   */
  focus(target) {
    const { activeElement: now, body } = document;
    if (!this.timer && (!now || now === body || this.node.contains(now))) target?.focus({ preventScroll: true });
  }

  forward() {
    if (this.open) this.go(this.at + 1);
    else this.reveal();
  }

  toggle() {
    if (this.timer) return this.stop();
    this.forward();
    this.timer = -1;
    this.pace();
  }

  /** Follow the chosen speed, if the tour plays. */
  pace() {
    if (!this.timer) return;
    clearInterval(this.timer);
    const seconds = SECONDS[/** @type {keyof typeof SECONDS} */ (this.speed.value)];
    this.timer = window.setInterval(() => {
      this.forward();
      if (this.open && this.at === this.stops.length - 1) this.stop();
    }, 1000 * seconds);
    this.name();
  }

  stop() {
    clearInterval(this.timer);
    this.timer = 0;
    this.name();
  }

  name() {
    this.playButton.textContent = this.timer ? this.texts.pause : this.texts["tour play"];
    this.playButton.ariaPressed = String(this.timer !== 0);
    this.node.toggleAttribute("data-playing", this.timer !== 0);
  }

  /** @param {number} [guess] */
  draw(guess) {
    const { texts, at, open } = this, stop = this.stops[at];
    this.place.textContent = stop ? `${at + 1}/${this.stops.length} ${stop.name}` : texts["tour start name"];
    this.words.replaceChildren(
      ...phrase(stop ? (open ? stop.reveal : stop.ask) : texts["tour invitation"], { n: this.stops.length }),
    );
    this.guesses.hidden = !stop;
    this.guesses.replaceChildren(
      ...(stop?.options ?? []).map((option, n) => {
        const look = !open ? "" : n === stop.right ? "sa-yes" : n === guess ? "sa-no" : "";
        const made = button(
          { className: look, onclick: () => this.reveal(n) },
          open && n === stop.right ? "✓ " : "",
          ...phrase(option),
        );
        made.ariaDisabled = String(open);
        return made;
      }),
    );
    this.dots.forEach((dot, n) => {
      dot.textContent = n <= at ? "●" : "○";
      if (n === at) dot.setAttribute("aria-current", "step");
      else dot.removeAttribute("aria-current");
    });
    this.back.hidden = !stop;
    const last = at === this.stops.length - 1;
    this.next.textContent = !stop ? texts["tour start"] : !open ? texts.reveal : last ? texts["tour end"] : texts.next;
    this.name();
  }
}
