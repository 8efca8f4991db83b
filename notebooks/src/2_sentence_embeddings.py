# %% [markdown]
# # 2. The designer, the block, and a model that learns
#
# You have read *LLMs: Self Attention*. It begins with an interior designer who places a television, a lamp, a recliner
# and a bed, turns that into a layer, and ends with a model that maps sentences to vectors and is trained on triplets.
#
# The tutorial prints no tensors. Here every part is computed twice: by `selfattn`, and by a few plain lines of NumPy
# that say what it is. One step past the tutorial, the notebook asks
#
# - what is lost when the designer **picks the best** instead of taking the **weighted sum**, and
# - what a model of 500 numbers learns in a second or two: **what does its *bank* attend to?**
#
# *To run it:* `jupyter lab notebooks` in the folder of the clone ([what it needs](README.md)); Shift+Enter
# runs a cell.
#
# ## What to see
#
# The page shows such a model before and after its training. The thickness of a ribbon is an attention weight. Which
# word does *bank* attend to in each sentence? The tour asks you first, and then shows the answer.

# %%
from selfattn.views import tutorial_page

tutorial_page(2)

# %% [markdown]
# ## The tutorial's lines, on this package
#
# `selfattn.tape` has PyTorch's names, over NumPy: a block of one's own needs a `forward` alone, and `loss.backward()`
# computes the gradients ([From scratch](../docs/guide/from_scratch.md)). Here the tutorial's block and its loss,
# trained on one triplet of sentences. The rest of the notebook computes with arrays, where every step can be seen.

# %%
import selfattn.tape as torch
import selfattn.tape.nn as nn


class SelfAttentionBlock(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))
        self.ln = nn.LayerNorm(d_model)

    def forward(self, x):
        scores = torch.matmul(self.query(x), self.key(x).T) / x.size(-1) ** 0.5
        return self.ln(torch.matmul(torch.softmax(scores, dim=-1), self.value(x)) + x)


