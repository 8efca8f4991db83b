"""The programs of the five tutorials, written anew from their descriptions, on selfattn.tape and on PyTorch itself.

Each has its tutorial's names, and not one line that is selfattn's alone.
"""

import importlib
import math

import numpy as np
import pytest

import selfattn as sa
from selfattn import nn as layers
from selfattn import optim, tutorials


@pytest.fixture(params=["selfattn.tape", "torch"])
def torch(request):
    """The module that a tutorial imports as torch; PyTorch itself shows that what is expected is right."""
    if request.param == "torch":
        pytest.importorskip("torch")
    module = importlib.import_module(request.param)
    kind = module.get_default_dtype()
    yield module
    module.set_printoptions(profile="default")
    module.set_default_dtype(kind)


def tensor_text(rows, spec, grad_fn=""):
    """Return how PyTorch prints a tensor, which a tutorial's table gives as nested lists of numbers."""
    texts = np.vectorize(lambda number: format(number, spec), otypes=[object])(np.array(rows, float))
    width = max(map(len, texts.flat))

    def nested(part, depth):
        if isinstance(part, str):
            return part.rjust(width)
        gap = "," + ("\n" * (part.ndim - 1) + " " * (len("tensor(") + depth + 1) if part.ndim > 1 else " ")
        return f"[{gap.join(nested(each, depth + 1) for each in part)}]"

    return f"tensor({nested(texts, 0)}{f', grad_fn=<{grad_fn}>' if grad_fn else ''})\n"


# --------------------------------------------------------------------------------- 1. Self-Attention, first principles


def first_principles(torch, data, context):
    torch.set_printoptions(precision=3, sci_mode=False)
    vocab = {token: torch.tensor(row) for token, row in data["vocab"].items()}

    def embed(tokens):
        return torch.stack([vocab[token] for token in tokens])

    x = embed(data["tokens"][context])
    print(x)

    W = torch.tensor(data["linear_layer"]["W"])
    print(x @ W)

    scores = x @ x.T
    print(scores)
    print(torch.softmax(scores, dim=-1) @ x)

    weights = data["projected_attention"]
    W_query, W_key, W_value = (torch.tensor(weights[name]) for name in ("W_query", "W_key", "W_value"))
    queries, keys, values = x @ W_query, x @ W_key, x @ W_value
    print(torch.softmax(queries @ keys.T / keys.shape[-1] ** 0.5, dim=-1) @ values)

    class SelfAttention(torch.nn.Module):
        def __init__(self, d_in, d_out):
            super().__init__()
            self.W_query = torch.nn.Parameter(torch.rand(d_in, d_out))
            self.W_key = torch.nn.Parameter(torch.rand(d_in, d_out))
            self.W_value = torch.nn.Parameter(torch.rand(d_in, d_out))

        def forward(self, x):
            queries, keys, values = x @ self.W_query, x @ self.W_key, x @ self.W_value
            return torch.softmax(queries @ keys.T / keys.shape[-1] ** 0.5, dim=-1) @ values

    torch.manual_seed(0)
    print(SelfAttention(4, 3)(x))


@pytest.mark.parametrize("context", ["river", "finance"])
def test_first_principles_prints_its_characters(torch, capsys, context):
    data = tutorials.load("first_principles")
    first_principles(torch, data, context)
    stages = (
        "embed",
        "linear_layer",
        "raw_dot_product_scores",
        "attention_on_raw_embeddings",
        "projected_attention",
    )
    expected = [tensor_text(data[stage]["printed"][context], ".3f") for stage in stages]
    expected.append(tensor_text(data["self_attention_class"]["printed"][context], ".3f", "MmBackward0"))
    assert capsys.readouterr().out == "".join(expected)


# ------------------------------------------------------------------------------------------ 3. Self Attention - Basics


