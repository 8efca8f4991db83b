"""Every sentence and label of a steps page, in English; ``captions=`` replaces any of them.

Sentences about steps have the names of the steps; ``{scale}`` and the like are filled in. Formulas and lines
of NumPy are the same in every language and stand beside what they describe, in `graph`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from selfattn.views.writing import storable

CAPTIONS: dict[str, str] = {
    "lang": "en",
    "title": "Attention, step by step",
    "tab": "",  # the title, for a tab
    "look": "*Look for this:* from whom does each word take? The thicker a ribbon, the more.",
    "word": "",  # the one that stands out at first
    "made up": "",  # what numbers are made up, if some are
    "first": "",  # names of the sentences; empty: their words
    "second": "",
    # captions of stages
    "embeddings": "Every token is looked up in the embedding table: a row of numbers that means the word.",
    "positions": "Attention does not see the order of its tokens, so every place in the sentence gets a row of its own.",
    "inputs": "One row of numbers for every token. This is all that attention knows about the words.",
    "model_inputs": "Word and place are added: this goes into the first block.",
    "linear": "A linear layer treats every row by itself: no token sees another one.",
    "given": "Queries, keys and values as they were passed in: what a token looks for, what it offers, what it hands over.",
    "query": "The query of a token says what it is looking for: its row of inputs, times W_query.",
    "key": "The key of a token says what it can be found by: its row of inputs, times W_key.",
    "value": "The value of a token is what it hands over to those who attend to it: its row of inputs, times W_value.",
    "scores": "Row i, column j: how well the query of token i fits the key of token j. Multiply number by number and add up.",
    "additive_scores": "Row i, column j: how well the query of token i fits the key of token j. Add number by number, bend each sum "
    "with tanh, times v, and add up.",
    "scaled_scores": "Every score times the scale. Scores grow with the width of the keys; scaled down, the softmax stays soft.",
    "capped_scores": "Every score times the scale, then bent so that it stays between -softcap and softcap.",
    "masked_scores": "Where the mask holds 0 the query must not see the key: its score becomes -inf, which the softmax turns into 0.",
    "biased_scores": "First something is added: a float mask, or a distance (ALiBi). Where the mask holds 0 the query must not see "
    "the key: its score becomes -inf, which the softmax turns into 0.",
    "sink_weights": "The softmax with a sink: exp of every score, divided by the sum over its row and exp of the sink. A row adds up to less than 1.",
    "weights": "The softmax: exp of every score, divided by the sum over its row. No weight is negative, and a row adds up to 1. A row in which everything is masked is all zeros.",
    "dropped_weights": "Dropout: keep holds 0 for the weights that are dropped and 1 / (1 - p) for the others, so that their expected sum stays the same.",
    "replaced_weights": "From here on given weights are used instead of the computed ones. The switch use_given, 1 or 0, goes back to those.",
    "weighted_values": "For every query a table of its own: row j is the value of token j, times the weight that the query gives it.",
    "output": "Adding up such a table gives the output of its query: a mean of all values, weighted by attention.",
    "concatenated": "The outputs of the heads, side by side.",
    "projected_output": "One more linear layer mixes what the heads found.",
    "residual": "The input is added again: attention changes the meaning of a token, it does not replace it.",
    "norm": "LayerNorm: every row minus its mean, divided by its standard deviation, then times weight plus bias.",
    "mean": "The mean over all tokens: one row of numbers for the whole sentence.",
    # headings
    "head.embeddings": "Embeddings",
    "head.positions": "Positions",
    "head.inputs": "Inputs",
    "head.model_inputs": "Inputs: embeddings plus positions",
    "head.linear": "Linear layer",
    "head.given": "Query, key, value",
    "head.query": "Queries",
    "head.key": "Keys",
    "head.value": "Values",
    "head.scores": "Scores",
    "head.additive_scores": "Scores",
    "head.scaled_scores": "Scaled scores",
    "head.masked_scores": "Masked scores",
    "head.capped_scores": "Scaled and capped scores",
    "head.biased_scores": "Masked scores",
    "head.sink_weights": "Weights",
    "head.weights": "Weights",
    "head.dropped_weights": "Weights after dropout",
    "head.replaced_weights": "Weights, replaced",
    "head.weighted_values": "Weighted values",
    "head.output": "Output: the weighted sum",
    "head.concatenated": "Heads, side by side",
    "head.projected_output": "Output projection",
    "head.residual": "Residual",
    "head.norm": "LayerNorm",
    "head.mean": "Mean over the tokens",
    # labels
    "head": "head {n}",
    "block": "block {n}",
    "of query": "query {token}",
    "difference": "second minus first",
    "legend": "Colours of {name}:",
    "open mask": "Nothing was masked: the mask is 1 everywhere.",
    "abridged": "Abridged: {shown} of {all} rows and columns are shown; all of them are computed with.",
    "abridged queries": "Abridged: shown for {shown} of {all} queries.",
    "abridged heads": "Abridged: {shown} of {all} heads are shown.",
    # the first screen
    "screen": "What each word takes from each",
    "goes in": "goes in",
    "comes out": "comes out",
    "keeps": "{word} keeps {own} of itself and takes {parts}.",
    "takes": "{word} takes {parts}.",
    "part": "{weight} from {word}",
    "rest": "{weight} from all others",
    "given to": "From {word}: {parts}.",
    "taker": "{word} takes {weight}",
    "takes nothing": "{word} may take from nobody, and comes out as zeros.",
    "alone": "{word} comes from itself alone: no word sees another one.",
    "and": "and",
    "coming out": "{word}, coming out",
    "coming out both": "{word} and {other}, coming out",
    "most different": "Most different: number {n}, by {by}.",
    "not different": "No difference.",
    "mix": "Rings: what each word hands over, larger for more weight. Disc: what comes out, their mean.",
    "strip": "The numbers, from inputs to output",
    "strip inputs": "inputs",
    "strip query": "asks",
    "strip key": "offers",
    "strip value": "hands over",
    "strip mask": "1: may look",
    "strip scores": "Q·K × scale",
    "strip weights": "softmax: shares",
    "strip output": "weights · V",
    "strip linear": "x · W",
    "strip result": "of the layer",
    "open stage": "Show how {name} is made, below",
    "as given": "weights as given",
    "as computed": "real softmax",
    "point": "Point at a number. Underlined ones change: drag sideways, + −, Enter.",
    "open all": "Open all",
    "close all": "Close all",
    "tabs": "Views",
    # the guided tour
    "tour": "Guided tour",
    "tour start name": "Point at a word",
    "tour invitation": "and see from whom it takes. Change an underlined number, and the ribbons follow. Or take the tour: {n} guesses.",
    "tour start": "Start the tour",
    "tour end": "End",
    "tour play": "Play",
    "tour guess": "Your guess",
    "tour stops": "Stops",
    "tour speed": "Speed of Play",
    "tour slow": "slow",
    "tour normal": "normal",
    "tour fast": "fast",
    "guess first": "your guess first",
    # controls and messages of the script
    "previous": "Back",
    "play": "Play",
    "pause": "Pause",
    "next": "Next",
    "follow": "Follow",
    "everything": "every token",
    "go to": "Go to",
    "reset": "Reset",
    "theme": "Light or dark",
    "projector": "Projector size",
    "scale": "scale",
    "hint": "Point at a number, or go to a table with Tab and on with the arrow keys, to see where it comes from. Keys: n next, "
    "b back, p play. Change what is underlined with a double-click or Enter; a click closes or opens a cell of the mask. "
    "Every matrix has its own scale of colours.",
    "is given": "given",
    "can be changed": "given; double-click or press Enter to change it",
    "can be closed": "given; click or press Enter to open or close it",
    "moved": "Numbers that moved: {n}.",
    "moved most": "Numbers that moved: {n}. The one that moved most is {name}: {before} became {after}.",
    "was": "was {before}",
    "unmoved": "Nothing that is shown has moved.",
    "is reset": "All numbers are those of the computation again.",
    "not a number": "{text} is not a number; 2.5, -1e-3, inf and nan are.",
    "masked": "masked",
    "masked weight": "masked",
    "nothing": "nothing to attend to",
    "predict": "Predict {name}",
    "right": "Right: {answer}",
    "wrong": "Not {guess}. Try again, or reveal.",
    "reveal": "Reveal",
    "reveal all": "Reveal all",
    "exercise": "Fill in the blanks; Enter checks your prediction.",
    "answers": "Answers",
    "terms": "{n} terms",
}


def fill(sentence: str, **values: object) -> str:
    """Put values where a sentence names them in braces; what else stands in braces stays.

    Examples
    --------
    >>> fill("head {n} of {m}", n=1)
    'head 1 of {m}'
    """
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), sentence)


def merged(captions: Mapping[str, str] | None) -> dict[str, str]:
    """Put the caller's captions over the defaults; an unknown name is an error that lists what there is."""
    if not isinstance(captions, Mapping | None):
        raise TypeError(f"captions maps names to sentences; it is not a {type(captions).__name__}")
    given = dict(captions or {})
    unknown = sorted(set(given) - set(CAPTIONS), key=str)
    if unknown:
        raise ValueError(f"captions has no {unknown[0]!r}; there are {', '.join(CAPTIONS)}")
    for name, sentence in given.items():
        if not isinstance(sentence, str):
            raise TypeError(f"captions[{name!r}] is a {type(sentence).__name__}, not a string")
    return CAPTIONS | {name: storable(re.sub(r"\s+", " ", sentence)) for name, sentence in given.items()}