torch.manual_seed(0)
words = "tom chase jerry likes cheese harry killed voldemort".split()
model = nn.Sequential(nn.Embedding(len(words), 8), SelfAttentionBlock(8))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(4):
    main, similar, non_similar = (
        model(torch.tensor([words.index(word) for word in sentence.split()])).mean(dim=0)
        for sentence in ("tom chase jerry", "jerry likes cheese", "harry killed voldemort")
    )
    near, far = torch.dot(main, similar), torch.dot(main, non_similar)
    loss = -(torch.log(torch.sigmoid(near)) + torch.log(torch.sigmoid(-far)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"Step [{step + 1}/4], Loss: {loss.item():.4f}")

# %% [markdown]
# ## The designer
#
# Four things have to find their places. Each one writes down three lists:
#
# - its **query**: how much does it look for a picture, for light, for comfort?
# - its **key**: how much picture, light, comfort does it bring?
# - its **value**: the place for an item that wants what this one brings, in metres from the corner of the room.
#
# The recliner looks for a picture, and for some light to read by. The bed would like light, and a bit of a picture.

# %%
import numpy as np

import selfattn as sa

np.set_printoptions(precision=3, suppress=True)
items = ["television", "lamp", "recliner", "bed"]
#                  picture light comfort
query = np.array([[0.0, 0.5, 3.0],   # television: wants to be watched from something comfortable
                  [0.0, 0.0, 2.0],   # lamp: somebody who reads
                  [2.0, 1.5, 0.0],   # recliner
                  [1.0, 2.0, 0.0]])  # bed
key = np.array([[3.0, 0.5, 0.0],
                [0.0, 3.0, 0.0],
                [0.0, 0.0, 3.0],
                [0.0, 0.0, 2.0]])
value = np.array([[1.0, 2.0],   # in front of the television
                  [4.0, 3.0],   # next to the lamp
                  [3.0, 1.0],   # by the recliner
                  [5.0, 4.0]])  # by the bed

mixed = sa.attention_steps(query, key, value)
print("affinities, query @ key.T / sqrt(3)")
for item, row in zip(items, mixed.scaled_scores, strict=True):
    words = ["low" if s < 1 else "medium" if s < 3 else "high" for s in row]
    print(f"  {item:10}", "  ".join(f"{s:4.1f} {word:6}" for s, word in zip(row, words, strict=True)))

# %% [markdown]
# ### Picking the best, and taking the weighted sum
#
# The designer picks, for each item, the highest affinity in its row (`argmax`) and goes where that one says. Attention
# puts the same affinities through a softmax and goes to the weighted mean of all places.
#
# A pick is a weighted sum, too: with one weight 1 and the others 0. `with_weights` continues from given weights, so we
# can compare both.

# %%
best = mixed.weights == mixed.weights.max(axis=-1, keepdims=True)
picked = mixed.with_weights(best)
print("            picks          at          weighted sum at   weights")
for n, item in enumerate(items):
    chosen = items[best[n].argmax()]
    print(f"{item:10}  {chosen:10}  {picked.output[n]}      {mixed.output[n]}     {mixed.weights[n]}")

# %% [markdown]
# Where one affinity is much larger than the others, as for the television, the two nearly agree. The recliner is the
# interesting one: it picks the television and is placed right in front of it. In the weighted sum the lamp counts too,
# and moves the chair a bit towards it.
#
# ### A pick jumps, a sum slides
#
# Let the recliner care more and more for light:

# %%
wish = np.array(query)
print("wish for light   pick                    weighted sum")
for light in (0.0, 1.0, 1.5, 1.9, 2.0, 2.1, 2.5, 3.0, 4.0):
    wish[2, 1] = light
    steps = sa.attention_steps(wish, key, value)
    chosen = steps.weights[2].argmax()
    print(f"{light:14.1f}   {items[chosen]:10} {value[chosen]}   {steps.output[2]}")

# %% [markdown]
# Up to some point the pick does not move at all, and then it jumps across the room. So a pick does not say *in which
# direction* to change the query: its gradient is zero nearly everywhere. The weighted sum moves all the way, and
# training follows its slope. The gradient of the recliner's place along x (towards the lamp) with respect to its
# query:

# %%
place, pullback = sa.scaled_dot_product_attention_vjp(query, key, value)
along_x = np.zeros_like(place)
along_x[2, 0] = 1.0
slope = pullback(along_x).query[2]
print("weighted sum: ", slope, "<- less picture, more light")

tiny = 1e-6  # and by trying out, as it is done for a function that nobody can differentiate
tried = []
for column in range(3):
    nudged = np.array(query)
    nudged[2, column] += tiny
    tried.append((value[(nudged @ key.T)[2].argmax()] - value[(query @ key.T)[2].argmax()])[0] / tiny)
print("pick:         ", np.array(tried), "<- no idea")

# %% [markdown]
# What about a very large scale? `sa.attention_steps(query, key, value, scale=100.0)` turns the sum back into a pick.
# [Notebook 1](1_first_principles.ipynb) follows that thought. Here are all steps of the weighted sum; on the page you
# can be the designer and change a wish.

# %%
from selfattn.views import steps_page

steps_page(mixed, items)

# %% [markdown]
# ## The block
#
# The layer of the tutorial makes queries, keys and values with three Linears from the same `x`, attends with scale
# $1/\sqrt{d}$, adds the input again (*residual*) and normalises each row (`ln`). There is no feed-forward part.
#
# `nn.SelfAttentionBlock` is that layer: `block(x)` is the result, and `block.steps(x)` holds everything on the way. A
# Linear holds `weight` with shape (out, in), so its plain line is `x @ weight.T + bias`. Each output is printed
# twice: by `selfattn`, and by the plain lines.

# %%
from selfattn import nn


def softmax(scores):
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def plain_block(x, p, num_heads=1):
    """LayerNorm(x + attention), with the columns of query, key and value split among the heads."""
    q, k, v = (x @ p[f"{n}.weight"].T + p[f"{n}.bias"] for n in ("query", "key", "value"))
    heads = []
    for columns in np.split(np.arange(x.shape[1]), num_heads):
        weights = softmax(q[:, columns] @ k[:, columns].T / np.sqrt(len(columns)))
        heads.append(weights @ v[:, columns])
    y = x + np.concatenate(heads, axis=1)
    centred = y - y.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * p["ln.weight"] + p["ln.bias"]


x = np.random.default_rng(1).standard_normal((3, 4))
blocks = {num_heads: nn.SelfAttentionBlock(4, num_heads, dtype=np.float64, rng=0) for num_heads in (1, 2)}
for num_heads, block in blocks.items():
    print(f"heads: {num_heads}", block(x), plain_block(x, block.parameters(), num_heads), sep="\n")

# %% [markdown]
# Two heads are two attentions, each on half of the columns and each with a softmax of its own, so one head can attend
# to the left while the other attends to the right. [Notebook 3](3_basics.ipynb) takes heads apart.
#
# ## The model
#
# Words become rows of a table; a pattern of sines and cosines is added that differs from place to place, because
# attention itself does not know the order; then come the blocks, one after the other; the mean over the words is the
# vector of the sentence. Three blocks with two heads, by `selfattn` and by plain lines:

# %%
words = "tom chase jerry likes cheese harry killed voldemort is in trouble".split()


def tokenize(sentence):
    return [words.index(word) for word in sentence.split()]


def plain_positions(length, d):
    angle = np.arange(length)[:, None] * np.exp(-np.arange(0, d, 2) * np.log(10000.0) / d)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, d)  # sine, cosine, sine, ...


