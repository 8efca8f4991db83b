# %% [markdown]
# # 6. A GPT in 40 lines: train it, let it write, look inside
#
# The five tutorials end where models such as GPT begin. A GPT is the attention that you know, with three additions:
#
# - a token sees **only itself and what came before** (a causal mask), so that every position of a text is an exercise:
#   *what comes next?*
# - several layers of attention and feed-forward networks, one after the other, each added to its input;
# - a **head**: from the last row, a score for each token that may come next.
#
# The text is a nursery rhyme that grows by a line with every verse, *The House That Jack Built*. It is older than any
# copyright, and it is made for this: a reader of a few verses can guess the next word.
#
# *To run it:* `jupyter lab notebooks` in the folder of the clone ([what it needs](README.md)); Shift+Enter
# runs a cell.
#
# ## What to see
#
# The thickness of a ribbon is an attention weight, here from numbers that are made up. No ribbon comes from a later
# word. Point at the two *the*: they go in with the same numbers. Why are their outputs not the same?

# %%
import selfattn as sa

x = [[1, 0], [0, 2], [2, 2], [1, 0], [0, 3]]
sa.views.steps_page(sa.attention_steps(x, x, x, is_causal=True), "the dog worried the cat".split())

# %% [markdown]
# ## The text
#
# A verse begins with the last one that has come, and goes back to the house:

# %%
PARTS = """lay in the house that Jack built.|the malt that|ate|the rat that|killed|the cat that|worried|the dog that
|tossed|the cow with the crumpled horn that|milked|the maiden all forlorn that|kissed|the man all tattered and torn that
|married|the priest all shaven and shorn that|woke
|the cock that crowed in the morn that|kept|the farmer sowing his corn that"""
end, *rest = [part.strip() for part in PARTS.split("|")]
who, does = rest[0::2], rest[1::2]


def verse(n):
    lines = [f"This is {who[n]}"] + [f"{does[k]} {who[k]}" for k in reversed(range(n))]
    return "\n".join([*lines, end])


text = "\n\n".join(verse(n) for n in range(len(who))) + "\n\n"
print(verse(2))
words = text.replace("\n", " / ").split()  # a slash ends a line
print(f"\n{len(words)} words in {len(who)} verses")

# %% [markdown]
# ## The 40 lines
#
# Words become numbers. A batch is 16 pieces of 64 words each, and the right answer for every word is the one after it:
# `loss_vjp` shifts them by one. 200 steps of AdamW are a few seconds. (The numbers are float64 so that this
# page says the same on every CPU; for a model of your own, leave `dtype` out.)

# %%
import numpy as np

from selfattn import nn, optim

vocabulary = sorted(set(words))
number = {word: n for n, word in enumerate(vocabulary)}
ids = np.array([number[word] for word in words])
CONTEXT = 64

model = nn.GPT(
    vocab_size=len(vocabulary), d_model=32, num_layers=2, num_heads=2, max_seq_len=CONTEXT, rng=0, dtype=np.float64
)
optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
rng = np.random.default_rng(0)
print(f"{sum(p.size for p in model.parameters().values()):,} numbers to learn; {len(vocabulary)} words")
print(f"the loss of a random guess is log {len(vocabulary)} = {np.log(len(vocabulary)):.2f}")
losses = []
for step in range(200):
    places = rng.integers(0, len(ids) - CONTEXT, 16)
    batch = np.stack([ids[place : place + CONTEXT + 1] for place in places])
    loss, pullback = model.loss_vjp(batch)
    optimizer.lr = 1e-2 * min(1, (step + 1) / 20) * (1 - step / 200)
    optimizer.step(pullback(1.0))
    losses.append(loss)
    if step % 40 == 0 or step == 199:
        print(f"step {step:3d}: loss {loss:.2f}")

# %% [markdown]
# The loss does not become 0, and should not: after *This is the* any of ten may come, and a piece that begins in the
# middle of a line lacks what came before.
#
# ## Let it write
#
# For the beginning of a text, the model computes scores for the next word; the likeliest word is appended, and so on.
# The keys and values of the words so far are kept (`sa.KVCache` does that for attention alone), so each new word
# needs one row.