def basics(torch, data):
    F = torch.nn.functional
    table = torch.tensor([[0.0, 0.0], *data["embedded_tokens"]], dtype=torch.float32)
    embedded = table[torch.tensor(data["ids"])][0]
    WQ, WK, WV = (torch.tensor(data[name], requires_grad=True) for name in ("WQ", "WK", "WV"))
    Q, K, V = embedded @ WQ, embedded @ WK, embedded @ WV
    print(Q, K, V, sep="\n")

    attn_logits = Q @ K.T
    print(attn_logits)
    scaled_attention_logits = attn_logits / math.sqrt(Q.size()[-1])
    print(scaled_attention_logits)
    attention_weights = F.softmax(scaled_attention_logits, dim=-1)
    print(attention_weights)
    print(attention_weights.sum(dim=-1))
    print(attention_weights @ V)
    print((attention_weights[:, :, None] * V[None]).sum(dim=1))


def test_basics_prints_its_characters(torch, capsys):
    data = tutorials.load("basics_notebook")
    basics(torch, data)
    printed = data["printed"]
    names = {
        "Q": "Mm",
        "K": "Mm",
        "V": "Mm",
        "attn_logits": "Mm",
        "scaled_attention_logits": "Div",
        "attention_weights": "Softmax",
    }
    expected = [tensor_text(printed[name], ".4f", f"{label}Backward0") for name, label in names.items()]
    output = [tensor_text(printed["output"], ".4f", label) for label in ("MmBackward0", "SumBackward1")]
    # A sum that is not 1 in its last bit prints as 1.0000. Within 1e-6 of a tie are 0.0705 in K (0.07045031) and 0.0204
    # in the scaled logits (0.0203508), of all that tutorials 1, 3 and 4 print; float32 is right to 1e-8 there.
    sums = [tensor_text(printed["row_sums"], spec, "SumBackward1") for spec in ("#.0f", ".4f")]
    assert capsys.readouterr().out in ["".join([*expected, each, *output]) for each in sums]


# ------------------------------------------------------------------------------------- 4. Illustrated: Self-Attention


def illustrated(torch, data):
    softmax = torch.nn.functional.softmax
    x = torch.tensor(data["x"], dtype=torch.float32)
    w_key, w_query, w_value = (
        torch.tensor(data[name], dtype=torch.float32) for name in ("w_key", "w_query", "w_value")
    )
    keys = x @ w_key
    querys = x @ w_query
    values = x @ w_value
    print(keys, querys, values, sep="\n")

    attn_scores = querys @ keys.T
    print(attn_scores)
    print(softmax(attn_scores, dim=-1))
    attn_scores_softmax = torch.tensor(data["printed"]["attn_scores_softmax_rounded"])
    print(attn_scores_softmax)
    weighted_values = values[:, None] * attn_scores_softmax.T[:, :, None]
    print(weighted_values)
    outputs = weighted_values.sum(dim=0)
    print(outputs)


def test_illustrated_prints_its_characters(torch, capsys):
    data = tutorials.load("illustrated")
    illustrated(torch, data)
    printed = data["printed"]
    outputs = [printed["output_1_rounded"], *data["computed_not_printed"]["outputs_2_and_3_rounded"]]
    expected = [tensor_text(printed[name], "#.0f") for name in ("keys", "querys", "values", "attn_scores")]
    expected.append(tensor_text(printed["attn_scores_softmax"], ".4e"))
    for rows in (printed["attn_scores_softmax_rounded"], printed["weighted_values_rounded"], outputs):
        expected.append(tensor_text(rows, ".4f"))
    assert capsys.readouterr().out == "".join(expected)


# ------------------------------------------------------------------------------------------- 2. LLMs: Self Attention

TRIPLETS = [
    ("tom chase jerry", "jerry likes cheese", "harry killed voldemort"),
    ("jerry likes cheese", "tom chase jerry", "voldemort likes harry"),
    ("harry killed voldemort", "voldemort likes harry", "tom chase jerry"),
    ("voldemort likes harry", "harry killed voldemort", "cheese chase tom and jerry likes cheese and tom"),
]
VOCAB = sorted({word for triplet in TRIPLETS for sentence in triplet for word in sentence.split()})
VOCAB_SIZE, EMBEDDING_DIM, MAX_SEQ_LEN = len(VOCAB), 8, 6


