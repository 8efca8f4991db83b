"""Guided tours: the questions and answers for the five tutorials. Every number is computed from the steps."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from selfattn.functional import softmax
from selfattn.views.language import say
from selfattn.views.writing import Array, plain_number, script_data

Change: TypeAlias = tuple[str, int, int, float]  # node, row, column, value


@dataclass(frozen=True)
class Stop:
    """One stop; in its sentences a ``*word*`` is bold, and ``{places}`` get values."""

    name: str
    ask: str
    options: tuple[str, ...]  # answers to choose from
    right: int  # the index of the right answer
    reveal: str
    view: int = 0  # the view of the page that shows the stop
    word: int = 0  # the word whose ribbons are marked
    block: str = ""  # the block that is shown, if there are several
    head: str = ""
    before: tuple[Change, ...] = ()  # changes from the question on
    after: tuple[Change, ...] = ()  # more changes from the answer on
    hide: str = ""  # hidden until the answer: "scores", "weights" or "output"
    opens: str = (
        ""  # what the stop names, which the tour shows with it: "knobs", "strip" or "details" and a stage
    )
    stage: int = 0  # how many stages the way back shows
    when: bool = True  # whether what it says is so: else the tour leaves it out


def tour_data(stops: Sequence[Stop], homes: Sequence[tuple[int, str]] = ()) -> str:
    """Return the tour of each page as a script element that lesson.js reads.

    ``homes`` are the first views and titles of joined pages.
    """
    firsts = [first for first, _ in homes or ((0, ""),)]
    tours = [
        {"first": first, "name": name, "stops": [asdict(s) for s in stops if bisect(firsts, s.view) == n]}
        for n, (first, name) in enumerate(homes or ((0, ""),), 1)
    ]
    return script_data(tours, "sa-tour-data")


def say_stops(lang: str, *stops: Stop, **values: Any) -> list[Stop]:
    """Say the stops of a tour in a language, with values in their places.

    Numbers have two decimals; other values are as they are.

    Stops whose sentences are not so, for the numbers of this page, are left out.
    """
    plain = {
        name: plain_number(float(x)) if isinstance(x, float | np.floating) else x
        for name, x in values.items()
    }

    def in_lang(sentence: str) -> str:
        return say(sentence, lang, **plain)

    return [
        replace(
            stop,
            name=in_lang(stop.name),
            ask=in_lang(stop.ask),
            reveal=in_lang(stop.reveal),
            options=tuple(map(in_lang, stop.options)),
            when=True,
        )
        for stop in stops
        if stop.when
    ]


STEEP = 8.0  # a scale that makes one weight nearly 1
HARDLY = 0.05  # a smaller difference of two outputs is hardly one


def argmax(row: Array) -> int:
    """Return the index of the largest number."""
    return int(np.argmax(row))


def cosine(a: Array, b: Array) -> float:
    """Return the cosine of the angle between two rows."""
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def first_principles(
    raw: Callable[[list[str]], Any],
    layer: Callable[[list[str]], Any],
    drawn: Callable[[list[str]], Any],
    weight: Array,
    texts: Sequence[list[str]],
    lang: str,
) -> list[Stop]:
    """*bank* by the river and in finance: without attention, with given matrices, with random matrices."""
    river, finance = texts
    a, b, projected = raw(river), raw(finance), layer(river)
    bank = river.index("bank")
    alone = raw(river).query[bank] @ weight
    largest = argmax(np.abs(a.output[bank] - b.output[bank]))
    order = argmax(a.weights[bank])
    bare = softmax(projected.scores[bank])
    random = drawn(river).output[:, 0]
    kept = a.weights[bank][bank]
    near, gains = b.key[[0, 2]], b.output[bank] - a.output[bank]
    sharp = softmax(projected.scores[bank] * STEEP)
    taken = {word: plain_number(w) for word, w in zip(river, a.weights[bank], strict=True)}
    return say_stops(
        lang,
        Stop(
            "Same going in",
            "A linear layer comes first. *bank* goes in with the same numbers by the river and in "
            "finance. Will the two outputs of *bank* differ?",
            ("yes", "no, they are the same"),
            1,
            "No, they are {alone} both times. Every ribbon runs straight across: no word attends to another.",
            view=0,
            word=bank,
            hide="output",
        ),
        Stop(
            "Attention",
            "Now every word attends to all words, with weights that add up to 1. To which word does "
            "*bank* attend most in the river sentence?",
            tuple("bank itself" if word == "bank" else word for word in river),
            order,
            "To itself, with weight {kept}. But {stream} of its output is *stream* and {mud} is *mud*.",
            view=1,
            word=bank,
            hide="weights",
            when=order == bank,
        ),
        Stop(
            "Two banks",
            "In finance the neighbours are *money* and *loan*, whose number 1 is large. Which number in "
            "the output of *bank* is larger in finance than by the river?",
            ("number 0", "number 1", "number 2"),
            largest,
            "Number {largest}: {before} became {after}, while number 0 fell from {zero} to {zero_after}. "
            "The same input has two outputs.",
            view=1,
            word=bank,
            hide="output",
            when=largest == 1
            and np.flatnonzero(gains > 0).tolist() == [1]
            and bool((near[:, 1] > np.delete(near, 1, 1).max()).all()),
        ),
        Stop(
            "Query, key, value",
            "Three matrices give every word a query (Q), a key (K) and a value (V). Which of them decide how "
            "thick the ribbons are?",
            ("Q and K", "K and V", "all three"),
            0,
            "Q and K. V does not change the weights. Try it below: change a number of W_value, "
            "and no ribbon changes.",
            view=2,
            word=bank,
            opens="details value",
        ),
        Stop(
            "Take the scale away",
            "The scores are divided by √2. Without that, will *bank* attend more to itself, or less?",
            ("more", "less"),
            0,
            "More: {scaled} became {bare} by the river. Larger scores give the largest score more weight. "
            "Move the scale to 0 (all weights are equal), then to 8 (the weight is {sharp}).",
            view=2,
            word=bank,
            opens="knobs",
            after=(("scale", 0, 0, 1.0),),
            when=argmax(projected.scores[bank]) == bank
            and plain_number(bare[bank]) > plain_number(projected.weights[bank][bank]),
        ),
        Stop(
            "Without training",
            "Now the same layer has random matrices. Will the outputs of *stream*, *bank* and *mud* differ clearly?",
            ("clearly", "hardly"),
            1,
            "Hardly: their first numbers are {first}, {second} and {third}. The weights of *bank* for "
            "*stream*, {untaught}, and for *mud*, {unmeant}, mean nothing: only training gives them a "
            "meaning.",
            view=3,
            word=bank,
            hide="weights",
            when=float(np.ptp(random)) < HARDLY,
        ),
        alone=", ".join(plain_number(x) for x in alone),
        kept=kept,
        stream=taken["stream"],
        mud=taken["mud"],
        largest=largest,
        before=a.output[bank][largest],
        after=b.output[bank][largest],
        zero=a.output[bank][0],
        zero_after=b.output[bank][0],
        scaled=projected.weights[bank][bank],
        bare=bare[bank],
        sharp=sharp[bank],
        untaught=drawn(river).weights[bank][0],
        unmeant=drawn(river).weights[bank][2],
        first=plain_number(random[0], 3),
        second=plain_number(random[1], 3),
        third=plain_number(random[2], 3),
    )


def sentence_embeddings(
    steps: Mapping[str, Callable[[list[str]], Any]], texts: Sequence[list[str]], lang: str
) -> list[Stop]:
    """Show a block before and after training, and one with two heads."""
    block = {name: [make(words).blocks[0] for words in texts] for name, make in steps.items()}
    bank, tell = texts[0].index("bank"), len(texts[0]) - 1
    water, money = (words[tell] for words in texts)
    before, after = ([b.weights[bank][tell] for b in block[name]] for name in ("untrained", "trained"))
    trained = block["trained"]
    steep = softmax(trained[0].scores[bank] * STEEP)
    same = cosine(trained[0].inputs[bank], trained[1].inputs[bank])
    apart = cosine(trained[0].result[bank], trained[1].result[bank])
    heads = [b.weights[:, bank] for b in block["two_heads"]]  # for each text (heads, words)
    parked = argmax(heads[0][0])
    return say_stops(
        lang,
        Stop(
            "Before training",
            "All numbers are still random. Does *bank* know that *{water}* and *{money}* matter more than *and*?",
            ("yes", "no"),
            1,
            "No: its weights are {before_water} for *{water}* and {before_money} for *{money}*, not much more "
            "than for other words.",
            view=0,
            word=bank,
            hide="weights",
            when=max(before) < 1.5 / len(texts[0]),
        ),
        Stop(
            "After training",
            "Now 600 steps of training have passed. Which word does *bank* attend to most in “{text}”?",
            ("bank itself", "the", water),
            2,
            "To *{water}*: {of_water}, and in the other sentence {of_money} to *{money}*.",
            view=1,
            word=bank,
            hide="weights",
            when=all(argmax(b.weights[bank]) == tell for b in trained),
        ),
        Stop(
            "How does it know?",
            "How does the model know that *{water}* and *{money}* are the words that matter?",
            ("a dictionary says so", "someone marked them", "from the similarity of sentences"),
            2,
            "Training only showed the model triplets: two sentences that belong together and one that "
            "does not. To tell them apart, the model had to find the words that show the topic.",
            view=1,
            word=bank,
        ),
        Stop(
            "Two banks",
            "*bank* goes in with the same numbers twice. How similar are the two outputs of the block?",
            ("the same", "a little different", "in opposite ways"),
            2,
            "Their cosine similarity was {same} at the input; it is {apart} at the output: roughly "
            "opposite. See the last matrix of the strip.",
            view=1,
            word=bank,
            opens="strip",
            hide="output",
            when=same > 0.995 and apart < -0.5,
        ),
        Stop(
            "Pick the best",
            "The interior designer in the tutorial chooses only the best match; attention computes a weighted "
            "mean of all. With a larger scale attention does almost the same. How large is the weight of "
            "*bank* for *{water}* with a scale of 8?",
            ("{of_water} as before", "nearly 1", "0"),
            1,
            "Nearly 1: {steep}. But these weights hardly change if a score changes a little, so the gradient "
            "is nearly 0. That is why attention computes a weighted mean.",
            view=1,
            word=bank,
            after=(("scale", 0, 0, STEEP),),
            when=steep[tell] > 0.9 > after[0],
        ),
        Stop(
            "Two heads",
            "In head 0 the weight for *{money}* is {head0_money} in one sentence. What does this head do in "
            "the sentence with *{water}*?",
            ("attends to {water}", "attends to “{parked}”", "attends equally to all"),
            1,
            "Its weight for “{parked}” is {on_parked}, and for *{water}* only {head0_water}: the weights of a "
            "head add up to 1 even if it finds nothing.",
            view=2,
            word=bank,
            head="0",
            hide="weights",
            when=parked not in (tell, bank) and argmax(heads[1][0]) == tell,
        ),
        Stop(
            "The other head",
            "And head 1: which word does it find?",
            (water, money),
            0,
            "*{water}*: its weight is {head1_water}, and that of *{money}* {head1_money}. Together the heads "
            "find both topics.",
            view=2,
            word=bank,
            head="1",
            hide="weights",
            when=argmax(heads[0][1]) == tell == argmax(heads[1][0]) and heads[0][1][tell] > heads[1][1][tell],
        ),
        water=water,
        money=money,
        text=" ".join(texts[0]),
        parked=texts[0][parked],
        before_water=before[0],
        before_money=before[1],
        of_water=after[0],
        of_money=after[1],
        same=same,
        apart=apart,
        steep=steep[tell],
        on_parked=heads[0][0][parked],
        head0_water=heads[0][0][tell],
        head0_money=heads[1][0][tell],
        head1_water=heads[0][1][tell],
        head1_money=heads[1][1][tell],
    )


def basics_notebook(steps: Callable[..., Any], words: list[str], lang: str) -> list[Stop]:
    """*sky is blue*: twins, the softmax, masks, order, heads."""
    one, two = steps(words), steps(words, 2)
    sky, blue = 0, 2
    row, score = one.weights[sky], one.scaled_scores[sky][sky]
    closed = row * [1, 1, 0] / (row[0] + row[1])
    sharp = softmax(one.scores[sky] * STEEP)
    x = one.inputs
    turned: tuple[Change, ...] = tuple(
        ("inputs", i, c, float(x[j, c])) for i, j in ((sky, blue), (blue, sky)) for c in range(x.shape[1])
    )
    twins = np.array_equal(x[1], x[2])
    kept = [two.weights[h][sky][sky] for h in range(2)]
    return say_stops(
        lang,
        Stop(
            "Twins",
            "*is* and *blue* go in with the same numbers. From which step on do their rows differ?",
            ("from Q and K on", "from the weights on", "nowhere"),
            2,
            "Nowhere. Attention knows a word by its numbers alone: equal rows have equal outputs.",
            word=blue,
            when=twins,
        ),
        Stop(
            "Below zero",
            "*sky*'s score with itself is {score}: below zero. Is its weight for itself 0?",
            ("yes", "no"),
            1,
            "No: {sky}. The softmax takes exp of every score, which is never 0; only the differences "
            "between scores matter.",
            word=sky,
            hide="weights",
            when=score < -0.005,
        ),
        Stop(
            "The sum stays 1",
            "Now *sky* may not attend to *blue* any more. Which words get that weight?",
            ("sky alone", "is alone", "both, in proportion"),
            2,
            "Both, in proportion: {sky} became {sky_closed}, and {twin} became {is_closed}. A row adds up "
            "to 1 again. (It is a cell of the mask, in the stage *Masked scores* below.)",
            word=sky,
            opens="details masked_scores",
            after=(("mask", sky, blue, 0.0),),
        ),
        Stop(
            "Nearly equal",
            "The weights of *sky* are {row}: nearly equal. Can a larger scale give one word nearly all the weight?",
            ("yes", "only the twins together", "no, nothing changes"),
            1,
            "At a scale of {steep} they are {sharp}: the weight of *sky* falls, but *is* and *blue* stay "
            "equal. No scale gives equal words different weights.",
            word=sky,
            after=(("scale", 0, 0, STEEP),),
            when=twins and float(np.ptp(row)) < 0.1 and sharp[sky] < row[sky],
        ),
        Stop(
            "Swap the words",
            "Let *sky* and *blue* change places: their numbers are swapped. What happens to the output?",
            ("its rows are swapped too", "every number changes"),
            0,
            "The rows of the output are swapped too: {output} is now the third row. Attention alone does "
            "not know the order of words.",
            word=blue,
            after=turned,
        ),
        Stop(
            "Two heads",
            "Split the two columns between two heads. Will *sky* have the same weight for itself in both?",
            ("yes", "no"),
            1,
            "No: in head 0 it is {head0}, in head 1 only {head1}. A single head adds up the products of both "
            "columns before the softmax, so the larger column decides.",
            view=1,
            word=sky,
            head="0",
            hide="weights",
            when=plain_number(kept[0]) > plain_number(kept[1]),
        ),
        score=score,
        sky=row[0],
        twin=row[1],
        sky_closed=closed[0],
        is_closed=closed[1],
        row=", ".join(map(plain_number, row)),
        steep=f"{STEEP:.0f}",
        sharp=", ".join(map(plain_number, sharp)),
        output=", ".join(plain_number(v, 4) for v in one.output[sky]),
        head0=kept[0],
        head1=kept[1],
    )


def illustrated(steps: Callable[..., Any], rounded: Any, lang: str) -> list[Stop]:
    """Whole numbers by hand, and the effect of rounded weights."""
    real = steps()
    scaled = steps(scale=1 / np.sqrt(3))
    q, k, s = (array.astype(int) for array in (real.query, real.key, real.scores))
    written = [", ".join(map(str, row)) for row in (s[0], q[0], k.sum(axis=1))]
    factor = round(float(np.exp(s[1, 1] - s[1, 2])))
    by = np.abs(real.output - rounded.output).max(axis=1)
    worst = argmax(by)
    column = argmax(np.abs(real.output - rounded.output)[worst])
    softmax: tuple[Change, ...] = (("use_given", 0, 0, 0.0),)
    return say_stops(
        lang,
        Stop(
            "By hand",
            "The query of *input 1* is ({query}). Multiply it with the three keys, number by number, and "
            "add up. Which scores are right?",
            tuple(written),
            0,
            "{scores}: for the first key {sum}. Up to here all numbers are whole.",
            word=0,
            before=softmax,
            hide="scores",
            when=len(set(written)) == 3 and np.array_equal(s, real.scores),
        ),
        Stop(
            "Four more",
            "*input 2* has the scores {own} with itself and {other} with *input 3*. How many times as "
            "large is its weight for itself?",
            (plain_number(s[1, 1] / s[1, 2], 1), str(s[1, 1] - s[1, 2]), str(factor)),
            2,
            "About {factor} times: exp of the difference, {difference}. The weights are {own_weight} and "
            "{other_weight}. The softmax turns differences into factors.",
            word=1,
            before=softmax,
            hide="weights",
            when=2 <= s[1, 1] - s[1, 2] < 8 and s[1, 2] > 0,
        ),
        Stop(
            "Long keys",
            "All inputs attend most to *input 2*. Why?",
            ("its value is large", "its key is long", "it is in the middle"),
            1,
            "Its key is ({key}), the longest: every query in roughly its direction has a large product "
            "with it. Its value does not change the weights.",
            word=0,
            before=softmax,
            when=argmax(np.linalg.norm(k, axis=1)) == 1 and bool((real.weights.argmax(axis=1) == 1).all()),
        ),
        Stop(
            "Scale",
            "The tutorial does not scale. Divide the scores by √3: what becomes of *input 2*'s weight for "
            "itself, {large}?",
            (plain_number(real.weights[1, 1]), plain_number(scaled.weights[1, 1]), "0.50"),
            1,
            "{soft}: smaller scores have more equal weights.",
            word=1,
            before=softmax,
            after=(("scale", 0, 0, float(1 / np.sqrt(3))),),
            when="0.50" < plain_number(scaled.weights[1, 1]) < plain_number(real.weights[1, 1]),
        ),
        Stop(
            "Rounded by hand",
            "To keep the sums short the author rounds the weights by hand. Which output changes most?",
            ("input 1", "input 2", "input 3"),
            worst,
            "*input {worst}*'s: {exact} became {rounded}. Its small weight of {small} was set to 0.",
            word=worst,
            before=softmax,
            after=(("use_given", 0, 0, 1.0),),
            when=rounded.dropped_weights[worst, 0] == 0 < real.weights[worst, 0] < 0.1,
        ),
        Stop(
            "The switch",
            "With the weights rounded as printed, change a number of x. Will the ribbons follow?",
            ("yes", "no"),
            1,
            "No: the rounded weights are given, so only V changes. Now the switch is at *real softmax*, "
            "and every edit changes the output.",
            word=0,
            opens="knobs strip",
            after=softmax,
        ),
        query=", ".join(map(str, q[0])),
        scores=written[0],
        key=", ".join(map(str, k[1])),
        sum=f"{' + '.join(f'{a}·{b}' for a, b in zip(q[0], k[0], strict=True))} = {s[0, 0]}",
        own=s[1, 1],
        other=s[1, 2],
        factor=factor,
        difference=s[1, 1] - s[1, 2],
        own_weight=plain_number(real.weights[1, 1], 3),
        other_weight=plain_number(real.weights[1, 2], 3),
        large=real.weights[1, 1],
        soft=scaled.weights[1, 1],
        worst=worst + 1,
        exact=real.output[worst, column],
        rounded=plain_number(rounded.output[worst, column], 1),
        small=real.weights[worst, 0],
    )


def attention_module(steps: Callable[..., Any], tokens: list[str], lang: str) -> list[Stop]:
    """*Hello I love you*: what *love* attends to, masks, and rows without keys."""
    plain, masked = steps(tokens), steps(tokens, True)
    love = tokens.index("love")
    first, second = plain.weights[:, love]
    after = masked.weights[0, love]
    return say_stops(
        lang,
        Stop(
            "What does love attend to?",
            "Which words will *love* attend to most?",
            ("Hello", "I and you", "love itself"),
            1,
            "{of_i} to *I*, {of_you} to *you* and {of_hello} to *Hello*, as the tutorial says.",
            word=love,
            head="0",
            hide="weights",
            when=bool(min(first[1], first[3]) > max(first[0], first[2])),
        ),
        Stop(
            "Why?",
            "The query of *love* is ({query}): a large number for *person*. What decides which words *love* "
            "attends to?",
            ("its query and their keys", "its own key", "the values"),
            0,
            "The query of *love* and the keys of all words: those of *I* and *you* have a 2 for person, that "
            "of *Hello* only 0.5. The values do not matter for this: here each word has a 1 in its own "
            "column.",
            word=love,
            head="0",
            when=[*plain.key[0, [1, 3, 0], 0]] == [2, 2, 0.5]
            and argmax(plain.query[0, love]) == 0
            and np.array_equal(plain.value[0], np.eye(len(tokens))),
        ),
        Stop(
            "Another head",
            "Head 1 has the same keys, but other queries. Which word will *love* attend to most there?",
            tuple(tokens),
            argmax(second),
            "To *{word}*: {of_word}. Each head has its own softmax, so a word can attend to several things at "
            "once.",
            word=love,
            head="1",
            hide="weights",
        ),
        Stop(
            "A mask",
            "Shorter sentences of a batch are padded. Suppose that the last word is padding: its column "
            "of the mask is 0. Which words still attend to the last word?",
            ("none", "only itself", "those whose weight was large"),
            0,
            "None: its scores become −∞ before the softmax, and exp(−∞) is 0. Even the last word itself "
            "attends only to the others.",
            view=1,
            word=love,
            head="0",
            hide="weights",
        ),
        Stop(
            "Still 1",
            "The weight of *love* for the last word was {of_you}. Where does it go?",
            ("it is lost", "to Hello", "to the others, in proportion"),
            2,
            "To the others, in proportion: {of_i} for *I* became {more}. The mask acts before the "
            "softmax, so the row adds up to 1.",
            view=1,
            word=love,
            head="0",
            hide="weights",
        ),
        Stop(
            "All masked",
            "Now mask the whole row of *love*: *love* may attend to no word. What is its output?",
            ("NaN", "the mean of all", "zeros"),
            2,
            "Zeros: there is no key to attend to. (The tutorial fills in −1e9 instead of −∞, and such a "
            "row attends equally to all words, without an error.)",
            view=1,
            word=love,
            head="0",
            after=tuple(("mask.0", love, j, 0.0) for j in range(len(tokens))),
        ),
        query=", ".join(f"{x:g}" for x in plain.query[0, love]),
        of_hello=first[0],
        of_i=first[1],
        of_you=first[3],
        word=tokens[argmax(second)],
        of_word=second[argmax(second)],
        more=after[1],
    )
