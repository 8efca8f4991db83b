/* The docstrings of rowops.c. Macros hold what several say. */
#ifndef SA_PYTHON_DOC_ROWOPS_H
#define SA_PYTHON_DOC_ROWOPS_H

/* clang-format off */
#define SA_ROW_DTYPES \
    "    float16, bfloat16, float32, float64 or integers (which count as float64); any strides, alignment\n" \
    "    and byte order.\n"

#define SA_ROW_RETURNS(dtype) \
    "\n" \
    "Returns\n-------\n" \
    "out : ndarray, the shape of `x`\n" \
    "    New and C-contiguous, in the dtype " dtype ".\n" \
    "    16-bit inputs are computed in float32.\n"

#define SA_ROW_RAISES(errors) \
    "\n" \
    "Raises\n------\n" \
    "ValueError\n" \
    "    " errors "\n" \
    "TypeError\n" \
    "    A boolean, complex, object or long double array, a masked array or a matrix.\n\n"

static const char doc_softmax[] =
    "softmax($module, /, x, axis=-1)\n--\n\n"
    "Turn numbers into positive ones with sum 1 along an axis: ``exp(x) / sum(exp(x))``.\n\n"
    "Parameters\n----------\n"
    "x : array_like\n"
    SA_ROW_DTYPES
    "axis : int, default -1\n"
    SA_ROW_RETURNS("of `x`")
    "    A slice that is -inf throughout gives NaN, 0/0; attention makes such rows zeros.\n"
    SA_ROW_RAISES("``numpy.exceptions.AxisError``: no such axis.")
    "See Also\n--------\n"
    "log_softmax\n\n"
    "References\n----------\n"
    ".. [1] J. S. Bridle, \"Probabilistic interpretation of feedforward classification network outputs\",\n"
    "       1990.\n\n"
    "Examples\n--------\n"
    ">>> import selfattn as sa\n"
    ">>> sa.softmax([2, 4, 4]).round(5)\n"
    "array([0.06338, 0.46831, 0.46831])\n";

static const char doc_log_softmax[] =
    "log_softmax($module, /, x, axis=-1)\n--\n\n"
    "Take the log of `softmax`, ``x - log(sum(exp(x)))``, accurate where softmax itself underflows.\n\n"
    "Parameters\n----------\n"
    "x : array_like\n"
    SA_ROW_DTYPES
    "axis : int, default -1\n"
    SA_ROW_RETURNS("of `x`")
    "    A slice that is -inf throughout gives NaN.\n"
    SA_ROW_RAISES("``numpy.exceptions.AxisError``: no such axis.")
    "See Also\n--------\n"
    "softmax\n\n"
    "Examples\n--------\n"
    ">>> import selfattn as sa\n"
    ">>> sa.log_softmax([0.0, -1000.0])\n"
    "array([    0., -1000.])\n";

static const char doc_layer_norm[] =
    "layer_norm($module, /, x, normalized_shape, weight=None, bias=None, eps=1e-05)\n--\n\n"
    "Shift and scale to mean 0 and variance 1 over the last axes.\n\n"
    "``(x - mean) / sqrt(variance + eps) * weight + bias``, the variance being the biased one.\n\n"
    "Parameters\n----------\n"
    "x : array_like, shape (..., *normalized_shape)\n"
    SA_ROW_DTYPES
    "normalized_shape : int or tuple of int\n"
    "    The last axes of `x`, over which mean and variance are taken.\n"
    "weight, bias : array_like, shape normalized_shape, optional\n"
    "    1 and 0 by default.\n"
    "eps : float, default 1e-5\n"
    SA_ROW_RETURNS("to which `x`, `weight` and `bias` promote")
    SA_ROW_RAISES("Shapes that do not fit `normalized_shape`.")
    "See Also\n--------\n"
    "rms_norm\n\n"
    "References\n----------\n"
    ".. [1] J. L. Ba, J. R. Kiros and G. E. Hinton, \"Layer normalization\", 2016, equations 3 and 4.\n\n"
    "Examples\n--------\n"
    ">>> import selfattn as sa\n"
    ">>> sa.layer_norm([[1.0, 2.0, 3.0]], 3).round(4)\n"
    "array([[-1.2247,  0.    ,  1.2247]])\n";

