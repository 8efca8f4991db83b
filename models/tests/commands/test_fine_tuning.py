"""training.fit of encoders and cross-encoders on texts: what a batch is, pieces, the best kept, and
sentence-transformers.
"""

import functools
import re
import warnings

import numpy as np
import pytest
from refusals import refusals
from text_folders import WORDS, add_pipeline, old_pooling, save_bert

import selfattn_models as models
from selfattn import files, nn, optim, training
from selfattn_models.cli.fine_tune import _split

DRAW = np.random.default_rng(0)
# No text is there twice: each begins with another number of words.
TEXTS = list(dict.fromkeys(" ".join(DRAW.choice(WORDS[:14], DRAW.integers(2, 9))) for _ in range(400)))
RANKING, COSINE, TRIPLET = nn.MultipleNegativesRankingLoss, nn.CosineSimilarityLoss, nn.TripletLoss
SCORES = DRAW.random(99).round(3).tolist()


def examples(loss, number, first=0):
    count = {COSINE: 2, TRIPLET: 3, RANKING: 3}[type(loss)]
    rows = [tuple(TEXTS[first + count * n : first + count * (n + 1)]) for n in range(number)]
    return [(*row, score) for row, score in zip(rows, SCORES, strict=False)] if loss.labelled else rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_bert(
        tmp_path_factory.mktemp("bert"), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    sentence = {"prompts": {"query": "query: ", "document": ""}, "similarity_fn_name": "dot"}
    return add_pipeline(
        folder, old_pooling("mean"), normalize=True, sentence=sentence, transformer={"max_seq_length": 24}
    )


@pytest.fixture
def model(folder):
    return models.load(folder)


@pytest.fixture(scope="module")
def crossed(tmp_path_factory):
    more = {"kind": "BertForSequenceClassification", "num_labels": 1, "id2label": {"0": "a"}}
    return save_bert(
        tmp_path_factory.mktemp("cross"), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **more
    )


def fit(model, pairs, loss, **options):
    return training.fit(model, pairs, loss, **({"log_every": None, "shuffle": False} | options))


@pytest.mark.parametrize("loss", [RANKING(), COSINE(), TRIPLET(triplet_margin=0.5)], ids=repr)
def test_a_training_is_what_one_writes_by_hand(loss, folder):
    ours, theirs = models.load(folder), models.load(folder)
    pairs = examples(loss, 40)
    history = fit(ours, pairs, loss, validation=pairs[:5])
    optimizer = optim.AdamW(theirs.parameters(), lr=5e-5)
    for start, expected in zip((0, 32), history.step_losses, strict=True):
        columns = [list(column) for column in zip(*pairs[start : start + 32], strict=True)]
        labels = columns.pop() if loss.labelled else None
        computed = [theirs.vjp(column) for column in columns]
        value, slopes = loss.vjp([y for y, _ in computed], labels)
        grads = {}
        for (_, pullback), d in zip(computed, slopes(1.0), strict=True):
            nn.add_gradients(grads, pullback(d))
        optimizer.step(grads)
        np.testing.assert_allclose(value, expected, rtol=2e-6)
    assert_same(ours, theirs)
    columns = list(zip(*pairs[:5], strict=True))
    columns = [ours.encode(list(column)) for column in (columns[:-1] if loss.labelled else columns)]
    expected = loss(columns, SCORES[:5] if loss.labelled else None)
    np.testing.assert_allclose(history.validation_losses[-1][1], expected, rtol=2e-6)


def assert_same(ours, theirs, tolerance=3e-5):
    """Compare parameters; the gradient of a key's bias is rounding, which Adam scales up."""
    for name, array in ours.parameters().items():
        if "key.bias" not in name:
            other = theirs.parameters()[name]
            np.testing.assert_allclose(
                array, other, rtol=0, atol=tolerance * np.abs(other).max(), err_msg=name
            )


@pytest.mark.parametrize("kind", [RANKING, COSINE, TRIPLET])
def test_pieces_have_the_gradient_of_the_whole(kind, folder):
    pairs = examples(kind(), 10)
    columns = tuple(map(list, zip(*pairs, strict=True)))
    model = models.load(folder)
    found = [
        training.objectives.objective_of(model, kind(mini_batch_size=size)).gradients(columns)
        for size in (None, 7, 20)
    ]
    for value, grads, *_ in found[1:]:
        np.testing.assert_allclose(value, found[0][0], rtol=1e-6)
        for name, grad in grads.items():
            whole = found[0][1][name]
            # sums of some hundred terms in another order; the gradient of a key's bias is rounding
            atol = 3e-6 * max(np.abs(x).max() for x in found[0][1].values())
            np.testing.assert_allclose(grad, whole, rtol=0, atol=atol, err_msg=name)


class Dropped(nn.Module):
    """A model of texts that drops, and notes what."""

    def __init__(self):
        self.layer, self.drop, self.noted = nn.Linear(4, 4, rng=0), nn.Dropout(0.5, rng=1), []

    def forward(self, texts):
        self.noted.append(
            y := self.drop(self.layer(np.float32([[len(text), text.count("s"), 1, 2] for text in texts])))
        )
        return y

    def vjp(self, texts):
        x = np.float32([[len(text), text.count("s"), 1, 2] for text in texts])
        y, back = self.layer.vjp(x)
        z, drop_back = self.drop.vjp(y)
        self.noted.append(z)
        return z, lambda d: {f"layer.{name}": g for name, g in back(drop_back(d)[0])[1].items()}


def test_what_drops_in_a_piece_drops_again_in_its_gradient():
    model = Dropped()
    fit(model, examples(RANKING(), 4), RANKING(mini_batch_size=5), steps=1)
    first, again = model.noted[:3], model.noted[3:]
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(first[0], first[1])


def test_a_cross_encoder_and_labels_of_texts(crossed):
    model = models.load(crossed)
    pairs = [(*pair, float(n % 2)) for n, pair in enumerate(zip(TEXTS[::2], TEXTS[1::2], strict=False))][:8]
    logits = model.predict([pair[:2] for pair in pairs])[:, 0]
    expected = nn.BCEWithLogitsLoss()(logits, [label for *_, label in pairs])
    history = fit(model, pairs, nn.BCEWithLogitsLoss(), epochs=20, lr=1e-3, validation=pairs)
    np.testing.assert_allclose(history.step_losses[0], expected, rtol=1e-6)
    assert history.validation_losses[-1][1] < 0.3 * expected
    words = nn.EmbeddingModel(lambda text: [len(text) % 9], 9, 4, max_seq_len=8, rng=0)
    history = fit(words, [[text, [1.0, 0, 0, 0]] for text in TEXTS[:3]], nn.MSELoss(), lr=0.1, epochs=30)
    assert history.step_losses[-1] < 0.1 * history.step_losses[0]


def test_one_text_twice_in_a_batch_is_told_once(folder):
    model = models.load(folder)
    pairs = [("the sea", "a ship"), ("old stones", "the sea"), ("near water", "calm"), ("dark sea", "calm")]
    with pytest.warns(UserWarning, match="a batch holds 'the sea' 2 times") as told:
        fit(model, pairs, RANKING(), epochs=3)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, [(*pair, 1.0) for pair in pairs], COSINE())  # no text counts as wrong here


