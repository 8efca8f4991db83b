"""Gradients without ``backward``, as ``torch.autograd``."""

from selfattn.tape.tensors import Tensor, enable_grad, grad, inference_mode, no_grad, set_grad_enabled


def Variable(data: Tensor, requires_grad: bool = False) -> Tensor:  # noqa: N802 # PyTorch's name
    """Return a tensor of the same memory: what old texts wrap tensors in."""
    return data.detach().requires_grad_(requires_grad)


__all__ = ["Variable", "enable_grad", "grad", "inference_mode", "no_grad", "set_grad_enabled"]