static const char doc_rms_norm[] =
    "rms_norm($module, /, x, normalized_shape, weight=None, eps=None)\n--\n\n"
    "Scale to mean square 1 over the last axes: ``x / sqrt(mean(x**2) + eps) * weight``.\n\n"
    "Parameters\n----------\n"
    "x : array_like, shape (..., *normalized_shape)\n"
    SA_ROW_DTYPES
    "normalized_shape : int or tuple of int\n"
    "    The last axes of `x`, over which the mean is taken.\n"
    "weight : array_like, shape normalized_shape, optional\n"
    "    1 by default.\n"
    "eps : float, optional\n"
    "    By default the machine epsilon of the precision that is computed in: float64's for\n"
    "    float64, else float32's.\n"
    SA_ROW_RETURNS("to which `x` and `weight` promote")
    SA_ROW_RAISES("Shapes that do not fit `normalized_shape`.")
    "See Also\n--------\n"
    "layer_norm\n\n"
    "References\n----------\n"
    ".. [1] B. Zhang and R. Sennrich, \"Root mean square layer normalization\", 2019, equation 4.\n\n"
    "Examples\n--------\n"
    ">>> import selfattn as sa\n"
    ">>> sa.rms_norm([[3.0, 4.0]], 2).round(4)\n"
    "array([[0.8485, 1.1314]])\n";

static const char doc_gelu[] =
    "gelu($module, /, x, approximate='none')\n--\n\n"
    "Multiply x by Phi(x), the distribution function of the standard normal: a smooth ``max(x, 0)``.\n\n"
    "Parameters\n----------\n"
    "x : array_like\n"
    SA_ROW_DTYPES
    "approximate : {'none', 'tanh'}\n"
    "    'tanh': ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.\n"
    SA_ROW_RETURNS("of `x`")
    "    Both tails keep their relative accuracy.\n"
    SA_ROW_RAISES("Another `approximate`.")
    "References\n----------\n"
    ".. [1] D. Hendrycks and K. Gimpel, \"Gaussian error linear units\", 2016, section 2.\n\n"
    "Examples\n--------\n"
    ">>> import selfattn as sa\n"
    ">>> sa.gelu([-1.0, 0.0, 1.0]).round(4)\n"
    "array([-0.1587,  0.    ,  0.8413])\n";

static const char doc_rotary[] =
    "apply_rotary_emb($module, /, x, cos, sin, interleaved=False)\n--\n\n"
    "Rotate pairs of columns by angles that grow with the position, so that dot products tell distances.\n\n"
    "The pair (a, b) becomes ``(a * cos - b * sin, a * sin + b * cos)``.\n\n"
    "Parameters\n----------\n"
    "x : array_like, shape (..., L, D), D even\n"
    "    Queries or keys, heads last among the leading dims: (B, H, L, D) for instance.\n"
    SA_ROW_DTYPES
    "cos, sin : array_like, shape (L, D / 2) or (..., L, D / 2)\n"
    "    Tables of the angles. With one axis less than `x`, and three or more, they have no head axis,\n"
    "    (B, L, D / 2), and are the same for every head. Else they broadcast to (..., L, D / 2).\n"
    "interleaved : bool, default False\n"
    "    Pairs are neighbouring columns (2 n, 2 n + 1); by default column n goes with column n + D / 2.\n"
    SA_ROW_RETURNS("to which `x`, `cos` and `sin` promote")
    SA_ROW_RAISES("An odd D, or tables that do not fit `x`.")
    "References\n----------\n"
    ".. [1] J. Su et al., \"RoFormer: enhanced transformer with rotary position embedding\", 2021,\n"
    "       equation 34 (interleaved pairs).\n\n"
    "Examples\n--------\n"
    "A quarter turn takes (1, 0) to (0, 1):\n\n"
    ">>> import selfattn as sa\n"
    ">>> sa.apply_rotary_emb([[1.0, 0.0]], cos=[[0.0]], sin=[[1.0]])\n"
    "array([[0., 1.]])\n";

/* clang-format on */

#endif
