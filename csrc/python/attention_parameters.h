/* Every parameter of attention, in the order of the signatures, for files that define these macros:
 *
 *     SA_PARAMETER(name, otherwise, functions, read, to, doc)   of the public function
 *     SA_INNER_PARAMETER(name, otherwise, functions, read, to)  of other functions only
 *     SA_KEYWORDS_ONLY                                          not by position from here on
 *
 * Columns as in sa_parameter, fields of sa_call. */

/* clang-format off */
SA_PARAMETER(query, "", SA_ALL, NULL, given,
    "query : array_like, shape (..., L, E)\n"
    "    Queries. ``...`` are any leading dimensions (batches, then heads), which broadcast between `query`,\n"
    "    `key` and `value`; none is one head. Any strides, alignment and byte order.\n")
SA_PARAMETER(key, "", SA_ALL, NULL, given,
    "key : array_like, shape (..., S, E)\n"
    "    Keys.\n")
SA_PARAMETER(value, "", SA_ALL, NULL, given,
    "value : array_like, shape (..., S, Ev)\n"
    "    Values; Ev may differ from E.\n")
SA_INNER_PARAMETER(cu_seqlens_q, "", SA_PACKED, NULL, given)
SA_INNER_PARAMETER(cu_seqlens_k, "", SA_PACKED, NULL, given)
SA_PARAMETER(attn_mask, "=None", SA_ALL, read_mask, a.mask,
    "attn_mask : array_like of bool or float, optional\n"
    "    Broadcastable to (..., L, S) without enlarging it. Boolean: True = attend. Float: added to the\n"
    "    scores, -inf closes a pair as False does; its dtype does not affect the result's.\n")
SA_PARAMETER(dropout_p, "=0.0", SA_ALL, read_dropout, a.dropout_p,
    "dropout_p : float, default 0.0\n"
    "    Probability with which a weight is set to 0; the others are divided by ``1 - dropout_p``. As in\n"
    "    PyTorch's function it applies whenever it is given: there is no training mode.\n")
SA_PARAMETER(is_causal, "=False", SA_ALL, sa_read_flag, a.causal,
    "is_causal : bool, default False\n"
    "    Query i attends to keys j <= i (upper-left diagonal). Combines with `attn_mask`.\n")
SA_KEYWORDS_ONLY
SA_PARAMETER(scale, "=None", SA_ALL, sa_read_real, a.scale,
    "scale : float, optional\n"
    "    Factor of the scores, 1/sqrt(E) by default.\n")
SA_PARAMETER(enable_gqa, "=False", SA_ALL, NULL, given,
    "enable_gqa : bool, default False\n"
    "    Let each head of `key` and `value` serve H/H_kv heads of `query` in a row.\n")
SA_PARAMETER(causal, "=None", SA_ALL, read_causal, a.causal,
    "causal : {None, 'upper_left', 'lower_right'}, optional\n"
    "    The causal rule with its diagonal: j <= i, or j <= i + S - L.\n")
SA_PARAMETER(window, "=None", SA_ALL, read_window, a.window_left,
    "window : (left, right), optional\n"
    "    Keys from i + o - left to i + o + right are open, where o is the offset of the causal rule's diagonal:\n"
    "    0 or S - L. Each is an int >= 0, or None for no bound. Costs the width of the window, not S.\n")
SA_PARAMETER(softcap, "=None", SA_ALL, read_softcap, a.softcap,
    "softcap : float, optional\n"
    "    Scaled scores s become softcap * tanh(s / softcap); > 0.\n")
SA_PARAMETER(alibi_slopes, "=None", SA_ALL, read_per_head, a.alibi,
    "alibi_slopes : array_like, optional\n"
    "    (H,) or broadcastable to the leading dimensions; adds -slope * abs(i + o - j), with the o\n"
    "    of `window`.\n")
SA_PARAMETER(sinks, "=None", SA_ALL, read_per_head, a.sinks,
    "sinks : array_like, optional\n"
    "    (H,) or broadcastable likewise: a logit per head that takes part in the denominator only.\n")
SA_PARAMETER(key_lengths, "=None", SA_DENSE, read_key_lengths, a.key_lengths,
    "key_lengths : array_like of int, optional\n"
    "    Broadcastable to the leading dimensions, each in 0...S: keys from there on do not exist.\n")
SA_PARAMETER(block_mask, "=None", SA_DENSE, read_block_mask, block_masks,
    "block_mask : BlockMask, optional\n"
    "    Closes pairs by documents, by a prefix or by a pattern of blocks, without an array of (L, S); what is\n"
    "    closed in blocks is skipped. See `BlockMask`.\n")
SA_PARAMETER(rng, "=None", SA_ALL, NULL, given,
    "rng : int, numpy.random.Generator or TorchGenerator (`torch_rng`), optional\n"
    "    Where the dropout mask comes from: an int >= 0 is the seed (modulo 2**64), a generator draws one\n"
    "    uint64 per call. None takes fresh entropy. The mask does not depend on the number of threads.\n")
SA_PARAMETER(return_lse, "=False", SA_ALL, sa_read_flag, want_lse,
    "return_lse : bool, default False\n"
    "    Append the log-sum-exp of the scores of each row, natural log, `sinks` included, before dropout.\n")
SA_PARAMETER(return_weights, "=False", SA_DENSE, sa_read_flag, want_weights,
    "return_weights : bool, default False\n"
    "    Append the weights after dropout. They take (..., L, S) of memory.\n")
SA_PARAMETER(out, "=None", SA_ALL, NULL, given,
    "out : ndarray, optional\n"
    "    Where to put the output: exact shape and dtype, native byte order, writable, without overlap\n"
    "    with an input. Returned.\n")
SA_PARAMETER(num_threads, "=None", SA_ALL, sa_read_threads, threads,
    "num_threads : int, optional\n"
    "    Threads of this call, at most; see `set_num_threads`. Small calls use fewer. The bits of the\n"
    "    result do not depend on it.\n")
SA_INNER_PARAMETER(query_lengths, "", SA_CACHED, read_query_lengths, a.query_lengths)
SA_INNER_PARAMETER(key_bias, "=None", SA_BOTH_HALVES, read_key_bias, a.key_bias)
SA_INNER_PARAMETER(unrounded, "=False", SA_FORWARD, NULL, given)
SA_INNER_PARAMETER(grad_out, "=None", SA_BACKWARD, NULL, given)
SA_INNER_PARAMETER(statistics, "=None", SA_BACKWARD, NULL, given)
SA_INNER_PARAMETER(grad_lse, "=None", SA_BACKWARD, NULL, given)
SA_INNER_PARAMETER(wrt, "=7", SA_BACKWARD, NULL, given)
SA_INNER_PARAMETER(gradients, "=None", SA_DENSE_BACKWARD, NULL, given)
/* clang-format on */
