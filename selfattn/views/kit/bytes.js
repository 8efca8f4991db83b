/*
 * Numbers that travel in a page as bytes.
 */

/**
 * The bytes of a page, from base64 and deflated.
 * @param {string} base64
 * @returns {Promise<ArrayBuffer>}
 */
async function inflate(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
  const { DecompressionStream } = /** @type {any} */ (globalThis);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}