# %%
def say(beginning, count, **options):
    """Let the model continue a text."""
    prompt = [number[word] for word in beginning.split()]
    return " ".join(vocabulary[n] for n in model.generate(prompt, count, **options))


spoken = say("This is the cat that", 18)
print(("This is the cat that " + spoken).replace(" / ", "\n"))

# %% [markdown]
# The model has learned this verse by heart. Several beginnings, continued at once, give the same words as each alone:

# %%
beginnings = ["tossed the", "This is the rat", "kissed the maiden all"]
together = model.generate([[number[word] for word in b.split()] for b in beginnings], 6)
for beginning, own in zip(beginnings, together, strict=True):
    goes_on = " ".join(vocabulary[n] for n in own)
    print(f"{beginning:22} -> {goes_on}")

# %% [markdown]
# ### Temperature
#
# The scores become probabilities by a softmax, and the next word may be drawn from them. Scores are divided by a
# **temperature** first: below 1 the likeliest words become likelier, above 1 all become more alike. Many words may
# follow *This is the*:

# %%
scores = model([number[word] for word in "/ / This is the".split()])[-1]
print("temperature   likeliest next words")
for temperature in (0.5, 1.0, 2.0):
    chances = sa.softmax(scores / temperature)
    best = np.argsort(-chances, kind="stable")[:6]
    print(f"{temperature:11.1f}   " + "  ".join(f"{vocabulary[n]} {chances[n]:.2f}" for n in best))

# %% [markdown]
# Draws with different seeds. The same seed gives the same text, always:

# %%
for seed in range(4):
    print(seed, "/ / This is the", say("/ / This is the", 12, temperature=1.0, rng=seed))

# %% [markdown]
# ## Look inside
#
# How does the model know what comes next? After *killed the* it must predict *rat*, and after *worried the* it must
# predict *cat*, although the last word is the same. `model.layers[0].self_attn` is the attention of layer 0,
# and returns its weights too. The input of a layer is the output of the layer before it.


# %%
def weights_of(beginning):
    """Return the weights (layers, heads, queries, keys) of a text."""
    chosen = [number[word] for word in beginning.split()]
    x = model.token_embedding(chosen) + model.position_embedding(np.arange(len(chosen)))
    found = []
    for layer in model.layers:
        n = layer.norm1(x)
        look_ahead = ~np.tri(len(chosen), dtype=bool)  # True: closed
        _, weights = layer.self_attn(n, n, n, attn_mask=look_ahead, average_attn_weights=False)
        found.append(weights)
        x = layer(x, is_causal=True)
    return np.stack(found)


for beginning in ("This is the dog that / worried the cat that / killed the", "This is the dog that / worried the"):
    weights, tokens = weights_of(beginning), beginning.split()
    print(f"{beginning} -> {say(beginning, 1)}")
    for layer, head in np.ndindex(weights.shape[:2]):
        row = weights[layer, head, -1]
        most = np.argsort(-row, kind="stable")[:4]
        seen = "   ".join(f"{row[n]:.2f} {tokens[n]}" for n in most)
        print(f"    the last word looks, layer {layer} head {head}:  {seen}")

# %% [markdown]
# Head 1 of layer 0 attends to the verb, which decides what comes next; it learned that from the text alone. To
# see every number of one head, take its queries, keys and values:

# %%
tokens = "tossed the dog that / worried the".split()
x = model.token_embedding([number[word] for word in tokens]) + model.position_embedding(np.arange(len(tokens)))
attention = model.layers[0].self_attn
joint = model.layers[0].norm1(x) @ attention.in_proj_weight.T + attention.in_proj_bias
query, key, value = (part[:, :16] for part in np.split(joint, 3, axis=1))  # head 0 has columns 0 to 15
sa.views.steps_page(sa.attention_steps(query, key, value, is_causal=True), tokens)

# %% [markdown]
# *Your turn:*
#
# - Leave out the positions: set `model.position_embedding.weight` to zeros before training. Which texts can it still
#   learn?
# - Use `positions="rotary"`. Does it learn faster?
# - Give it a text of your own, letter by letter, with `d_model=128`, four layers and 2000 steps.
#
# Next: [a classifier that shows what it attends to](7_classifier.ipynb).