def test_the_best_is_kept_and_a_resumed_training_has_its_bits(folder, tmp_path):
    pairs, scores = examples(RANKING(), 24), [0.1, 0.7, 0.3, 0.5, 0.2, 0.4, 0.6]
    options = {"batch_size": 6, "epochs": 3, "validate_every": 2, "warmup_steps": 3, "rng": 0, "lr": 1e-3}

    def trained(steps=None, resume=False, file=None):
        seen = []

        def evaluator(model):
            seen.append({name: array.copy() for name, array in model.parameters().items()})
            return scores[len(seen) - 1 + 3 * resume]

        model = models.load(folder)
        more = {"callbacks": [lambda step: step.number == steps], "resume": resume, "checkpoint": file}
        return model, fit(model, pairs, RANKING(), evaluator=evaluator, shuffle=True, **options, **more), seen

    model, history, seen = trained()
    assert history.evaluations == list(zip(range(0, 14, 2), scores, strict=True))
    np.testing.assert_equal(model.parameters(), seen[1])
    stopped, first, before = trained(steps=4, file=tmp_path / "checkpoint")
    assert first.evaluations == history.evaluations[:3]
    np.testing.assert_equal(stopped.parameters(), before[1])
    again, resumed, _ = trained(resume=True, file=tmp_path / "checkpoint")
    assert resumed == history
    np.testing.assert_equal(again.parameters(), model.parameters())


