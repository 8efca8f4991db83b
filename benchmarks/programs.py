"""Programs as texts on PyTorch write them, which run on PyTorch and on selfattn.tape: a program takes the library.

`tutorial` is a step of tutorial 2's training: three sentences, a block of attention, log σ, Adam. `lecture` is a step
of a lecture's GPT: 4 layers of 64 columns with 4 heads, each a module of its own, on 16 x 32 letters. `block` is a
block of nanoGPT and its gradients: 12 heads, 768 columns, 12 x 256 tokens.
"""

import math


def tutorial(torch):
    """Return a training step of a model of sentences, one triplet at a time."""
    nn, width, words = torch.nn, 32, 100

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
            self.ln = nn.LayerNorm(width)

        def forward(self, x):
            scores = torch.matmul(self.query(x), self.key(x).transpose(-2, -1)) / math.sqrt(width)
            return self.ln(torch.matmul(torch.softmax(scores, dim=-1), self.value(x)) + x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding_layer = nn.Embedding(words, width)
            self.attention_layers = nn.ModuleList([Block()])

        def positions(self, length):
            position = torch.arange(0, length, dtype=torch.float).unsqueeze(1)
            angles = position * torch.exp(torch.arange(0, width, 2).float() * (-math.log(10000.0) / width))
            table = torch.zeros(length, width)
            table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
            return table

        def forward(self, ids):
            x = self.embedding_layer(ids) + self.positions(len(ids))
            for layer in self.attention_layers:
                x = layer(x)
            return torch.mean(x, dim=0)

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    sentences = [torch.randint(words, (length,)) for length in (6, 8, 7)]

    def step():
        main, similar, other = (model(ids) for ids in sentences)
        likely = torch.log(torch.sigmoid(torch.dot(main, similar)))
        loss = -(likely + torch.log(torch.sigmoid(-torch.dot(main, other))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def lecture(torch):
    """Return a training step of a GPT whose heads are modules."""
    nn, f, width, heads, context, letters = torch.nn, torch.nn.functional, 64, 4, 32, 65

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.query, self.value = (
                nn.Linear(width, width // heads, bias=False) for _ in range(3)
            )
            self.register_buffer("tril", torch.tril(torch.ones(context, context)))
            self.dropout = nn.Dropout(0.0)

        def forward(self, x):
            time = x.shape[1]
            k, q = self.key(x), self.query(x)
            weights = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            weights = weights.masked_fill(self.tril[:time, :time] == 0, float("-inf"))
            return self.dropout(f.softmax(weights, dim=-1)) @ self.value(x)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([Head() for _ in range(heads)])
            self.proj = nn.Linear(width, width)
            self.ffwd = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)

        def forward(self, x):
            y = self.ln1(x)
            x = x + self.proj(torch.cat([head(y) for head in self.heads], dim=-1))
            return x + self.ffwd(self.ln2(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.position = nn.Embedding(letters, width), nn.Embedding(context, width)
            self.blocks = nn.Sequential(*[Block() for _ in range(4)])
            self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

        def forward(self, ids, targets):
            x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
            logits = self.head(self.ln(self.blocks(x)))
            return f.cross_entropy(logits.view(-1, letters), targets.view(-1))

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        ids = torch.randint(letters, (16, context + 1))
        loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def block(torch):
    """Return a block of a GPT with its gradients."""
    nn, f, width, heads = torch.nn, torch.nn.functional, 768, 12

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.c_fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, t, c = x.size()
            q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
            q, k, v = (y.view(b, t, heads, c // heads).transpose(1, 2) for y in (q, k, v))
            y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
            return x + self.out(f.gelu(self.c_fc(self.ln_2(x))))

    torch.manual_seed(0)
    model, x = Block(), torch.randn(12, 256, width, requires_grad=True)

    def step():
        model.zero_grad()
        x.grad = None
        loss = model(x).square().mean()
        loss.backward()
        return loss.item()

    return step
