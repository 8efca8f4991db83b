"""Every sentence and label of the pages by its name, from `languages/en.json`.

``captions=`` of a steps page replaces any of CAPTIONS.

Sentences about steps have the names of the steps; ``{scale}`` and the like are filled in. Formulas and lines of NumPy
are the same in every language: `graph` has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from selfattn.views.language import in_language, read
from selfattn.views.writing import storable

_ENGLISH = read("en")
#: What several pages say, by its section of the file.
TOOLS: dict[str, str] = _ENGLISH["tools"]
MODELS: dict[str, str] = _ENGLISH["models"]
LIVE: dict[str, str] = _ENGLISH["live"]
#: Of a page of steps. ``tab`` is a short title, ``word`` is marked at first, ``made up`` says which numbers are made
#: up, ``first`` and ``second`` are names of the sentences.
CAPTIONS: dict[str, str] = _ENGLISH["page"]
#: The captions that scripts need: not those of stages, which the page has as HTML.
SCRIPTED = [name for name in CAPTIONS if "." not in name and f"head.{name}" not in CAPTIONS]
TOUR = {
    name: said
    for name, said in CAPTIONS.items()
    if re.fullmatch("tour.*|previous|next|play|pause|reveal", name)
}
GPT_TEXTS: dict[str, str] = TOOLS | MODELS | LIVE | _ENGLISH["gpt"]
#: The way back uses CAPTIONS for names that are not here.
WAY_BACK: dict[str, str] = {
    **TOOLS,
    **{f"name.{name}": name for name in "xQKV"},
    **{f"gradient.{name}": f"d{name}" for name in "xQKVSPO"},
    **_ENGLISH["way back"],
}
PLAYGROUND: dict[str, str] = TOOLS | LIVE | _ENGLISH["playground"]
START: dict[str, str] = _ENGLISH["start"]
TRAINING: dict[str, str] = TOOLS | MODELS | LIVE | _ENGLISH["training"]


def merged(captions: Mapping[str, str] | None, lang: str = "en") -> dict[str, str]:
    """Return the captions of a language, with the caller's in their places.

    The error for an unknown name lists all names.
    """
    if not isinstance(captions, Mapping | None):
        raise TypeError(f"captions maps names to sentences; it is not a {type(captions).__name__}")
    given = dict(captions or {})
    unknown = sorted(set(given) - set(CAPTIONS), key=str)
    if unknown:
        raise ValueError(f"captions has no {unknown[0]!r}; there are {', '.join(CAPTIONS)}")
    for name, sentence in given.items():
        if not isinstance(sentence, str):
            raise TypeError(f"captions[{name!r}] is a {type(sentence).__name__}, not a string")
    return in_language(CAPTIONS, lang) | {
        name: storable(re.sub(r"\s+", " ", sentence)) for name, sentence in given.items()
    }
