"""What pages say in other languages.

The files of `languages/` have the translations of English sentences; the rules of plurals are here.

The English sentence is the key, so a sentence that a file lacks, or whose English has changed, is said in English.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from selfattn._check import one_of

#: The plural category of a number in each language of `languages/`, by CLDR's rules; scripts ask the browser's
#: Intl.PluralRules.
PLURALS: dict[str, Callable[[float], str]] = {
    "en": lambda n: "one" if n == 1 else "other",
    "de": lambda n: "one" if n == 1 else "other",
    "fr": lambda n: "one" if 0 <= n < 2 else "many" if n % 1_000_000 == 0 else "other",
}

#: What each language calls itself.
OWN_NAMES = {"en": "English", "de": "Deutsch", "fr": "Français"}

# As ICU writes it, without places in its forms.
_PLURAL = re.compile(r"\{(\w+), plural,((?: \w+ \{[^{}]*\})+)\}")
_FORM = re.compile(r"(\w+) \{([^{}]*)\}")


#: The package that has the languages of the core's pages; another package has its own, in the same form.
VIEWS = "selfattn.views"


def read(lang: str, package: str = VIEWS) -> Any:
    """Return the content of a language's file."""
    file = resources.files(package).joinpath("languages", f"{lang}.json")
    return json.loads(file.read_text(encoding="utf-8"))


@functools.cache
def entries(lang: str, package: str = VIEWS) -> Mapping[str, str]:
    """Return the translations of a language, by their English, of the core's pages and a package's; {} for English."""
    if one_of("lang", lang, PLURALS) == "en":
        return {}
    found: dict[str, str] = read(lang)
    return found if package == VIEWS else found | read(lang, package)


def say(sentence: str, lang: str, /, **values: object) -> str:
    """Say an English sentence in a language, with values in its places.

    Examples
    --------
    >>> say("Reset", "de"), say("bank", "de")
    ('Zurücksetzen', 'bank')
    """
    return fill(entries(lang).get(sentence, sentence), lang, **values)


def in_language(texts: Mapping[str, str], lang: str, package: str = VIEWS) -> dict[str, str]:
    """Return a page's sentences in a language, from the files of its package, and the language as ``lang``."""
    known = entries(lang, package)
    return {name: fill(known.get(each, each), lang) for name, each in texts.items()} | {"lang": lang}


def fill(sentence: str, lang: str = "en", /, **values: object) -> str:
    """Replace places in braces by their values, and plurals by the form of their number; places without a value stay.

    Examples
    --------
    >>> fill("head {n} of {m}", n=1)
    'head 1 of {m}'
    >>> fill("{n, plural, one {# head} other {# heads}}", "fr", n=0)
    '0 head'
    """

    def counted(match: re.Match[str]) -> str:
        if match[1] not in values:
            return match[0]
        n = values[match[1]]
        forms: dict[str, str] = dict(_FORM.findall(match[2]))
        category = PLURALS.get(lang, PLURALS["en"])(float(str(n)))
        return (forms.get(category) or forms["other"]).replace("#", str(n))

    plain = _PLURAL.sub(counted, sentence)
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), plain)
