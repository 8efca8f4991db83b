"""A view as one file of HTML, which fetches nothing, and as what a notebook shows."""

from __future__ import annotations

import os
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from selfattn._extras import import_extra
from selfattn.views.assets import code, script, style
from selfattn.views.writing import text

# A view's script looks for views in the document, so it runs when the element is there.
_ESM = """\
export default {
  render({ model, el }) {
    el.innerHTML = model.get("style_sheet") + model.get("body").replace(' data-alone=""', "");
    el.addEventListener("sa-chosen", ({ detail }) => {
      model.set("chosen", detail);
      model.save_changes();
    });
    const start = () => {
      if (!el.isConnected) return requestAnimationFrame(start);
      CODE
    };
    requestAnimationFrame(start);
  },
};
"""

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"  # no network
)


@dataclass(frozen=True, repr=False)
class Document:
    """A view as HTML, and as a picture for where HTML is not shown.

    Attributes
    ----------
    title : str
    body : str
        One element of class ``sa-view``, without script.
    svg : str
    fragment : str
        What notebooks show: body, style and script.
    html : str
        A whole document, which needs no network. ``str(document)`` is the same.
    """

    title: str
    body: str
    svg: str
    lang: str = "en"

    styles: ClassVar[tuple[str, ...]] = ()
    scripts: ClassVar[tuple[str, ...]] = ()

    @property
    def fragment(self) -> str:
        """The view with style and script."""
        plain = self.plain_body().replace(' data-alone=""', "")
        return f"<div>{style(*self.styles)}{plain}{script(*self.scripts)}</div>"

    def plain_body(self) -> str:
        """Return the body without what only a document of its own may have, such as ids."""
        return self.body

    @property
    def html(self) -> str:
        """The whole document."""
        return (
            f'<!DOCTYPE html>\n<html lang="{text(self.lang)}">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            f'<title>{text(self.title)}</title>\n<link rel="icon" href="data:,">\n{style(*self.styles)}\n</head>\n'
            f'<body class="sa-page">\n{self.body}\n{script(*self.scripts)}\n</body>\n</html>\n'
        )

    def __str__(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.title!r}, {len(self.html.encode()) / 1000:.0f} kB>"

    def _repr_html_(self) -> str:
        return self.fragment

    def _repr_svg_(self) -> str:
        return self.svg

    def widget(self) -> Any:
        """Return the view as a notebook's widget, which tells Python what is chosen.

        ``widget.chosen`` is a dict of what was chosen last, such as the token and the head; ``widget.observe(function, "chosen")``
        calls a function each time. Without a running kernel, :attr:`fragment` shows the same.

        Returns
        -------
        anywidget.AnyWidget

        Raises
        ------
        ImportError
            anywidget is not installed; the extra ``viz`` brings it.
        """
        anywidget, traitlets = import_extra("anywidget", "viz"), import_extra("traitlets", "viz")
        made = type(
            "View",
            (anywidget.AnyWidget,),
            {
                "_esm": _ESM.replace("CODE", code(*self.scripts)),
                "body": traitlets.Unicode(self.body).tag(sync=True),
                "style_sheet": traitlets.Unicode(style(*self.styles)).tag(sync=True),
                "chosen": traitlets.Dict({}).tag(sync=True),
            },
        )
        return made()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the document to a file, in UTF-8, and return its path."""
        path = Path(path)
        path.write_text(self.html, encoding="utf-8")
        return path

    def open(self, path: str | os.PathLike[str]) -> Path:
        """Write the document and show it in a browser."""
        path = self.save(path)
        webbrowser.open(path.resolve().as_uri())
        return path
