"""How the tests of pages run scripts, find a cell in a browser, read numbers, highlights and sums, edit a number."""

import base64
import json
import re

import numpy as np
import pytest

from selfattn.views import document

# The contrast of every visible text with its background: WCAG 2.1, 1.4.3.
CONTRASTS = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const luminance = (colours) => {
        canvas.fillStyle = "white";
        canvas.fillRect(0, 0, 1, 1);
        for (canvas.fillStyle of colours) canvas.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((x) => x / 255)
            .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = new Map();
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const element = walk.currentNode.parentElement;
        if (!walk.data?.trim && !walk.currentNode.data.trim()) continue;
        if (element.closest("script, style, :disabled") || !element.checkVisibility()) continue;
        const above = [];
        for (let e = element; e; e = e.parentElement) above.unshift(getComputedStyle(e).backgroundColor);
        const {color} = getComputedStyle(element);
        const name = `${element.tagName} ${element.className} ${above.join(" ")} ${color}`;
        if (found.has(name)) continue;
        const [x, y] = [luminance(above), luminance([...above, color])].sort((a, b) => b - a);
        found.set(name, (x + 0.05) / (y + 0.05));
    }
    return [...found];
}"""


# The text on the screen, without that of tours.
VISIBLE = """() => {
    const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const { parentElement } = walk.currentNode;
        const shown = parentElement.checkVisibility({ visibilityProperty: true });
        if (shown && !parentElement.closest(".sa-tour, script")) found.push(walk.currentNode.data);
    }
    return found.join(" ");
}"""


def then(scripts, more):
    """Return the code of scripts, as pages have it, and more code that uses what they export."""
    code = document.code(*scripts).removesuffix("})();")
    modules = re.findall(r"^const (\$\w+) = ", code, re.MULTILINE)
    exports = re.findall(r"^return (\{.*\});\n\}\)\(", code, re.MULTILINE)
    return code + "".join(map("const {1} = {0};\n".format, modules, exports)) + more + "})();"


def in_base64(content):
    return base64.b64encode(content).decode()


def compute(browser, kernels, scripts, names, body, given):
    """Run the body of an async function in a page with these names of scripts; arrays cross in base 64.

    It has `kernel`, `given`, and `bytes` and `text`, which read and write base 64.
    """
    page = browser.new_page()
    page.add_script_tag(content=then(scripts, f"Object.assign(globalThis, {{ Kernel, {names} }});"))
    begin = """async ([wasm, given]) => {
        const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
        const text = ({ buffer, byteOffset, byteLength }) => btoa(new Uint8Array(buffer, byteOffset, byteLength)
            .reduce((all, byte) => all + String.fromCharCode(byte), ""));
        const kernel = await Kernel.load(bytes(wasm));"""
    found = page.evaluate(f"{begin}{body}}}", [in_base64(kernels.read_bytes()), given])
    page.close()
    return found


def cell(page, stage, node, i, j, *, transposed=False):
    """A cell of a table of a stage, by its row and column in the table."""
    t = "[data-t]" if transposed else ":not([data-t])"
    rows = page.locator(f"[data-stage='{stage}'] table[data-node='{node}']{t} tbody tr:not(.sa-gap)")
    return rows.nth(i).locator("td").nth(j)


def numbers_of(table):
    """The numbers of a table, from the DOM."""
    rows = table.evaluate(
        "t => [...t.tBodies[0].rows].map(r => [...r.querySelectorAll('td')].map(c => c.textContent))"
    )
    words = {"−": "-", "∞": "inf", "masked": "-inf"}
    return np.array([[float(re.sub("[−∞]|masked", lambda m: words[m[0]], x)) for x in row] for row in rows])


def table(page, stage, node):
    """The numbers of a matrix in a stage."""
    settle(page)
    return numbers_of(page.locator(f"[data-stage='{stage}'] table[data-node='{node}']:not([data-t])").first)


def lit(page, colour, stage=None):
    """The highlighted numbers, as node[row,column] in the table that shows them."""
    settle(page)
    where = f"[data-stage='{stage}'] " if stage else ".sa-details "
    return page.eval_on_selector_all(
        f"{where}td.sa-{colour}",
        """cells => cells.map(c => {
            const table = c.closest("table"), i = c.parentElement.sectionRowIndex, j = c.cellIndex - 1;
            const [row, column] = "t" in table.dataset ? [j, i] : [i, j];
            return `${table.dataset.node ?? "difference"}[${row},${column}]`;
        })""",
    )


def stages(page):
    """The names of the stages, in order."""
    return page.eval_on_selector_all(".sa-stage", "all => all.map((stage) => stage.dataset.stage)")


def figures(page, side=0, where=".sa-see"):
    """The numbers on the ribbons of the word that is marked."""
    return page.locator(f"{where} .sa-ribbons[data-side='{side}'] .sa-figures text").all_text_contents()


def strip(page, role, side=0):
    """The numbers of a matrix of the strip."""
    return numbers_of(page.locator(f".sa-strip .sa-is-{role}[data-side='{side}']").first)


def bars(page):
    """The tokens and probabilities in the bars of next tokens, without the bar of all others."""
    rows = page.locator(".sa-bars-list li:not(.sa-rest)").all()
    return [(row.locator(".sa-name").inner_text(), float(row.locator("output").inner_text())) for row in rows]


def said(page, stage):
    return page.locator(f"[data-stage='{stage}'] .sa-say").inner_text()


def assert_nothing_runs(page, token):
    """A page of hostile tokens shows them as text after its last button is pressed."""
    page.wait_for_selector("[data-live]")
    page.locator("button:visible").last.click()
    page.wait_for_function("token => document.body.innerText.includes(token)", arg=token)
    assert page.locator("img:not(.sa-still img)").count() == 0


def in_a_cell(widget):
    """Return a page that runs a widget's module as anywidget runs it, and keeps in ``saved`` what the user chose."""
    data = json.dumps({"body": widget.body, "style_sheet": widget.style_sheet}).replace("<", "\\u003c")
    module = widget._esm.replace("export default", "const widget =").replace("</script", "<\\/script")
    return f"""<!DOCTYPE html><html lang=en><title>widget</title><link rel=icon href="data:,"><body class=sa-page>
        <div class=cell></div>
        <script>{module}
        const data = {data};
        window.model = {{
            get: (name) => data[name],
            set: (name, value) => (data[name] = value),
            save_changes: () => (window.saved = data.chosen),
        }};
        const el = document.createElement("div");
        widget.render({{ model, el }});
        setTimeout(() => document.querySelector(".cell").append(el), 50); // later, as notebooks do
        </script>"""


def change(page, stage, node, i, j, text):
    cell(page, stage, node, i, j).dblclick()
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    settle(page)


def settle(page):
    """Wait until tables that are not in sight are written too."""
    page.wait_for_selector("[data-stale]", state="detached")


# Points at every cell of every table: its sum, its text, the text of its first source.
SPELLED = """() => {
    const found = [];
    let n = 0;
    for (const td of document.querySelectorAll(".sa-result tbody td, [data-a] tbody td")) {
        td.dispatchEvent(new PointerEvent("pointerover", {bubbles: true, screenX: ++n}));
        const sum = td.closest(".sa-stage").querySelector(".sa-sum");
        const source = td.closest(".sa-steps").querySelector("td.sa-a"); // what a number is taken from as it is
        if (sum) found.push([sum.textContent, td.textContent, source?.textContent]);
    }
    return found;
}"""


def assert_spelled(page, at_least):
    """Evaluate every written sum with 12 decimals: up to rounding it is the number in the cell."""
    names = {"exp": np.exp, "tanh": np.tanh, "inf": np.inf, "nan": np.nan, "sqrt": np.sqrt}
    spelled = page.evaluate(SPELLED)
    assert len(spelled) > at_least
    for text, shown, source in spelled:
        formula, result = re.split(" [=≈] ", text)
        assert result == shown
        if formula in ("masked", "nothing to attend to"):
            assert result in ("-inf", "0", "0.000000000000")
            continue
        if re.fullmatch(r"([\w, ]+: )?\w+\[.*\]", formula):
            assert float(result) == pytest.approx(float(source), rel=1e-12, abs=1e-12)
            continue
        computed = eval(formula.replace("·", "*").replace("√", "sqrt"), names)
        # about 8 terms, each figure rounded to 12 decimals and multiplied by numbers below 100
        assert np.isclose(computed, float(result), rtol=1e-9, atol=1e-9), text
