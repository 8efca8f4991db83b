"""A whole GPT in one page of NumPy: it learns a nursery rhyme letter by letter, and then writes its own verses.

    OMP_NUM_THREADS=1 python examples/plain_gpt.py  # its matrices are too small for several threads

Read it from top to bottom: the text, the model, its training, its writing. These functions and their gradients come
from selfattn, and the rest is NumPy:

    scaled_dot_product_attention(q, k, v, is_causal=True)
        softmax(q @ k.T / sqrt(width of q)) @ v, for each piece of text and each head: a letter gets a weighted mean
        of the values v of itself and of earlier letters; the weight of a letter grows with the product of its key k
        and our query q
    layer_norm(x, D, w)  (x - mean) / standard deviation * w, over the D numbers of a letter
    gelu(x)              a smooth max(x, 0)
    softmax(x)           exp(x) / sum(exp(x)): numbers become probabilities; log_softmax is its logarithm

A function named `…_vjp` returns its result and a *pullback*. The pullback takes the gradient of the loss with respect
to that result, and returns the gradients with respect to the inputs. To train, we call the functions in order, and
then their pullbacks in the opposite order. Pullbacks of the model below put gradients of parameters into a dict,
`grads`.

Shapes: N pieces of text, L letters in each; D numbers for each letter, shared out among H heads; V different letters.
`p` holds the parameters by name, and n is the number of a layer.
"""

import numpy as np

from selfattn import functional as F  # noqa: N812

# The text: each verse begins with a new line and repeats all earlier lines ("This is the malt that lay in …").
LINES = [
    "the house that Jack built",
    "the malt that lay in",
    "the rat that ate",
    "the cat that killed",
    "the dog that worried",
    "the cow with the crumpled horn that tossed",
    "the maiden all forlorn that milked",
    "the man all tattered and torn that kissed",
    "the priest all shaven and shorn that married",
    "the cock that crowed in the morn that woke",
    "the farmer sowing his corn that kept",
]
TEXT = "".join(f"This is {' '.join(reversed(LINES[: n + 1]))}.\n" for n in range(len(LINES)))
LETTERS = sorted(set(TEXT))
IDS = np.array([LETTERS.index(letter) for letter in TEXT])  # the text as numbers from 0 to V - 1

V, D, H, LAYERS = len(LETTERS), 64, 4, 2
CONTEXT = 64  # the model sees at most this many letters at once
N, STEPS, LEARNING_RATE = 16, 400, 0.01  # each step learns from 16 pieces of the text


def new_parameters(rng):
    """Return the arrays that training changes: small random matrices, and ones for the layer norms."""
    p = {"letters": rng.normal(0, 0.02, (V, D)), "places": rng.normal(0, 0.02, (CONTEXT, D))}
    for n in range(LAYERS):
        p[f"{n}.norm1"] = np.ones(D)
        p[f"{n}.qkv"] = rng.normal(0, 0.02, (D, 3 * D))  # queries, keys and values
        p[f"{n}.merge"] = rng.normal(0, 0.02, (D, D))
        p[f"{n}.norm2"] = np.ones(D)
        p[f"{n}.widen"] = rng.normal(0, 0.02, (D, 4 * D))
        p[f"{n}.narrow"] = rng.normal(0, 0.02, (4 * D, D))
    p["norm"] = np.ones(D)
    return {name: array.astype(np.float32) for name, array in p.items()}


def linear_vjp(x, w):
    """Multiply x (N, L, I) by the matrix w (I, O): the result is (N, L, O)."""

    def pullback(dy):
        dw = x.reshape(-1, w.shape[0]).T @ dy.reshape(-1, w.shape[1])  # a sum over all N * L letters
        return dy @ w.T, dw

    return x @ w, pullback