model = nn.EmbeddingModel(
    tokenize, len(words), 8, max_seq_len=16, num_layers=3, num_heads=2, dtype=np.float64, rng=0
)
p = model.parameters()
y = p["embedding_layer.weight"][tokenize("jerry is in trouble")] + plain_positions(4, 8)
for n in range(3):
    prefix = f"attention_layers.{n}."
    of_block = {name.removeprefix(prefix): array for name, array in p.items() if name.startswith(prefix)}
    y = plain_block(y, of_block, num_heads=2)
embedding, plain_embedding = model("jerry is in trouble"), y.mean(axis=0)
print(embedding, plain_embedding, sep="\n")

# %% [markdown]
# ## The task
#
# Training shows the model three sentences: *main*, a *similar* one and one that is not. Its confidence is
# $\log\sigma(\text{main}\cdot\text{similar}) + \log\sigma(-\text{main}\cdot\text{non-similar})$: at most 0, and close
# to it when the first product is large and the second one very negative.

# %%
triplet = "tom chase jerry", "jerry likes cheese", "harry killed voldemort"
task = nn.ProxyTask(model)
main, similar, non_similar = (model(sentence) for sentence in triplet)


def log_sigmoid(z):
    return -np.log(1 + np.exp(-z))


sure = task.execute(*triplet)
plain_sure = log_sigmoid(main @ similar) + log_sigmoid(-(main @ non_similar))
print(f"{sure:.4f} {plain_sure:.4f}")

# %% [markdown]
# ---
# # One step further: a model of your own, and what its *bank* attends to
#
# Twelve topic words, six about rivers and six about money, and six patterns of sentences. In each sentence exactly
# one word shows which bank is meant; all the other words appear with both. Four sentences are kept for the test.

# %%
patterns = [
    "the bank and the {}",
    "the {} is near the bank",
    "we saw the {} and the bank",
    "a {} at the bank",
    "this bank has a {}",
    "the bank is here and so is the {}",
]
telling = {
    "river": "stream mud boat fish reeds water".split(),
    "finance": "money loan clerk cash account interest".split(),
}
test = [
    "the bank and the stream",
    "we saw the mud and the bank",
    "the bank and the money",
    "we saw the loan and the bank",
]
corpus = {
    topic: [s for pattern in patterns for word in some if (s := pattern.format(word)) not in test]
    for topic, some in telling.items()
}
words = sorted({word for some in corpus.values() for sentence in some for word in sentence.split()})
print({topic: len(some) for topic, some in corpus.items()}, "sentences,", len(words), "words")

# %% [markdown]
# A model of one block, eight numbers wide. Similar means: from the same half of the corpus. The training loop is the
# tutorial's: draw a triplet, compute the confidence and its *pullback*, compute from it the gradient of the loss (minus
# the confidence) with respect to each parameter, and make a step of Adam.
#
# One parameter is left out. `key.bias` adds the same number to all scores of a row, which the softmax does not notice,
# so its true gradient is zero. What arrives is rounding noise, and Adam, which divides by the size of the gradient,
# would make steps of full size from it: harmless, but different on every machine.

# %%
from selfattn import optim


def new_model(seed):
    return nn.EmbeddingModel(tokenize, len(words), 8, max_seq_len=16, dtype=np.float64, rng=seed)


def train(model, seed, steps=600):
    """Train a model; return the loss of each step."""
    task, rng, losses = nn.ProxyTask(model), np.random.default_rng(seed), []
    learned = {name: array for name, array in task.parameters().items() if not name.endswith("key.bias")}
    optimizer = optim.Adam(learned, lr=0.01)
    for _ in range(steps):
        same, other = rng.permutation(["river", "finance"])
        main, similar = rng.choice(corpus[same], 2, replace=False)
        confidence, pullback = task.vjp(str(main), str(similar), str(rng.choice(corpus[other])))
        grads = pullback(-1.0)
        optimizer.step({name: grads[name] for name in learned})
        losses.append(-confidence)
    return np.array(losses)


