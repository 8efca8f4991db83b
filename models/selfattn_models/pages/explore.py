"""The explorer of a real model.

It shows all heads as small maps with their habits, one head as a large map, and a word's rollout through all layers.

`heads` computes what the page shows; `explorer.js` draws it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np

from selfattn.text import spelled
from selfattn.views.document import Document, drawn_by_script, weights_svg
from selfattn.views.language import fill, in_language
from selfattn.views.live_pages import MOST_RIBBONS
from selfattn.views.writing import text as escaped
from selfattn.views.writing import token_list, visible
from selfattn_models.pages.ablation import without_heads
from selfattn_models.pages.heads import (
    HABITS,
    SMALL,
    Habit,
    Store,
    TextHeads,
    habits,
    is_causal,
    is_mark,
    is_special,
    next_tokens,
    read_steps,
    shared_by,
    stored,
)
from selfattn_models.pages.texts import EXPLORER, PACKAGE, own

__all__ = ["Explorer", "explorer"]

Text: TypeAlias = Any
# Heads; heads of keys; width of a head, None if products do not give its weights.
_Layer: TypeAlias = tuple[int, int, int | None]
# Of a page's numbers before compression; a larger page is refused before it is computed.
MOST_BYTES = 17_000_000
MOST_NEW = 256
MOST_TOKENS_OFF = 64  # tokens for which each head is switched off without being asked


@dataclass(frozen=True, repr=False)
class Explorer(Document):
    """The page of :func:`explorer`: shows itself in a notebook; ``page.save(path)`` writes a file."""

    styles: ClassVar[tuple[str, ...]] = own("explorer.css")
    scripts: ClassVar[tuple[str, ...]] = own("explorer.js")


def explorer(
    model_or_steps: Any,
    text: Text,
    *,
    compare: Text = None,
    word: str | None = None,
    new_tokens: int = 0,
    key_tokens: str | Sequence[str] | None = None,
    lang: str = "en",
    heads_off: bool | None = None,
) -> Explorer:
    """Show what every head of a model does with a text.

    Small maps of all heads, each with its habit; one head large, as ribbons or as a map; a word's rollout through all
    layers; for language models what they expect next, place by place.

    Parameters
    ----------
    model_or_steps : model of selfattn_models, nn.EmbeddingModel, or what their ``steps`` return
        Also :class:`selfattn.AttentionSteps` of one layer, self-attention or from one text to another.
    text : str, pair of str, or sequence of int; for steps str or a sequence of str
        What the model reads: a sentence, a pair of sentences, or ids. Steps need their tokens; one
        string is split at spaces.
    compare : like text, optional
        A second text. For steps: (steps, tokens).
    word : str, optional
        The token that is chosen at first. None: the longest word; with two texts, the longest that is in both. In
        causal attention the last token, which predicts the next one.
    new_tokens : int, default 0
        Tokens that a language model adds, the likeliest each time; the page goes through them one by one.
    key_tokens : str or sequence of str, optional
        For steps of attention from one text to another: the tokens of the keys.
    lang : {"en", "de", "fr"}
        The language of the page.
    heads_off : bool, optional
        Compute what a model of ``selfattn_models`` says with each head off, what each word does for it, and a
        language model's logit lens; this takes as long as a model run for each head. By default for texts of at most
        64 tokens.

    Returns
    -------
    Explorer

    Raises
    ------
    TypeError
        A model without steps; tokens that are not strings.
    ValueError
        Tokens that do not fit the steps, a word that is not in the text, texts with different numbers of layers or
        heads, or more tokens than a page can show: its numbers may have 17 MB. The message says how many fit; nothing
        has been computed then.

    References
    ----------
    The rollout is attention rollout: Abnar and Zuidema (2020), "Quantifying attention flow in transformers",
    equation 1; a word's row of a layer is half its own, and half the mean of the layer's heads.

    Examples
    --------
    >>> import selfattn as sa
    >>> page = explorer(sa.attention_steps([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), "the river bank")
    >>> "What 1 head does" in page.title
    True
    """
    if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or not 0 <= new_tokens <= MOST_NEW:
        raise ValueError(f"new_tokens is an integer from 0 to {MOST_NEW}, not {new_tokens!r}")
    store, captions, off = Store(), in_language(EXPLORER, lang, PACKAGE), None
    read: list[Any] = []
    if hasattr(model_or_steps, "steps"):
        given = [text] if compare is None else [text, compare]
        both = [_taken(model_or_steps, each, new_tokens) for each in given]
        read = [each for _, each in both]
        layers = _layers_of(model_or_steps)
        _check_fits(layers, [(len(ids) + new_tokens,) * 2 for ids, _ in both])
        texts = [_read_model(model_or_steps, *each, new_tokens, store) for each in both]
    else:
        texts = [_read(model_or_steps, text, key_tokens)]
        if isinstance(compare, tuple) and len(compare) == 2:
            texts.append(_read(*compare, None))
        elif compare is not None:
            raise TypeError(f"with steps, compare is (steps, tokens), not {type(compare).__name__}")
        _check_fits(
            [_stored_as(*each) for each in zip(texts[0].layers, texts[0].made_of, strict=True)],
            [(len(each.queries), len(each.keys)) for each in texts],
        )
    shapes = [[len(layer) for layer in each.layers] for each in texts]
    if shapes[0] != shapes[-1]:
        raise ValueError(
            f"the texts have layers of {shapes[0]} and {shapes[1]} heads; they must be of one model"
        )
    chosen = _chosen(texts, word)
    found, captions = habits(texts), captions | _places(texts, captions)
    if max(len(each.queries) for each in texts) <= MOST_TOKENS_OFF if heads_off is None else heads_off:
        place = min(chosen[0], texts[0].prompt - 1)
        off = without_heads(model_or_steps, read, place, partial(_spelled, model_or_steps), store)
    data = {
        "name": _name(model_or_steps),
        "heads": shapes[0],
        "habits": [[_habit(habit) for habit in layer] for layer in found],
        "names": list(HABITS),
        "texts": [stored(each, store) | {"chosen": n} for each, n in zip(texts, chosen, strict=True)],
        "ribbons": MOST_RIBBONS,
        "off": off,
        "captions": captions,
    }
    heads, named = sum(shapes[0]), texts[0].queries[chosen[0]]
    title = fill(captions["title"], lang, heads=heads, word=named.strip("␣ ") or named)
    body = _body(title, data, found, texts, store)
    return Explorer(title, body, _picture(texts, found, chosen[0], title, captions), lang)


def _layers_of(model: Any) -> list[_Layer]:
    """Return the layers of a model, or no layers if the model is another package's."""
    if hasattr(model, "_built"):
        settings, found = model._built(1)[0], []
        for each in settings.layers:
            key_heads = each.num_key_heads or each.num_heads
            stacked = each.num_heads + (2 * key_heads if each.key is None else 0)
            plain = settings.position_bias is None and not each.softcap
            width = each.query.weight.shape[0] // stacked if plain else None
            found.append((each.num_heads, key_heads, width))
        return found
    own = getattr(model, "attention_layers", [])
    return [(each.num_heads, each.num_heads, model.embedding_dim // each.num_heads) for each in own]


def _stored_as(weights: Any, made_of: Any) -> _Layer:
    """Return a layer of steps."""
    if made_of is None:
        return len(weights), len(weights), None
    query, key = made_of
    return len(query), len(key) // shared_by(key), query.shape[-1]


def _size(layers: list[_Layer], lengths: list[tuple[int, int]]) -> int:
    """Return the size in bytes of a page's numbers, for ``lengths`` (queries, keys) of the texts.

    See :func:`heads.stored`.
    """
    size = 0
    for length, width in lengths:
        for heads, key_heads, d in layers:
            pairs, rows = heads * length * width, heads * length + key_heads * width
            size += 2 * pairs if d is None or rows * d >= pairs else rows * (2 * d + 4)
            # Small maps and means.
            size += heads * min(length, SMALL) * min(width, SMALL) + 2 * length * width
    return size


def _check_fits(layers: list[_Layer], lengths: list[tuple[int, int]]) -> None:
    """Refuse texts whose page would be too large."""
    size, longest = _size(layers, lengths), max(map(max, lengths))
    if size > MOST_BYTES:
        more = bisect_right(range(longest), MOST_BYTES, key=lambda n: _size(layers, [(n, n)] * len(lengths)))
        each, limit = " of each text" if len(lengths) > 1 else "", f"{MOST_BYTES / 1e6:.0f} MB"
        made = f"{longest} tokens{each} make a page with {size / 1e6:.1f} MB of numbers; the limit is {limit}"
        raise ValueError(f"{made}: give at most {more - 1} tokens{each}, new ones included")


def _read(steps: Any, text: Text, key_tokens: str | Sequence[str] | None) -> TextHeads:
    tokens = token_list("text", text)
    return read_steps(steps, tokens, tokens if key_tokens is None else token_list("key_tokens", key_tokens))


def _taken(model: Any, text: Text, new_tokens: int) -> tuple[Any, Any]:
    """Return a text's tokens and what ``steps`` takes: ids for a language model."""
    if hasattr(model, "logits"):
        ids = np.asarray(model._ids(text))
        return ids, ids
    if new_tokens:
        raise ValueError(f"new_tokens is for language models; {type(model).__name__} is not one")
    if hasattr(getattr(model, "tokenizer", None), "get_added_tokens_decoder"):
        return _spelled(model, getattr(model, "_ids", model.tokens)(text)), text
    if not hasattr(model, "tokens"):  # an nn.GPT has ids, a ViT patches
        rows = model._one(text)[1]
        return [str(x) for x in (rows if rows.ndim == 1 else range(len(rows)))], text
    return _shown(_pieces(model, text)), text


def _read_model(model: Any, tokens: Any, given: Any, new_tokens: int, store: Store) -> TextHeads:
    if not hasattr(model, "logits"):
        return read_steps(model.steps(given), tokens, tokens)
    ids, prompt = given, len(given)
    if new_tokens:
        ids = np.concatenate([ids, model.generate(ids, new_tokens)])
    tokens = _spelled(model, ids)
    expected = next_tokens(np.asarray(model.logits(ids)), lambda some: _spelled(model, some), store)
    return read_steps(model.steps(ids), tokens, tokens, prompt=prompt, next=expected)


def _pieces(source: Any, text: Text) -> Sequence[Any]:
    """Return a text's tokens as strings; as ids if the tokenizer has no strings."""
    tokens: Sequence[Any] = source.tokens(text)
    encode = getattr(getattr(source, "tokenizer", None), "encode", None)
    if not isinstance(text, str) or isinstance(tokens[0], str) or encode is None:
        return tokens
    try:
        pieces: list[str] = encode(text, out_type=str)  # SentencePiece and selfattn have this
    except TypeError:
        return tokens
    return pieces[: len(tokens)] if len(pieces) >= len(tokens) else tokens


def _spelled(source: Any, ids: Any) -> list[str]:
    """Return tokens as they read in a text.

    The signs of other libraries' tokenizers are replaced as far as they are known.
    """
    tokenizer = getattr(source, "tokenizer", None)
    if hasattr(tokenizer, "get_added_tokens_decoder"):
        return [visible(token) for token in spelled(tokenizer, ids)]
    return _shown(source.tokens(ids))


def _shown(tokens: Sequence[Any]) -> list[str]:
    """Return tokens with a space in place of the tokenizer's sign for it."""
    return [visible(str(token).replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")) for token in tokens]


def _chosen(texts: Sequence[TextHeads], word: str | None) -> list[int]:
    """Return which token of each text is marked at first."""
    if word is not None:
        found = [
            [n for n, token in enumerate(each.queries) if _plain(token) == _plain(word)] for each in texts
        ]
        if not found[0] and not found[-1]:
            raise ValueError(f"the token {word!r} is not among {texts[0].queries}")
        return [each[0] if each else 0 for each in found]
    if all(is_causal(each) for each in texts):
        return [each.prompt - 1 for each in texts]  # the token that predicts
    rest = [set(each.queries) for each in texts[1:]]
    words = [token for token in texts[0].queries if not is_mark(token)]
    words = [token for token in words if all(token in other for other in rest)] or words or texts[0].queries
    longest = max(words, key=lambda token: len(_plain(token)))
    return [each.queries.index(longest) if longest in each.queries else 0 for each in texts]


def _plain(token: str) -> str:
    return token.strip("␣ ").casefold()


def _name(source: Any) -> str:
    if not hasattr(source, "steps"):
        return ""
    folder = getattr(source, "_folder", None)
    return visible(getattr(folder, "name", str(folder))) if folder is not None else type(source).__name__


def _habit(habit: Habit) -> dict[str, Any]:
    shares = [round(share, 4) for share in habit.shares.values()]
    return asdict(habit) | {"shares": shares, "entropy": round(habit.entropy, 4)}


def _places(texts: Sequence[TextHeads], captions: Mapping[str, str]) -> dict[str, str]:
    """Return sentences that name a special token if it is the only one of its kind in all texts."""
    named = {}
    first = {each.keys[0] for each in texts}
    others = {token for each in texts for token in each.keys[1:] if is_special(token)}
    for kind, tokens, plural in (("first", first, "first token"), ("separators", others, "separators")):
        only = next(iter(tokens)) if len(tokens) == 1 else ""
        if is_special(only):
            named[f"kind.{kind}"] = only
        name = only if is_special(only) else captions[plural]
        named[f"means.{kind}"] = fill(captions[f"means.{kind}"], where=name)
        named[f"place.{kind}"] = name
    return named


def _body(
    title: str, data: dict[str, Any], found: list[list[Habit]], texts: Sequence[TextHeads], store: Store
) -> str:
    """Return the HTML that is shown without a script, and the data that the script reads."""
    names = data["captions"]
    rows = "".join(
        f'<tr><th scope="row">{escaped(names["layer"].format(layer=n))}</th>'
        + "".join(
            f"<td>{'' if head.clear else '~'}{escaped(names[f'kind.{head.kind}'])}</td>" for head in layer
        )
        + "</tr>"
        for n, layer in enumerate(found)
    )
    read = "".join(f"<p><bdi>{escaped(' '.join(each.queries))}</bdi></p>" for each in texts)
    shown = f'{read}\n<table class="sa-habits"><caption>{escaped(names["table"])}</caption>{rows}</table>'
    return drawn_by_script("sa-explorer", names["lang"], title, shown, data, b"".join(store.parts))


def _picture(
    texts: Sequence[TextHeads], found: list[list[Habit]], chosen: int, title: str, captions: dict[str, str]
) -> str:
    """Return a picture of the head with the largest weight in the chosen word's row."""
    layers = texts[0].layers
    n, h = max(
        ((n, h) for n, layer in enumerate(layers) for h in range(len(layer))),
        key=lambda at: float(layers[at[0]][at[1], chosen].max(initial=0)),
    )
    name = captions["head"].format(layer=n, head=h)
    matrices = [(name, each.layers[n][h], each.queries, each.keys, set[tuple[int, int]]()) for each in texts]
    return weights_svg(matrices, title, [captions[f"means.{found[n][h].kind}"]])