def test_warm_up_is_transformers_schedule(folder):
    rates = []
    options = {"batch_size": 2, "epochs": 2, "warmup_steps": 3, "lr": 1.0, "optimizer": None}
    model = nn.EmbeddingModel(lambda text: [len(text) % 9], 9, 4, max_seq_len=8, rng=0)
    fit(model, examples(RANKING(), 10), RANKING(), callbacks=[lambda step: rates.append(step.lr)], **options)
    expected = [0, 1 / 3, 2 / 3, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7]
    np.testing.assert_allclose(rates, expected, rtol=1e-12)


PAIR = [("a", "b")]
test_refused = refusals(
    (lambda m: fit(m, PAIR, COSINE()), ValueError, "takes 2 columns of embeddings, not 1"),
    (lambda m: fit(m, [("a", 1.0)], RANKING()), TypeError, "must be a tuple of texts; see fit"),
    (lambda m: fit(m, PAIR, RANKING), TypeError, "loss is a class"),
    (lambda m: fit(m, PAIR, RANKING(), evaluator=1), TypeError, "evaluator must be a function"),
    (lambda m: fit(m, PAIR, RANKING(), warmup_steps=1, scheduler=1), ValueError, "which one is meant"),
    (
        lambda m: fit(m, iter(PAIR), RANKING(), warmup_steps=1, shuffle=None),
        ValueError,
        "the number of steps",
    ),
    given="model",
)


# ---------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, rows):
    with open(name, "w", encoding="utf-8") as file:
        file.writelines("\t".join(map(str, row)) + "\n" for row in rows)
    return name


def test_pairs_are_learned_and_the_folder_says_what_it_said(folder, here, run, tmp_path):
    table = write("pairs.tsv", zip(TEXTS[:60], TEXTS[60:120], strict=True))
    shown = run("train", "--from", folder, table, "--out", "mine", "--epochs", 50, "--lr", 0.01).out
    numbers = re.findall(r"(before|after): recall@1 (\S+), mean reciprocal rank (\S+) among 60 texts", shown)
    assert shown.startswith("54 rows to learn from, 6 held out; before: ")
    assert [kind for kind, *_ in numbers] == ["before", "after", "before"]
    assert numbers[0] == numbers[2]
    ours, base = models.load("mine"), models.load(folder)
    assert (ours.pipeline.prompts, ours.pipeline.similarity) == (base.pipeline.prompts, "dot")
    assert ours.pipeline.modes == base.pipeline.modes and not (tmp_path / "mine" / "unfinished").exists()
    queries, answers = ours.encode_query(TEXTS[:60]), ours.encode_document(TEXTS[60:120])
    assert (np.argmax(queries @ answers.T, axis=1) == np.arange(60)).mean() > 0.7  # 54 are learned by heart
    library = pytest.importorskip("sentence_transformers")
    theirs = library.SentenceTransformer("mine", device="cpu")
    np.testing.assert_allclose(theirs.encode_query(TEXTS[:5]), queries[:5], rtol=0, atol=1e-5)


def test_copies_are_held_out_together():
    rows = [(f"q {n // 2}", f"a {n}") for n in range(40)] + [("Q  0", "a")]
    kept, held = _split(rows, np.random.default_rng(0).permutation(41).tolist())
    assert len(held) == 4 and not {row[0].lower() for row in held} & {row[0].lower() for row in kept}
    scored = [(f"a {n % 20}", f"b {n % 20}", 0.5) for n in range(39)] + [("b 19", "A 19", 0.5)]
    kept, held = _split(scored, list(range(40)))
    assert held == [scored[n] for n in (0, 20, 1, 21)]


def test_scored_pairs_and_going_on_after_a_full_disk(folder, crossed, here, run, monkeypatch):
    table = write("scores.tsv", zip(TEXTS[:40], TEXTS[40:80], SCORES[:40], strict=True))
    for base in (folder, crossed):
        options = ["train", "--from", base, table, "--epochs", 4, "--batch-size", 8, "--out"]
        assert "correlation with the scores" in run(*options, base.name).out

        def full(*_):
            raise OSError(28, "no space left")

        with monkeypatch.context() as patch:
            stop = functools.partial(training.fit, callbacks=[lambda step: step.number == 7])
            patch.setattr(training, "fit", stop)
            patch.setattr(models, "save", full)
            run(*options, f"{base.name} again", code=1)
        run(*options, f"{base.name} again", "--resume")
        np.testing.assert_equal(*(models.load(f"{base.name}{end}").parameters() for end in ("", " again")))