def first_block(model, sentence):
    """All steps of the model's block for a sentence."""
    ids = model.tokens(sentence)
    x = model.embedding_layer(ids) + model.positions.table[: len(ids)]
    return model.attention_layers[0].steps(x)


SEED = 14
model = new_model(SEED)
before = [first_block(model, sentence) for sentence in test]
losses = train(model, SEED)
after = [first_block(model, sentence) for sentence in test]
for n in range(0, 600, 100):
    print(f"steps {n + 1:3} to {n + 100}: mean loss {losses[n : n + 100].mean():.3f}")

# %% [markdown]
# ### What does *bank* attend to?
#
# The row of *bank* in the weights, before and after, in the four sentences that training never showed:

# %%
for sentence, untrained, trained in zip(test, before, after, strict=True):
    tokens = sentence.split()
    bank = tokens.index("bank")
    print("        ", "  ".join(f"{token:>6}" for token in tokens))
    for name, steps in (("before", untrained), ("after", trained)):
        print(f"  {name:6}", "  ".join(f"{w:6.2f}" for w in steps.weights[bank]))

# %% [markdown]
# Nothing in the data says that *stream* and *loan* are the words that matter. To lower its loss, the model had to make
# sentences of one topic alike. A vector of *bank* that is the same in all sentences does not help with that. So the
# model learned to take the topic from the word that shows it.
#
# And this changes the vector of *bank* itself. The vectors of *bank* in the four sentences, before the block and
# after it, by the cosine of the angle between them (1: same direction, −1: opposite):

# %%
def cosines(rows):
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return rows @ rows.T


where = [sentence.split().index("bank") for sentence in test]
vectors = {
    "going in": np.stack([steps.inputs[i] for i, steps in zip(where, after, strict=True)]),
    "coming out": np.stack([steps.result[i] for i, steps in zip(where, after, strict=True)]),
}
for name, rows in vectors.items():
    print(f"bank, {name}:")
    for sentence, row in zip(test, cosines(rows), strict=True):
        print("  ", "  ".join(f"{c:5.2f}" for c in row), "  ", sentence)

# %% [markdown]
# The input is the same word, only at another position in the sentence. The outputs are different vectors.
#
# Both sentences on one page, with the learned matrices. Follow *bank* from its query to the weights:

# %%
steps_page(after[0], test[0].split(), compare=(after[2], test[2].split()))

# %% [markdown]
# ### A word of caution
#
# Does every model learn to attend to the topic word? The one above was chosen because it does. Here are three that were
# not chosen; they differ from it only in the numbers they start from and in the order of the triplets:

# %%
print("seed   mean loss of the last 50   weight of bank on the topic word, four test sentences")
for seed in (SEED, 0, 1, 2):
    other = new_model(seed)
    losses = train(other, seed)
    weights = []
    for sentence in test:
        tokens = sentence.split()
        tells = next(n for n, token in enumerate(tokens) if token in sum(telling.values(), []))
        weights.append(first_block(other, sentence).weights[tokens.index("bank"), tells])
    print(f"{seed:4}   {losses[-50:].mean():24.4f}   {np.array(weights)}")

# %% [markdown]
# All of them solve the task, but they do not all attend to the word that we would choose. In the model with seed 2,
# *bank* attends to words about money only: if there are none, *bank* belongs to a river, and that is enough. Another
# word may attend instead of *bank*: the vector of the sentence is a mean over *all* its words, so *the* and *and* can
# attend to the topic word, or the topic word can have a large vector of its own. Weights show what a step of the
# computation did; why the model succeeds is another question, and one row of weights does not answer it.
#
# *Your turn:*
#
# - Give the model two heads (`num_heads=2` in `new_model`; a row of weights is then `steps.weights[head, bank]`). Do
#   both attend to the topic word?
# - Set `num_layers=0`: the mean of the words, without any attention. Does its loss go down? What can it not do?
# - Add a sentence with two topics, "the loan is near the stream". Which one does *bank* attend to?
#
# Next: [notebook 3](3_basics.ipynb) computes one small attention slowly, and takes heads apart.