def split(x):
    """Give each head its own columns: (N, L, D) becomes (N, H, L, D / H)."""
    return x.reshape(*x.shape[:2], H, D // H).swapaxes(1, 2)


def join(x):
    """Put the columns of the heads side by side again: (N, H, L, D / H) becomes (N, L, D)."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], D)


def attention_vjp(p, n, x):
    """Add to each letter of x (N, L, D) a weighted mean of the values of this letter and the letters before it."""
    normed, norm_pullback = F.layer_norm_vjp(x, D, p[f"{n}.norm1"])
    qkv, qkv_pullback = linear_vjp(normed, p[f"{n}.qkv"])  # (N, L, 3 D)
    q, k, v = [split(third) for third in np.split(qkv, 3, axis=-1)]  # each (N, H, L, D / H)
    heads, heads_pullback = F.scaled_dot_product_attention_vjp(q, k, v, is_causal=True)  # (N, H, L, D / H)
    y, merge_pullback = linear_vjp(join(heads), p[f"{n}.merge"])  # (N, L, D)

    def pullback(dy, grads):  # returns the gradient of x, and stores the gradients of the parameters in grads
        d_joined, grads[f"{n}.merge"] = merge_pullback(dy)
        dq, dk, dv = heads_pullback(split(d_joined))
        d_qkv = np.concatenate([join(dq), join(dk), join(dv)], axis=-1)
        d_normed, grads[f"{n}.qkv"] = qkv_pullback(d_qkv)
        dx, grads[f"{n}.norm1"], _ = norm_pullback(d_normed)  # the norm has no bias
        return dy + dx  # x enters both the sum and the norm

    return x + y, pullback


def feed_forward_vjp(p, n, x):
    """Add to each letter of x (N, L, D) the output of a small network for this letter alone."""
    normed, norm_pullback = F.layer_norm_vjp(x, D, p[f"{n}.norm2"])
    wide, widen_pullback = linear_vjp(normed, p[f"{n}.widen"])  # (N, L, 4 D)
    active, gelu_pullback = F.gelu_vjp(wide)
    y, narrow_pullback = linear_vjp(active, p[f"{n}.narrow"])  # (N, L, D)

    def pullback(dy, grads):
        d_active, grads[f"{n}.narrow"] = narrow_pullback(dy)
        d_normed, grads[f"{n}.widen"] = widen_pullback(gelu_pullback(d_active))
        dx, grads[f"{n}.norm2"], _ = norm_pullback(d_normed)
        return dy + dx

    return x + y, pullback


def gpt_vjp(p, ids):
    """Score, after each letter of ids (N, L), every letter that may come next: logits (N, L, V)."""
    length = ids.shape[1]
    x = p["letters"][ids] + p["places"][:length]  # (N, L, D)
    pullbacks = []
    for n in range(LAYERS):
        for half_vjp in (attention_vjp, feed_forward_vjp):  # the two halves of a layer
            x, half_pullback = half_vjp(p, n, x)
            pullbacks.append(half_pullback)
    normed, norm_pullback = F.layer_norm_vjp(x, D, p["norm"])
    logits, logits_pullback = linear_vjp(normed, p["letters"].T)  # similar rows give high scores

    def pullback(d_logits):
        grads = {}
        d_normed, d_letters = logits_pullback(d_logits)
        dx, grads["norm"], _ = norm_pullback(d_normed)
        for half_pullback in reversed(pullbacks):
            dx = half_pullback(dx, grads)
        grads["letters"] = d_letters.T.copy()
        np.add.at(grads["letters"], ids, dx)  # every occurrence of a letter adds to the gradient of its row
        grads["places"] = np.zeros_like(p["places"])
        grads["places"][:length] = dx.sum(axis=0)
        return grads

    return logits, pullback


def loss_vjp(p, ids):
    """Return the mean of −log p(next letter), in nats, over the letters of ids (N, L + 1)."""
    logits, gpt_pullback = gpt_vjp(p, ids[:, :-1])  # (N, L, V)
    log_chances, log_softmax_pullback = F.log_softmax_vjp(logits)
    right = ids[:, 1:, None]  # (N, L, 1): the true next letters
    loss = -np.take_along_axis(log_chances, right, axis=-1).mean()

    def pullback():
        d_log_chances = np.zeros_like(log_chances)
        np.put_along_axis(d_log_chances, right, -1 / right.size, axis=-1)
        return gpt_pullback(log_softmax_pullback(d_log_chances))

    return loss, pullback


def train(p, rng):
    """Change the parameters in place by Adam: step along the mean gradient, divided by the root of its mean square."""
    mean = {name: np.zeros_like(array) for name, array in p.items()}
    square = {name: np.zeros_like(array) for name, array in p.items()}
    for step in range(1, STEPS + 1):
        starts = rng.integers(0, len(IDS) - CONTEXT, N)
        loss, pullback = loss_vjp(p, np.stack([IDS[start : start + CONTEXT + 1] for start in starts]))
        rate = LEARNING_RATE * min(1, step / 20) * (1 - step / STEPS)  # up for 20 steps, then down to 0
        for name, grad in pullback().items():
            mean[name] += 0.1 * (grad - mean[name])
            square[name] += 0.001 * (grad**2 - square[name])
            # Both means begin at 0; the divisions by 1 - 0.9**step and 1 - 0.999**step correct that bias.
            root = np.sqrt(square[name] / (1 - 0.999**step))
            p[name] -= rate * mean[name] / (1 - 0.9**step) / (root + 1e-8)
        if step == 1 or step % 100 == 0:
            print(f"step {step:3}: loss {loss:.3f}")


def write(p, beginning, count, rng, temperature=0.5):
    """Continue a text by `count` letters: score the next letter, draw one, append it, and repeat."""
    ids = [LETTERS.index(letter) for letter in beginning]
    for _ in range(count):
        logits, _ = gpt_vjp(p, np.array([ids[-CONTEXT:]]))
        # A temperature below 1 favours likely letters.
        chances = F.softmax(logits[0, -1].astype(np.float64) / temperature)  # (V,)
        ids.append(rng.choice(V, p=chances))
    return "".join(LETTERS[n] for n in ids)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    p = new_parameters(rng)
    print(f"{len(TEXT):,} letters, {V} different; {sum(array.size for array in p.values()):,} parameters")
    train(p, rng)
    print(write(p, "This is the ", 300, rng))
