"""Optimisers, schedules of the learning rate, and clipping, with PyTorch's names, arguments and defaults.

Optimisers write into the arrays that :meth:`selfattn.nn.Module.parameters` returns, from gradients of the same names.

>>> from selfattn import nn, optim
>>> model, loss = nn.Linear(2, 1, rng=0), nn.MSELoss()
>>> optimizer = optim.Adam(model.parameters(), lr=0.1)
>>> scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
>>> x, target = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [[1.0], [2.0], [3.0]]
>>> for _ in range(300):
...     y, pullback = model.vjp(x)
...     value, loss_pullback = loss.vjp(y, target)
...     _, grads = pullback(loss_pullback(1.0))
...     norm = optim.clip_grad_norm_(grads, max_norm=1.0)
...     optimizer.step(grads)
...     scheduler.step()
>>> float(abs(model(x) - target).max()) < 0.01
True
"""

from selfattn.optim import lr_scheduler
from selfattn.optim.optimizers import SGD, Adam, AdamW, Optimizer, clip_grad_norm_

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "clip_grad_norm_", "lr_scheduler"]
