# %% [markdown]
# # 7. A classifier that shows what it attends to
#
# Is a review kind or unkind? Counting good and bad words is not enough: *not good* is unkind, and *not bad at all* is
# kind. A model must find out which *not* belongs to which word. This one has a token that attends to the whole
# sentence, and we look at its weights.
#
# *To run it:* `jupyter lab notebooks` in the folder of the clone ([what it needs](README.md)); Shift+Enter
# runs a cell.
#
# ## What to see
#
# The thickness of a ribbon is an attention weight. In these numbers, made by hand, *lovely* takes a third of its
# output from *not*, and so it differs from a *lovely* without *not*. Will training find such numbers by itself?

# %%
import selfattn as sa

x = [[0, 0], [0, 1], [0, 0], [2, 0], [2, 1]]
sa.views.steps_page(sa.attention_steps(x, x, x), "the music was not lovely".split())

# %% [markdown]
# ## The reviews
#
# The reviews are made up by a few lines of Python, so the right answer is known, and so are **the words that decide**.

# %%
import numpy as np

THINGS = "food music room weather film book".split()
KIND, UNKIND = "good lovely great warm".split(), "bad awful dull cold".split()
ASIDE = "to be honest", "as ever", "my friends said", "in the end"


def review(rng):
    """Return words and the answer: 1 is kind. One thing is judged, or two joined by 'but', of which the last counts."""
    def judged():
        word, negated = rng.choice(KIND + UNKIND), rng.random() < 0.5
        verdict = int((word in KIND) != negated)
        return f"the {rng.choice(THINGS)} was {'not ' if negated else ''}{word}".split(), verdict

    words, verdict = judged()
    if rng.random() < 0.5:  # what comes after "but" counts
        other, _ = judged()
        words = [*other, "but", *words]
    if rng.random() < 0.5:
        words = [*rng.choice(ASIDE).split(), *words]
    return words, verdict


rng = np.random.default_rng(0)
for _ in range(4):
    words, verdict = review(rng)
    print("kind  " if verdict else "unkind", " ".join(words))

# %% [markdown]
# ## The model
#
# Embeddings of words and places, two layers of a Transformer, and a linear layer from the first row, that of a token
# `<review>` before every sentence, to two scores. Shorter reviews are filled up; `key_lengths` says how many tokens
# there are, and the rest is closed. The parts of our own are modules with a `forward` in PyTorch's names:
# `selfattn.tape` records what it computes, and so has the gradients
# ([From scratch](../docs/guide/from_scratch.md)).

# %%
import selfattn.tape as torch
from selfattn import nn, optim

torch.set_default_dtype(torch.float64)
SENTENCES = [review(np.random.default_rng(n))[0] for n in range(500)]
vocabulary = ["<review>", *sorted({word for words in SENTENCES for word in words})]
number = {word: n for n, word in enumerate(vocabulary)}
LONGEST = 1 + max(len(words) for words in SENTENCES)


def batch_of(reviews):
    """Return ids (n, LONGEST), how many tokens exist, and the answers."""
    ids, lengths = np.zeros((len(reviews), LONGEST), int), []
    for row, (words, _) in zip(ids, reviews, strict=True):
        row[1 : len(words) + 1] = [number[word] for word in words]
        lengths.append(len(words) + 1)
    return ids, np.array(lengths), np.array([verdict for _, verdict in reviews])


class Tokens(torch.nn.Module):
    """A row for each token: that of its word plus that of its place."""

    def __init__(self, width):
        super().__init__()
        self.words = torch.nn.Embedding(len(vocabulary), width)
        self.places = torch.nn.Embedding(LONGEST, width)

    def forward(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.size(-1)))


class Verdict(torch.nn.Module):
    """Two scores for a review, from its first row."""

    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, 2)

    def forward(self, rows):
        return self.linear(rows[:, 0])


def classifier(width, seed):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(
        width, nhead=2, dim_feedforward=2 * width, dropout=0.0, batch_first=True, norm_first=True,
        dtype=np.float64, rng=seed,
    )
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width, dtype=np.float64))
    return nn.Sequential(Tokens(width), encoder, Verdict(width))


