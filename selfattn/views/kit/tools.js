/*
 * Light or dark, and larger type for a projector, for everything in a root.
 */

/**
 * @param {HTMLElement} root an element of class sa-view
 * @param {Record<string, string>} texts
 * @param {() => void} changed colours or sizes are others now
 */
function tools(root, texts, changed) {
  const theme = element("button", { type: "button", data: { do: "theme" }, title: texts.theme, ariaLabel: texts.theme, onclick: () => {
    root.dataset.theme = getComputedStyle(root).getPropertyValue("--dark").trim() === "1" ? "light" : "dark";
    changed();
  } }, "◐");
  const larger = element("button", { type: "button", data: { do: "projector" }, title: texts.projector, ariaLabel: texts.projector, ariaPressed: "false", onclick: () => {
    larger.ariaPressed = String(root.toggleAttribute("data-projector"));
    changed();
  } }, "A", element("small", {}, "A"));
  return element("div", { className: "sa-tools" }, theme, larger);
}
