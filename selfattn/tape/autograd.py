"""Gradients without ``backward``, as ``torch.autograd``."""

from selfattn.tape.tensors import enable_grad, grad, inference_mode, no_grad, set_grad_enabled

__all__ = ["enable_grad", "grad", "inference_mode", "no_grad", "set_grad_enabled"]