class Tokenizer:
    """SentencePiece's interface, for words."""

    def encode(self, sentence, out_type=int):
        return [VOCAB.index(word) for word in sentence.split()]


def sentence_embeddings(torch, num_layers, num_heads, epochs, learning_rate):
    """Train the tutorial's model, and return the losses of all steps, the triplets in their order, and the model."""
    nn = torch.nn

    class SelfAttentionBlock(nn.Module):
        def __init__(self, d_model):
            super().__init__()
            self.d_model = d_model
            self.query = nn.Linear(d_model, d_model)
            self.key = nn.Linear(d_model, d_model)
            self.value = nn.Linear(d_model, d_model)
            self.ln = nn.LayerNorm(d_model)

        def split(self, x):
            return x.view(x.size(0), num_heads, -1).transpose(0, 1)

        def forward(self, x):
            q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
            attention = torch.softmax(scores, dim=-1)
            attended = torch.matmul(attention, v).transpose(0, 1).reshape(x.size())
            return self.ln(attended + x)

    class EmbeddingModel(nn.Module):
        def __init__(self, tokenizer):
            super().__init__()
            self.tokenizer = tokenizer
            self.embedding_layer = nn.Embedding(VOCAB_SIZE, EMBEDDING_DIM)
            self.attention_layers = nn.ModuleList(
                [SelfAttentionBlock(EMBEDDING_DIM) for _ in range(num_layers)]
            )

        def _get_positional_embedding(self, seq_len):
            position = torch.arange(0, seq_len, dtype=torch.float64).unsqueeze(1)
            columns = torch.arange(0, EMBEDDING_DIM, 2, dtype=torch.float64)
            div_term = torch.exp(columns * -(math.log(10000.0) / EMBEDDING_DIM))
            pe = torch.zeros(seq_len, EMBEDDING_DIM)
            pe[:, 0::2] = torch.sin(position * div_term)
            pe[:, 1::2] = torch.cos(position * div_term)
            return pe

        def forward(self, sentence):
            ids = torch.tensor(self.tokenizer.encode(sentence, out_type=int)[:MAX_SEQ_LEN], dtype=torch.long)
            x = self.embedding_layer(ids) + self._get_positional_embedding(ids.size(0))
            for layer in self.attention_layers:
                x = layer(x)
            return torch.mean(x, dim=0)

    class ProxyTask:
        def __init__(self, model):
            self.model = model

        def execute(self, main, similar, non_similar):
            main, similar, non_similar = self.model(main), self.model(similar), self.model(non_similar)
            close = torch.log(torch.sigmoid(torch.dot(main, similar)))
            return close + torch.log(torch.sigmoid(-torch.dot(main, non_similar)))

    torch.manual_seed(0)
    model = EmbeddingModel(Tokenizer())
    before = {name: np.array(tensor.numpy()) for name, tensor in model.state_dict().items()}
    proxy_task = ProxyTask(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    dataloader = torch.utils.data.DataLoader(TRIPLETS, batch_size=1, shuffle=True)
    losses, order = [], []
    for epoch in range(epochs):
        total = 0.0
        for (main,), (similar,), (non_similar,) in dataloader:
            optimizer.zero_grad()
            loss = -proxy_task.execute(main, similar, non_similar)
            loss.backward()
            optimizer.step()
            total += loss.item()
            losses.append(loss.item())
            order.append((main, similar, non_similar))
        print(f"--- Epoch {epoch + 1} completed. Average Loss: {total / len(dataloader):.4f} ---")
    return losses, order, before, model("jerry likes voldemort")


@pytest.mark.parametrize(("num_layers", "num_heads"), [(1, 1), (3, 1), (2, 2)])
def test_the_embedding_model_trains_in_step_with_pytorch(capsys, num_layers, num_heads):
    real = pytest.importorskip("torch")
    tape = importlib.import_module("selfattn.tape")
    wanted, wanted_order, _, wanted_vector = sentence_embeddings(real, num_layers, num_heads, 10, 1e-3)
    wanted_lines = capsys.readouterr().out
    losses, order, _, vector = sentence_embeddings(tape, num_layers, num_heads, 10, 1e-3)
    assert order == wanted_order
    np.testing.assert_allclose(losses, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(vector.detach().numpy(), wanted_vector.detach().numpy(), rtol=0, atol=1e-5)
    assert capsys.readouterr().out == wanted_lines


@pytest.mark.parametrize(("num_layers", "num_heads"), [(1, 1), (3, 2)])
def test_the_embedding_model_trains_in_step_with_the_layer(torch, num_layers, num_heads):
    """In float64, with the layer's own weights drawn from the same seed, and Adam on arrays."""
    torch.set_default_dtype(torch.float64)
    losses, order, before, vector = sentence_embeddings(torch, num_layers, num_heads, 3, 1e-2)
    sizes = {"max_seq_len": MAX_SEQ_LEN, "num_layers": num_layers, "num_heads": num_heads}
    rng = sa.torch_rng(0)
    model = layers.EmbeddingModel(Tokenizer(), VOCAB_SIZE, EMBEDDING_DIM, **sizes, dtype=np.float64, rng=rng)
    state = model.state_dict()
    assert list(before) == list(state)
    for name, array in before.items():
        np.testing.assert_allclose(array, state[name], rtol=1e-12)
    task = layers.ProxyTask(model)
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    expected = []
    for triplet in order:
        confidence, pullback = task.vjp(*triplet)
        optimizer.step(pullback(-1.0))
        expected.append(-confidence)
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    np.testing.assert_allclose(vector.detach().numpy(), model("jerry likes voldemort"), rtol=0, atol=1e-9)


# ----------------------------------------------------------------------------------- 5. ScaledDotProductAttention


def attention_module(torch):
    nn, F = torch.nn, torch.nn.functional

    class ScaledDotProductAttention(nn.Module):
        def forward(self, query, key, value, mask=None, dropout=None):
            d_k = key.size(-1)
            scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
            if mask is not None:
                scores = scores.masked_fill(mask.eq(0), -1e9)
            weights = F.softmax(scores, dim=-1)
            if dropout is not None:
                weights = dropout(weights)
            return torch.matmul(weights, value), weights

    return ScaledDotProductAttention()


def batch(rng, shape=(2, 3, 4, 5)):
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]


@pytest.mark.parametrize("kind", [None, np.uint8, np.int64, bool])
def test_the_attention_module_equals_the_layer(torch, kind):
    arrays = batch(np.random.default_rng(0))
    mask = None if kind is None else np.array([[1, 1, 1, 0], [0, 0, 0, 0]], kind)[:, None, None, :]
    query, key, value = (torch.tensor(array, requires_grad=True) for array in arrays)
    out, weights = attention_module(torch)(query, key, value, None if mask is None else torch.tensor(mask))
    (wanted, wanted_weights), pullback = layers.ScaledDotProductAttention().vjp(*arrays, mask)
    np.testing.assert_allclose(out.detach().numpy(), wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(weights.detach().numpy(), wanted_weights, rtol=0, atol=1e-6)
    if kind is not None:  # a row without open keys is uniform
        assert (weights[1] == 0.25).all().item()
    (out * torch.tensor(arrays[0])).sum().backward()
    for tensor, grad in zip((query, key, value), pullback(arrays[0])[0], strict=True):
        np.testing.assert_allclose(tensor.grad.numpy(), grad, rtol=0, atol=5e-6)


def test_the_attention_module_takes_a_dropout_for_each_call(torch):
    query, key, value = (torch.tensor(array) for array in batch(np.random.default_rng(1)))
    module, dropout = attention_module(torch), torch.nn.Dropout(0.25)
    plain, whole = module(query, key, value)
    out, weights = module(query, key, value, dropout=dropout)
    kept = (weights != 0).numpy()
    assert kept.any()
    assert not kept.all()
    np.testing.assert_allclose(weights.numpy()[kept], whole.numpy()[kept] / 0.75, rtol=1e-6)
    assert torch.equal(out, torch.matmul(weights, value))
    dropout.eval()
    assert torch.equal(module(query, key, value, dropout=dropout)[0], plain)
