"""Attention and the row operations as functions of arrays, with their gradients: a file for each operation."""
