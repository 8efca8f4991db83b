/*
 * The explorer in a page that runs a model, which is fed again and again.
 */

import { ExplorerPage } from "../explorer.js";
import { filled } from "../../../../selfattn/views/compute.js";
import { element } from "../../../../selfattn/views/kit/page.js";
import { isSpecial, KINDS } from "../../../../selfattn/views/live/habits.js";
import { PackPage } from "../../../../selfattn/views/live/pack_page.js";

/** @typedef {import("../explorer_parts.js").StoredText} StoredText */

/**
 * The explorer below the fields, which have its first line; each change of a text makes a new one, with the choices of
 * the last.
 */
class LiveExplorer extends ExplorerPage {
  top() {
    return this.look;
  }
}

/**
 * Sentences that name a special token, if it is the only one of its kind: `_places` of views/explore.py.
 * @type {(texts: StoredText[], captions: Record<string, string>) => Record<string, string>}
 */
function placesOf(texts, captions) {
  const all = texts.flatMap(({ queries }) => queries.slice(1)).filter(isSpecial);
  return Object.assign(
    {},
    ...Object.entries({
      first: [texts.map(({ queries }) => queries[0]), "first token"],
      separators: [all, "separators"],
    }).map(([kind, [tokens, plural]]) => {
      const only = new Set(tokens).size === 1 && isSpecial(tokens[0]) ? tokens[0] : "",
        where = only || captions[String(plural)];
      return {
        ...(only && { [`kind.${kind}`]: only }),
        [`means.${kind}`]: filled(captions[`means.${kind}`], { where }),
        [`place.${kind}`]: where,
      };
    }),
  );
}

export class ModelPage extends PackPage {
  /** @type {ExplorerPage | undefined} */ explorer;
  shown = element("div.sa-explorer");

  recolour() {
    this.explorer?.recolour();
  }

  /** @type {(found: any, before: ExplorerPage | undefined) => void} draw all heads of the texts that a job looked at */
  explore({ texts, bytes, heads, habits }, before) {
    const captions = { ...this.captions, ...placesOf(texts, this.captions) };
    this.explorer = new LiveExplorer(
      this.shown,
      { name: this.name, off: null, heads, habits, names: KINDS, texts, ribbons: this.data.ribbons, captions },
      bytes.buffer,
      before,
    );
  }
}
