/*
 * A playground of attention: a text's words, or matrices, through the core's kernels, as a picture first.
 */

const WIDTH = 16; // numbers of a word

/** @type {Record<string, Work>} */
const PLAYGROUND_JOBS = {
  attention: ({ words }, { kernel }) => {
    const n = words.length, x = Float32Array.from(words.flatMap((/** @type {string} */ word) => range(WIDTH).map((c) => 4 * shareOf(`${c} ${word}`) - 2)));
    return kernel.attention({ query: x, key: x, value: x, L: n, S: n, weights: true });
  },
};

class Playground {
  /** @param {HTMLElement} root @param {{ captions: Record<string, string>, commit: string }} data @param {ArrayBuffer} wasm */
  constructor(root, { captions, commit }, wasm) {
    this.root = root;
    this.captions = captions;
    this.worker = new KernelWorker(wasm);
    this.words = element("textarea", { ariaLabel: captions.words, value: captions.example, oninput: () => this.compute() });
    this.canvas = element("canvas", { role: "img", ariaLabel: captions.title });
    this.line = element("p", { className: "sa-line", ariaLive: "polite" });
    root.replaceChildren(topOf(root, captions, element("p", {}, ...phrase(captions.look)), "", () => this.draw()), this.words,
      element("div", { className: "sa-map" }, this.canvas), this.line, element("p", { className: "sa-soft" }, filled(captions["built from"], { commit: commit.slice(0, 12) })));
    this.compute();
  }

  async compute() {
    const words = this.words.value.split(/\s+/).filter(Boolean).slice(0, 4096);
    if (!words.length) return;
    try {
      const found = await this.worker.ask("attention", { words });
      if (!found) return;
      this.found = { n: words.length, weights: found.weights };
      this.draw();
      this.root.dataset.computed = "";
    } catch (error) {
      this.line.textContent = faultOf(error, this.captions);
    }
  }

  draw() {
    const { n, weights } = this.found ?? { n: 0, weights: [] }, colours = pixelColours(this.root);
    paint(this.canvas, n, n, (i, j) => colours.weight(0, weights[i * n + j]));
  }
}

if (inWorker) serve(PLAYGROUND_JOBS);
else start("sa-playground", Playground);