def test_neighbours_are_told_from_other_sentences(here, run):
    write("text.txt", zip(TEXTS[:300], strict=True))
    options = [
        "train",
        "text.txt",
        "--out",
        "m",
        "--dim",
        "16",
        "--epochs",
        "2",
        "--tokenizer",
        "whitespace",
        "--force",
    ]
    assert "300 examples" in run(*options).out
    assert files.load_model("m")("the sea").shape == (16,)
    assert "300 triplets" in run(*options, "--objective", "proxy").out
    assert "300 examples" in run(*options, "--far", "20").out


@pytest.mark.parametrize(
    ("options", "rows", "code", "message"),
    [
        (["--dim", "8"], [("a", "b")] * 20, 2, "--dim is for a new model, not for one that --from names"),
        ([], [("a", "b")] * 9, 1, "has 9 rows; at least 10 are needed"),
        ([], [("a", "b"), ("a",)], 1, "expected two or more texts between tabs"),
        ([], [("a", "b"), ("a", "b", "c")], 1, "a line has 3 columns, the first 2"),
        ([], [("a", "b", "c", 1)] * 20, 1, "a number follows two texts, not 3"),
        ([], [("a", "b", n / 2) for n in range(20)], 1, "line 4: the score 1.5 is not from -1 to 1"),
        ([], [("a", n) for n in range(20)], 1, "no query has so few rows"),
    ],
)
def test_the_command_refuses(folder, here, run, options, rows, code, message):
    assert (
        message
        in run("train", "--from", folder, write("pairs.tsv", rows), "--out", "m", *options, code=code).err
    )


# ------------------------------------------------------------------------------------------- sentence-transformers


def theirs_trained(model, columns, loss, steps, labels=None):
    """Train a model of sentence-transformers by its loss and PyTorch's AdamW; return the losses."""
    torch = pytest.importorskip("torch")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for batch, label in zip(columns, labels or [None] * len(columns), strict=True):
        value = loss(batch, None if label is None else torch.tensor(label))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert len(losses) == steps
    return losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "loss", [RANKING(), RANKING(mini_batch_size=5), COSINE(), TRIPLET(triplet_margin=0.5)], ids=repr
)
def test_a_hundred_steps_are_those_of_sentence_transformers(loss, folder, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers import losses

    theirs, ours = library.SentenceTransformer(str(folder), device="cpu"), models.load(folder)
    theirs.train()
    rows = [examples(loss, 4, first=12 * (n % 20)) for n in range(100)]
    columns = [[list(column) for column in zip(*batch, strict=True)] for batch in rows]
    labels = [column.pop() for column in columns] if loss.labelled else None
    of_theirs = {RANKING: losses.MultipleNegativesRankingLoss, COSINE: losses.CosineSimilarityLoss}
    their_loss = of_theirs.get(type(loss), lambda model: losses.TripletLoss(model, triplet_margin=0.5))(
        theirs
    )
    batches = [[theirs.preprocess(column) for column in batch] for batch in columns]
    expected = theirs_trained(theirs, batches, their_loss, 100, labels)
    history = fit(ours, [row for batch in rows for row in batch], loss, batch_size=4, lr=1e-3)
    assert_hundred_steps(history, expected, ours, theirs, tmp_path)
    assert theirs.similarity_fn_name == "dot"


def assert_hundred_steps(history, expected, ours, theirs, tmp_path):
    np.testing.assert_allclose(history.step_losses, expected, rtol=3e-5)
    theirs.save(str(tmp_path))
    assert_same(ours, models.load(tmp_path))


@pytest.mark.filterwarnings("ignore")
def test_a_cross_encoder_trains_as_in_sentence_transformers(crossed, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.cross_encoder import losses

    theirs, ours = library.CrossEncoder(str(crossed), device="cpu"), models.load(crossed)
    theirs.train()
    rows = [
        [(*pair, SCORES[n]) for n, pair in enumerate(examples(COSINE(), 4, 8 * (k % 30)))] for k in range(100)
    ]
    rows = [[(a, b, score) for a, b, _, score in batch] for batch in rows]
    batches = [[[a for a, _, _ in batch], [b for _, b, _ in batch]] for batch in rows]
    labels = [[score for *_, score in batch] for batch in rows]
    expected = theirs_trained(theirs, batches, losses.BinaryCrossEntropyLoss(theirs), 100, labels)
    history = fit(
        ours, [row for batch in rows for row in batch], nn.BCEWithLogitsLoss(), batch_size=4, lr=1e-3
    )
    assert_hundred_steps(history, expected, ours, theirs, tmp_path)
