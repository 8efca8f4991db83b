"""Functions of arrays: the core's own, their gradients, and what is made of them."""
