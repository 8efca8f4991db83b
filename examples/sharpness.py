"""How sharp is the valley? The largest eigenvalue of the Hessian of an attention model's loss, without the Hessian.

    python examples/sharpness.py

Along a direction in which the loss curves by λ, a step of gradient descent multiplies the distance to the valley's
floor by 1 - rate · λ. So it converges only while λ < 2 / rate: the largest eigenvalue of the Hessian, the *sharpness*,
says how large a rate may be. And training reacts to the rate: the sharpness grows until it is about 2 / rate, and then
stays there, "at the edge of stability" (Cohen et al., 2021). A smaller rate ends in a sharper valley.

The Hessian of n weights has n² numbers. Its product with one direction needs none of them: a tangent goes through the
model (forward mode), and through its gradients. Power iteration needs only products: multiply a direction by the
Hessian, scale it to length 1, again and again; what remains belongs to the largest eigenvalue.
"""

import numpy as np

from selfattn.functional import scaled_dot_product_attention_hvp as attention_hvp
from selfattn.functional import scaled_dot_product_attention_jvp as attention_jvp
from selfattn.functional import scaled_dot_product_attention_vjp as attention_vjp

rng = np.random.default_rng(0)
x = rng.standard_normal((64, 12, 8))  # pieces of text, tokens, numbers of a token
target = x[np.arange(64), x[..., 0].argmax(axis=1)][
    :, None
]  # each token seeks the one whose first number is largest


def projected(weights):
    """Return queries, keys and values: one product of matrices for all three."""
    return x @ weights  # (3, 1, 8, 8) gives (3, 64, 12, 8)


def gradient(weights):
    """Return the loss, half the mean squared error, and its gradient."""
    out, pullback = attention_vjp(*projected(weights))
    error = (out - target) / len(x)
    grads = np.stack(pullback(error))
    return np.sum(error * (out - target)) / 2, np.einsum("nli,pnlj->pij", x, grads)[:, None]


def hessian_product(weights, direction):
    """Return the Hessian of the loss, times a direction of the weights."""
    qkv, tangents = projected(weights), tuple(projected(direction))
    out, out_tangent = attention_jvp(*qkv, tangents)
    error, error_tangent = (out - target) / len(x), out_tangent / len(x)
    _, product = attention_hvp(*qkv, error, tangents, grad_out_tangent=error_tangent)
    return np.einsum("nli,pnlj->pij", x, np.stack(product))[:, None]


def sharpness(weights, steps=30):
    """Return the largest eigenvalue, by power iteration."""
    direction, size = rng.standard_normal(weights.shape), 1.0
    for _ in range(steps):
        direction = hessian_product(weights, direction / np.linalg.norm(direction))
        size = np.linalg.norm(direction)
    return size


if __name__ == "__main__":
    for rate in (0.1, 0.2):
        weights = np.random.default_rng(1).standard_normal((3, 1, 8, 8)) / 8
        print(f"rate {rate}: stable below a sharpness of {2 / rate:.0f}")
        for step in range(301):
            loss, slope = gradient(weights)
            if step % 100 == 0:
                print(f"  step {step:3}  loss {loss:7.3f}  sharpness {sharpness(weights):6.1f}")
            weights = weights - rate * slope
