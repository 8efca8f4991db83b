"""Every sentence and label of the pages, in English; ``captions=`` of a steps page replaces any of CAPTIONS.

Sentences about steps have the names of the steps; ``{scale}`` and the like are filled in. Formulas and lines of NumPy are the
same in every language: `graph` has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from selfattn.views.writing import storable

CAPTIONS: dict[str, str] = {
    "lang": "en",
    "title": "Attention, step by step",
    "tab": "",  # a short title for the page's tab
    "look": "*Look for this:* which words does each word take from? The thicker a ribbon, the larger the weight.",
    "word": "",  # the word that is marked at first
    "made up": "",  # which numbers are made up, if any
    "first": "",  # names of the sentences; empty: their words
    "second": "",
    # captions of stages
    "embeddings": "The embedding table has a row of numbers for every token.",
    "positions": "Attention does not see the order of its tokens, so every position in the sentence gets a row too.",
    "inputs": "One row of numbers for every token. This is all that attention knows about the words.",
    "model_inputs": "Embedding plus position: this goes into the first block.",
    "linear": "A linear layer computes every row by itself: no token sees another.",
    "given": "Queries, keys and values as they were passed in: what a token looks for, what it offers, what it hands over.",
    "query": "The query of a token says what it is looking for: its row of inputs, times W_query.",
    "key": "The key of a token says what it offers: its row of inputs, times W_key.",
    "value": "The value of a token is what it hands over: its row of inputs, times W_value.",
    "scores": "Row i, column j: how similar the query of token i is to the key of token j. Multiply number by number and add up.",
    "additive_scores": "Row i, column j: how similar the query of token i is to the key of token j. Add number by number, take tanh, multiply by v, and add up.",
    "scaled_scores": "Every score times the scale. Scores grow with the width of the keys; without the scale one weight would often be nearly 1.",
    "capped_scores": "Every score times the scale, then kept between -softcap and softcap by tanh.",
    "masked_scores": "Where the mask is 0 the query must not see the key: the score becomes -inf, which the softmax turns into 0.",
    "biased_scores": "First a bias is added: a float mask, or ALiBi's distances. Where the mask is 0 the query must not see the key: the score becomes -inf, which the softmax turns into 0.",
    "sink_weights": "The softmax with a sink: exp of every score, divided by the sum over its row plus exp of the sink. A row adds up to less than 1.",
    "weights": "The softmax: exp of every score, divided by the sum over its row. No weight is negative, and a row adds up to 1. A row in which everything is masked is all zeros.",
    "dropped_weights": "Dropout: keep is 0 for the weights that are dropped and 1 / (1 - p) for the others, so the expected sum stays the same.",
    "replaced_weights": "The next steps use given weights if the switch use_given is 1, and computed weights if it is 0.",
    "weighted_values": "Each query has a table: row j is the value of token j, times the query's weight for token j.",
    "output": "The output of a query is the sum of the rows in its table of weighted values: a weighted mean of all values.",
    "concatenated": "The outputs of the heads, side by side.",
    "projected_output": "One more linear layer mixes the outputs of the heads.",
    "residual": "The layer adds its input to the output: attention changes a token's numbers, but does not replace them.",
    "norm": "LayerNorm: every row minus its mean, divided by its standard deviation, then times weight plus bias.",
    "mean": "The mean over all tokens: one row of numbers for the whole sentence.",
    # headings
    "head.embeddings": "Embeddings", "head.positions": "Positions", "head.inputs": "Inputs",
    "head.model_inputs": "Inputs: embeddings plus positions",
    "head.linear": "Linear layer", "head.given": "Query, key, value", "head.query": "Queries",
    "head.key": "Keys", "head.value": "Values", "head.scores": "Scores", "head.additive_scores": "Scores",
    "head.scaled_scores": "Scaled scores", "head.masked_scores": "Masked scores",
    "head.capped_scores": "Scaled and capped scores",
    "head.biased_scores": "Masked scores", "head.sink_weights": "Weights", "head.weights": "Weights",
    "head.dropped_weights": "Weights after dropout",
    "head.replaced_weights": "Replaced weights", "head.weighted_values": "Weighted values",
    "head.output": "Output: the weighted sum", "head.concatenated": "Heads, side by side",
    "head.projected_output": "Output projection",
    "head.residual": "Residual", "head.norm": "LayerNorm", "head.mean": "Mean over the tokens",
    # labels
    "head": "head {n}", "block": "block {n}", "of query": "query {token}", "difference": "second minus first",
    "legend": "Colours of {name}:",
    "open mask": "Nothing was masked: the mask is 1 everywhere.",
    "abridged": "Abridged: {shown} of {all} rows and columns are shown; all are used to compute.",
    "abridged queries": "Abridged: shown for {shown} of {all} queries.",
    "abridged heads": "Abridged: {shown} of {all} heads are shown.",
    # the first screen
    "screen": "Attention weights of all words", "goes in": "goes in", "comes out": "comes out",
    "keeps": "{word} keeps {own} of itself and takes {parts}.",
    "takes": "{word} takes {parts}.", "part": "{weight} from {word}", "rest": "{weight} from all others",
    "given to": "From {word}: {parts}.", "taker": "{word} takes {weight}",
    "takes nothing": "{word} sees no word: its output is zeros.",
    "alone": "{word} takes only from itself: no word sees another.",
    "and": "and",
    "coming out": "Output of {word}",
    "coming out both": "Outputs of {word} and {other}",
    "most different": "Most different: number {n}, by {by}.",
    "not different": "No difference.",
    "mix": "Rings: the values of the words; a larger ring has a larger weight. Disc: the output, the weighted mean of the values.",
    "strip": "The numbers, from inputs to output",
    "strip inputs": "inputs", "strip query": "asks", "strip key": "offers", "strip value": "hands over",
    "strip mask": "1: may see", "strip scores": "Q·K × scale", "strip weights": "softmax",
    "strip output": "weights · V", "strip linear": "x · W", "strip result": "layer output",
    "open stage": "Show how {name} is computed", "as given": "given weights", "as computed": "real softmax",
    "point": "Point at a number. To change an underlined number, drag it sideways, or press + − Enter.",
    "open all": "Open all", "close all": "Close all", "tabs": "Views",
    # the guided tour
    "tour": "Guided tour",
    "tour start name": "Point at a word",
    "tour invitation": "to see which words it takes from. Change an underlined number, and the ribbons follow. Or take the tour: {n} questions.",
    "tour start": "Start the tour", "tour end": "End", "tour play": "Play", "tour guess": "Your guess",
    "tour stops": "Stops", "tour speed": "Speed of Play", "tour slow": "slow", "tour normal": "normal",
    "tour fast": "fast", "guess first": "guess first",
    # controls and messages of the script
    "previous": "Back", "play": "Play", "pause": "Pause", "next": "Next", "follow": "Follow",
    "everything": "all tokens", "go to": "Go to", "reset": "Reset", "theme": "Light or dark",
    "projector": "Projector size", "scale": "scale",
    "hint": "Point at a number, or reach it with Tab and the arrow keys, to see how it is computed. Keys: n next, b back, p play. Double-click an underlined number or press Enter to change it; click a cell of the mask to close or open it. Every matrix has its own colour scale.",
    "is given": "given",
    "can be changed": "given; double-click or press Enter to change it",
    "can be closed": "given; click or press Enter to open or close it",
    "moved": "Numbers that changed: {n}.",
    "moved most": "Numbers that changed: {n}. Most of all {name}, from {before} to {after}.",
    "was": "was {before}",
    "unmoved": "None of the shown numbers has changed.",
    "is reset": "All numbers are restored.",
    "not a number": "{text} is not a number; 2.5, -1e-3, inf and nan are.",
    "masked": "masked", "masked weight": "masked", "nothing": "no key to attend to",
    "predict": "Predict {name}", "right": "Right: {answer}",
    "wrong": "Not {guess}. Try again, or reveal.",
    "reveal": "Reveal",
    "reveal all": "Reveal all",
    "exercise": "Fill in the blanks; Enter checks your prediction.",
    "answers": "Answers",
    "terms": "{n} terms",
}  # fmt: skip

TOOLS: dict[str, str] = {"theme": "light or dark", "projector": "larger type, for a projector"}

# The explorer and the page of a GPT share these.
MODELS: dict[str, str] = {
    **TOOLS,
    "layer": "layer {layer}", "head": "layer {layer}, head {head}", "part": "{weight} from {word}",
    "takes": "{word} takes {list}", "temperature": "temperature", "top k": "top-k", "all tokens": "all",
    "rest": "{n} others", "came": "came next", "back": "Back", "step": "Step",
}  # fmt: skip

# The explorer.
EXPLORER: dict[str, str] = {
    **MODELS,
    "title": "What {heads} heads do with {word}",
    "title of one": "What 1 head does with {word}",
    "no script": "Without scripts this page shows only the habit of each head.",
    "table": "The habit of each head; ~ marks a habit with less than half of the attention.",
    "heading": "Layer {layer}, head {head}: {kind}",
    "model": "{name}, {layers} layers, {heads} heads",
    "look": "*Look for this:* in {parked} of {heads} heads most attention goes to {where}. In which heads does {word} take from a word that shows its meaning?",
    "look at one": "*Look for this:* which words does {word} take from, and how much?",
    "first token": "the first token", "separators": "separators",
    "text": "Text {text}", "text alone": "The text",
    # habits: short names, then sentences
    "kind.itself": "itself", "kind.first": "first", "kind.separators": "separator", "kind.marks": "marks",
    "kind.before": "before", "kind.after": "after", "kind.words": "words", "kind.broad": "broad",
    "kind.mixed": "mixed", "habit.itself": "the word itself", "habit.before": "the word before",
    "habit.after": "the word after",
    "means.itself": "Words take from themselves.",
    "means.first": "Words take from {where}: this head does little with this text.",
    "means.separators": "Words take from {where}: this head does little with this text.",
    "means.marks": "Words take from punctuation.",
    "means.before": "Words take from the word before them.",
    "means.after": "Words take from the word after them.",
    "means.words": "Words take from words that are not next to them, perhaps because of their meaning.",
    "means.broad": "On average words take from all words almost equally.",
    "means.mixed": "No habit has a large share of the attention.",
    "in part": "This is only {share} of the attention.",
    "exception": "Exception: {found}.",
    "shares": "Where the attention goes, on average: {list}. Entropy: {entropy} of the maximum.",
    # choosing
    "small maps": "Small maps:", "difference": "B − A", "only": "only {word}", "more in": "more in {text}",
    "above below": "A above, B below", "show only": "Show only",
    "all heads": "All heads, a row for each layer",
    "one head": "One head",
    "takes most": "{word} takes {weight} from {from} ({text})",
    "the most": "largest weight: {head}",
    "moved": "{weight} of {word}’s attention differs",
    "most different": "largest difference of A and B: {head}",
    "clearest": "{habit}: {share}",
    "the clearest": "clearest habit: {head}",
    # one head
    "goes in": "goes in", "comes out": "comes out", "ribbons": "Text {text}: attention weights", "ribbons alone": "Attention weights",
    "map": "Text {text}, {head}: a row for each query, a column for each key",
    "map alone": "{head}: a row for each query, a column for each key",
    "map of difference": "B minus A, {head}", "give": "From {word}: {list}",
    "takes from": "{word} takes {weight}",
    "point": "Point at a cell of a map, or at a word, to read its weights.",
    "cell": "{word} takes {weight} from {from}",
    # through all layers
    "way": "{word} through all layers",
    "all layers": "through all layers",
    "way means": "Attention rollout: how much of the final {word} comes from each token, layer by layer. Each layer takes half from the token itself, half from the mean of its heads.",
    "way map": "Attention rollout of {word}: rows are layers, columns are tokens",
    "way cell": "After layer {layer}: {share} of {word} comes from {from}.",
    "way cell in": "At the input: {share} of {word} comes from {from}.",
    # what comes next
    "next": "What comes next",
    "next means": "After {word} the model expects:",
    "added": "{n} of {all} added tokens",
}  # fmt: skip

# The page with a GPT in it.
GPT_TEXTS: dict[str, str] = {
    **MODELS,
    "title": "A GPT in this page",
    "no script": "A script computes this page: switch scripts on.",
    "picture": "what follows “{prompt}”",
    "size": "{parameters} parameters, {layers} layers of {heads} heads; the model runs in this page, letter by letter",
    "look": "*Look for this:* a GPT does one thing: it predicts the next letter. Type something. Then switch heads off, or change a weight: which words can it no longer spell?",
    "prompt": "Prompt",
    "unknown": "Unknown: {letters}.",
    "too long": "The model sees only the last {context} letters.",
    "write": "Continue",
    "stop": "Stop",
    "text": "The text; the model wrote the underlined letters. Choose a letter to see which letters may follow it.",
    # how a letter becomes the next
    "way": "From one letter to the next",
    "embedding": "embedding",
    "embedding means": "{letter} has a row of {width} numbers, and its position has another row: their sum goes in.",
    "part": "{weight} from …{before}{word}", "on": "on", "off": "off", "switch": "switch {head} on or off",
    "hidden": "{letter} after {place}", "next": "What comes after {letter}",
    # changing it
    "compare": "What the model writes: as trained, and now",
    "trained": "as trained",
    "now": "now",
    "same": "Both are the same. Switch a head off, or change a weight.",
    "differs": "They differ from letter {n} on.",
    "weights": "Change a weight",
    "matrix": "matrix",
    "weight map": "{name}, {rows} × {columns}: choose a weight",
    "value": "new value", "set": "Set", "zero": "Zero the row", "reset": "Reset all",
    "changed": "{weights} weights changed, {heads} heads off",
}  # fmt: skip

# The way back; for names that are not here it uses CAPTIONS.
WAY_BACK: dict[str, str] = {
    **TOOLS,
    "title": "The way back: gradients of attention",
    "tour start name": "Read from right to left",
    "tour invitation": "dO is the change that we wish for in the output. Each gradient says how much raising its number helps. Point at one, or take the tour: {n} questions.",
    "look": "*Look for this:* words with a dP above the mean should get more attention, the others less. Each row of dS adds up to 0.",
    "in": "in →",
    "back": "← back",
    "strip": "Above: forward, from left to right. Below: backward, from right to left, each gradient under its own matrix.",
    **{f"name.{name}": name for name in "xQKV"},
    "name.S": "scores", "name.P": "weights", "name.O": "output",
    **{f"gradient.{name}": f"d{name}" for name in "xQKVSPO"},
    "formula.x": "dQ·Wqᵀ + dK·Wkᵀ + dV·Wvᵀ", "formula.Q": "dS·K × scale", "formula.K": "dSᵀ·Q × scale",
    "formula.V": "Pᵀ·dO", "formula.S": "P∘(dP − mean)", "formula.P": "dO·Vᵀ", "formula.O": "the wish",
    # one number
    "now": "{place} = {value}", "gradient": "gradient", "means": "means", "nudged": "check",
    "closed": "masked", "closed means": "The mask excludes it.", "chosen": "chosen by you",
    "ways": "through Q, K and V",
    "no help": "Changing it does not change the sum of output · dO.",
    "gains": "Raise it by 0.1, and the wish gains about {gain}.",
    "loses": "Raise it by 0.1, and the wish loses about {gain}.",
    "measured": "finite difference, ±{step}: {slope}",
    "same": "✓ the same",
    # the balance of a row
    "row": "Row",
    "balance": "{word}’s row of dS: area above the line = area below",
    "empty": "There is no wish for {word}, so this row of dS is zero",
    "balance sum": "dS = weight × (dP − mean): *{sum} = 0*",
    "choose another": "Choose another word, or another wish in dO.",
    "share": "weight {share}", "says": "dP {value}", "mean": "mean",
    "picture": "{word}: {list}. Mean {mean}. The row adds up to zero.",
    "picture part": "{word} has weight {share}, dP {says}, dS {gradient}",
    "scale": "scale",
    "saturated": "one weight is nearly 1, so dS is nearly 0",
    "reset": "Reset",
    "try": "Try: drag the scale to 12. One weight comes near 1, and the areas vanish: all gradients of scores are nearly 0. Drag a number of dO to change the wish.",
    # stops
    "yes": "yes, all", "no": "no", "only": "only {word}’s", "all": "all of them", "add up": "they add up",
    "largest": "the largest counts", "stop.said": "The values",
    "ask.said": "We wish that number {column} of *{word}*’s output were larger. The output is a mean of the words’ values, weighted by attention. Which word’s V changes it most?",
    "reveal.said": "The word with the largest weight: {shares}. dV is the column of weights, times the wish.",
    "stop.shares": "The weights",
    "ask.shares": "If *{word}*’s weights could be changed freely, which one would you raise?",
    "reveal.shares": "The weight of *{most}*: its dP is the largest. dP says how much each weight helps: {said}.",
    "stop.gains": "Gain and loss",
    "ask.gains": "dP says how much each weight of *{word}* helps. Should each score grow by the dP of its weight?",
    "reveal.gains": "No: weights add up to 1. Only words with a dP above the mean, {mean}, should gain weight; the others lose: {sum} = 0.",
    "stop.asks": "Queries, keys",
    "ask.asks": "Only *{word}*’s output has a wish. Which rows of dQ are not zero?",
    "reveal.asks": "Only *{word}*’s: no other query changes its output. But dK is not zero for any word that *{word}* takes from.",
    "stop.inputs": "Back at the words",
    "ask.inputs": "x is used three times: for Q, for K and for V. How do the three gradients combine?",
    "reveal.inputs": "They add up. Point at any number of dx: its sum has three terms, and the check agrees.",
}  # fmt: skip

# The start page of a folder of pages.
START: dict[str, str] = {
    "title": "How attention works: pages to look at and to play with",
    "look": "Begin with the first page. It asks a question, you guess, and it shows the answer.",
    "all pages": "All pages", "exercise": "Exercise",
    "first_principles": "*Two banks* The same word in two sentences, first without attention, then with it. {n} questions.",
    "sentence_embeddings": "*A model that learns* Nobody marks the word that matters, and after training bank takes from it. {n} questions.",
    "basics_notebook": "*sky is blue* Two words with the same numbers, order, masks and heads. {n} questions.",
    "illustrated": "*Whole numbers* Small enough to compute by hand, with paper and pencil. {n} questions.",
    "attention_module": "*Hello I love you* What love looks for, and what a mask changes. {n} questions.",
    "explorer": "*All heads of a model* One head finds money, the other one finds water: what does each do with a sentence?",
    "gpt": "*A GPT in a page* Type, and it predicts the next letter. Then switch parts of it off.",
}  # fmt: skip


def fill(sentence: str, **values: object) -> str:
    """Replace names in braces by their values; names without a value stay.

    Examples
    --------
    >>> fill("head {n} of {m}", n=1)
    'head 1 of {m}'
    """
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), sentence)


def merged(captions: Mapping[str, str] | None) -> dict[str, str]:
    """Replace defaults by the caller's captions; the error for an unknown name lists all names."""
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
