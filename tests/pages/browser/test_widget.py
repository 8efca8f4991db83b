"""The widget: its module, run as anywidget runs it, draws the view and reports the choice."""

import json

import pytest

import selfattn as sa
from selfattn import views


def test_the_widgets_module_in_a_page(visit):
    pytest.importorskip("anywidget", reason="the extra viz brings anywidget")
    x = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    widget = views.explorer(sa.attention_steps(x, x, x), ["the", "river", "bank"]).widget()
    assert widget.chosen == {}
    data = json.dumps({"body": widget.body, "style_sheet": widget.style_sheet}).replace("<", "\\u003c")
    module = widget._esm.replace("export default", "const widget =").replace("</script", "<\\/script")
    page = visit(
        f"""<!DOCTYPE html><html lang=en><title>widget</title><link rel=icon href="data:,"><body class=sa-page><div class=cell></div>
        <script>{module}
        const data = {data};
        window.model = {{ get: (name) => data[name], set: (name, value) => (data[name] = value), save_changes: () => (window.saved = data.chosen) }};
        const el = document.createElement("div");
        widget.render({{ model, el }});
        setTimeout(() => document.querySelector(".cell").append(el), 50); // later, as notebooks do
        </script>"""
    )
    page.wait_for_selector("[data-ready]")
    page.locator(".sa-text button").nth(1).click()
    assert page.evaluate("window.saved") == {"text": 0, "layer": 0, "head": 0, "place": 1, "token": "river"}
    assert page.locator("[data-alone]").count() == 0
    widget.chosen = {"token": "bank"}
    seen = []
    widget.observe(lambda change: seen.append(change["new"]), "chosen")
    widget.chosen = {"token": "river"}
    assert seen == [{"token": "river"}]
