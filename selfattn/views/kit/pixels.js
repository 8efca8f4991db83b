/*
 * Pictures of many numbers at once: colours as a canvas holds them, and drawing with them.
 */

/**
 * Colours as a canvas holds them, one number each: of weights' roots from 0 to 255 for both texts, and of differences.
 * @param {HTMLElement} root
 */
function pixelColours(root) {
  const probe = element("i");
  root.append(probe);
  const rgb = (/** @type {string} */ name) => {
    probe.style.color = `var(${name})`;
    const context = element("canvas", { width: 1, height: 1 }).getContext("2d");
    if (!context) return [0, 0, 0];
    context.fillStyle = getComputedStyle(probe).color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data.subarray(0, 3)];
  };
  const panel = rgb("--panel"), texts = [rgb("--text0"), rgb("--text1")], paper = rgb("--paper");
  probe.remove();
  const packed = (/** @type {number[]} */ [red, green, blue]) => red | (green << 8) | (blue << 16) | (255 << 24);
  const mixed = (/** @type {number[]} */ to, /** @type {number} */ part) => packed(panel.map((from, n) => Math.round(from + (to[n] - from) * part)));
  const scale = texts.map((to) => range(256).map((n) => mixed(to, n / 255)));
  return {
    paper: packed(paper),
    /** @param {number} side @param {number} root of a weight, 0 to 255 */
    weight: (side, root) => scale[side][root],
    /** @param {number} difference −1 to 1 */
    difference: (difference) => scale[difference < 0 ? 0 : 1][Math.round(255 * Math.min(1, Math.abs(difference)) ** 0.75)],
  };
}

/** @typedef {ReturnType<typeof pixelColours>} PixelColours */

/**
 * @param {HTMLCanvasElement} canvas
 * @param {number} rows
 * @param {number} columns
 * @param {(i: number, j: number) => number} colour
 */
function paint(canvas, rows, columns, colour) {
  canvas.width = Math.max(1, columns);
  canvas.height = Math.max(1, rows);
  const context = canvas.getContext("2d");
  if (!context || !rows || !columns) return;
  const image = context.createImageData(columns, rows), pixels = new Int32Array(image.data.buffer);
  for (let i = 0, at = 0; i < rows; i++) for (let j = 0; j < columns; j++) pixels[at++] = colour(i, j);
  context.putImageData(image, 0, 0);
}
