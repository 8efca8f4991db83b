/*
 * The explorer as live pages have it: fed by a worker, again and again.
 */

/** The explorer below the fields, which have its first line; each change of a text makes a new one, with the choices of the last. */
class LiveExplorer extends ExplorerPage {
  top() {
    return this.look;
  }
}

/** @type {(texts: StoredText[], captions: Record<string, string>) => Record<string, string>} sentences that name a special token, if it is the only one of its kind: `_places` of views/explore.py */
function placesOf(texts, captions) {
  const all = texts.flatMap(({ queries }) => queries.slice(1)).filter(isSpecial);
  return Object.assign({}, ...Object.entries({ first: [texts.map(({ queries }) => queries[0]), "first token"], separators: [all, "separators"] }).map(([kind, [tokens, plural]]) => {
    const only = new Set(tokens).size === 1 && isSpecial(tokens[0]) ? tokens[0] : "", where = only || captions[String(plural)];
    return { ...(only && { [`kind.${kind}`]: only }), [`means.${kind}`]: filled(captions[`means.${kind}`], { where }), [`place.${kind}`]: where };
  }));
}