# %% [markdown]
# ## Training
#
# Cross-entropy compares the scores with the answers. `loss.vjp` gives the first gradient, and the model's pullback
# computes those of all parameters from it.

# %%
model = classifier(32, seed=8)
loss = nn.CrossEntropyLoss(dtype=np.float64)
optimizer = optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for step in range(250):
    ids, lengths, verdicts = batch_of([review(rng) for _ in range(32)])
    scores, pullback = model.vjp(ids, key_lengths=lengths)
    value, loss_back = loss.vjp(scores, verdicts)
    optimizer.lr = 3e-3 * (1 - step / 250)
    optimizer.step(pullback(loss_back(1.0)))
    losses.append(float(value))
    if step % 50 == 0 or step == 249:
        right = (scores.argmax(axis=-1) == verdicts).mean()
        print(f"step {step:3d}: loss {value:.2f}, {right:4.0%} of the batch right")

test = [review(np.random.default_rng(10_000 + n)) for n in range(500)]
ids, lengths, verdicts = batch_of(test)
right = (model(ids, key_lengths=lengths).argmax(axis=-1) == verdicts).mean()
by_words = np.array([sum((w in KIND) - (w in UNKIND) for w in words) > 0 for words, _ in test])
print(f"\n500 new reviews: {right:.0%} right; counting good and bad words, {(by_words == verdicts).mean():.0%}")

# %% [markdown]
# ## What it attends to
#
# The attention of both layers, for the token `<review>` and for the word of praise or blame. A bar of ten marks is a
# weight of 1.


# %%
def weights_of(words):
    """Return the weights (layers, heads, queries, keys) between the tokens of a review."""
    embeddings, encoder, _ = model
    x = embeddings(torch.tensor([0, *(number[word] for word in words)])).detach().numpy()
    found = []
    for layer in encoder.layers:
        n = layer.norm1(x)
        found.append(layer.self_attn(n, n, n, average_attn_weights=False)[1])
        x = layer(x)
    return np.stack(found)


def show(words, query):
    """Print where a token looks: a line for each token, a column for each head of each layer."""
    weights = weights_of(words)
    tokens = ["<review>", *words]
    at = tokens.index(query)
    print(f"where {query!r} looks   " + "  ".join(f"layer {k} head {h}" for k, h in np.ndindex(2, 2)))
    for n, token in enumerate(tokens):
        cells = [weights[k, h, at, n] for k, h in np.ndindex(2, 2)]
        print(f"  {token:18}", "  ".join(f"{'#' * round(10 * w):10}{w:4.2f}" for w in cells))


words = "the food was good but the music was not lovely".split()
ids, lengths, _ = batch_of([(words, 0)])
print("the model says:", ["unkind", "kind"][model(ids, key_lengths=lengths).argmax()], "\n")
show(words, "<review>")
print()
show(words, "lovely")

# %% [markdown]
# ### Do these weights matter?
#
# A weight says what a token *attends to*, not what that changes. The honest test is to change the sentence: replace a
# word or leave it out, and see how much the score changes.

# %%
def kindness(words):
    """Return the score for kind less that for unkind."""
    ids, lengths, _ = batch_of([(words, 0)])
    scores = model(ids, key_lengths=lengths)[0]
    return scores[1] - scores[0]


whole = kindness(words)
print(f"kindness of the whole review: {whole:+.1f}")
changed = {}
for word, other in [("food", "room"), ("good", "awful"), ("music", "film"), ("not", ""), ("lovely", "dull")]:
    changed[word] = kindness([w for w in (other if w == word else w for w in words) if w])
    how = f"{other} for {word}" if other else f"without {word}"
    print(f"  {how:16} {changed[word]:+6.1f}   moved by {changed[word] - whole:+5.1f}")

# %% [markdown]
# Without *not*, or with another word after it, the predicted class is the opposite. The words about the food change
# little, though layer 0 attends to their *was*: what comes before *but* does not count.
#
# *Your turn:*
#
# - Leave out the places (`self.places`). Which reviews does the model get wrong now, and why?
# - Use one head, or one layer. Is that enough for *not*, and for *but*?
# - Give `review` sentences with two *not*: *not not good*. What must layer 1 do?
#
# Next: [what is this head for?](../models/notebooks/8_heads.ipynb)
