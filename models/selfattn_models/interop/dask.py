"""Embeddings of more texts than one machine has."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from selfattn.engine import Array, disk, import_extra
from selfattn.interop.dask.workers import on_worker, task
from selfattn.training.checkpoint import digest
from selfattn_models._encoders import column as checked
from selfattn_models._encoders import digest_of, encoder

dask: Any = import_extra("dask", "dask")
da: Any = import_extra("dask.array", "dask")

_one_at_a_time = threading.Lock()  # a call uses all threads of its worker


def encode(
    model: str | os.PathLike[str],
    texts: Any,
    *,
    column: str | None = None,
    dtype: str | None = None,
    out: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """Compute the embedding of each text of a bag, an array or a column: the model's ``encode`` on each partition.

    A worker loads the folder once and maps its weights, which are not sent. It holds the model, a partition of texts
    and their embeddings. An embedding has the same bits as from ``encode``, on processors with the same instruction
    set.

    Parameters
    ----------
    model : path
        A folder that each worker can read, as :func:`selfattn_models.load` takes it, and ``dtype``.
    texts : dask.bag.Bag, dask.dataframe.Series or DataFrame, or dask.array.Array
        One text an element; a DataFrame has them in ``column``.
    column : str, optional
    out : path, optional
        Compute now, and write the embeddings to this file: ``.npy``, or in parts to a folder ``.parquet``, in a column
        ``embedding``, next to the index of a column, and to all columns of a DataFrame. What an interrupted call has
        written is kept, in ``…partial`` for ``.npy``; the same call continues, and a part is computed again if its
        texts, the options or the files of the model differ, wherever the folder is.
    **options
        As the model's ``encode`` takes them: ``prompt``, ``normalize``, ``batch_size``.

    Returns
    -------
    dask.array.Array of float32, shape (n, d)
        With a chunk for each partition, of unknown sizes for a bag or a column. With ``out`` the file, mapped, or the
        folder's path.

    Raises
    ------
    TypeError, ValueError, OSError
        Other texts, a folder or an option that the model does not take, before anything is computed; a missing text;
        a folder ``.parquet`` with other parts.

    Examples
    --------
    >>> import dask.bag
    >>> from selfattn_models.interop.dask import encode
    >>> lines = dask.bag.read_text("lines-*.txt")  # doctest: +SKIP
    >>> encode("all-MiniLM-L6-v2", lines, out="vectors.npy")  # doctest: +SKIP
    """
    frame = None
    if column is not None:
        frame, texts = texts, texts[column]
    if not callable(getattr(texts, "to_delayed", None)) or getattr(texts, "ndim", 1) != 1:
        raise TypeError(
            f"texts must be a bag, a column or a one-dimensional array of Dask, got {type(texts).__name__}"
        )
    width = encoder(model, dtype).encode([], **options).shape[1]
    how = str(Path(model).absolute()), dtype, options
    parts = np.ravel(texts.to_delayed()).tolist()
    sizes = texts.chunks[0] if isinstance(texts, da.Array) else (np.nan,) * len(parts)
    if out is None:
        blocks = [
            da.from_delayed(task(embed, *how, part), (n, width), np.float32)
            for n, part in zip(sizes, parts, strict=True)
        ]
        none = [da.zeros((0, width), dtype=np.float32)]
        return da.concatenate(blocks or none, allow_unknown_chunksizes=True)
    path = Path(out).absolute()
    if path.suffix == ".parquet":
        path.mkdir(exist_ok=True)
        names = [str(path / f"part.{n:06}.parquet") for n in range(len(parts))]
        if others := {str(file) for file in path.glob("[!.]*.parquet")} - {*names}:
            raise FileExistsError(
                f"{path} also has parts of other embeddings, such as {min(others)}; give another folder, or remove them"
            )
        if frame is not None:
            parts = frame.to_delayed()
        tasks = [task(write_table, name, column, *how, part) for name, part in zip(names, parts, strict=True)]
        dask.compute(*tasks)
        return path
    if path.suffix != ".npy":
        raise ValueError(f"out must end with .npy or .parquet, got {path.name!r}")
    partial = path.with_name(f"{path.name}.partial")
    rows = partial / "rows.npy"
    if np.isnan(sizes).any():
        sizes = dask.compute(*[task(count, part) for part in parts])
    ends = np.cumsum([0, *sizes]).astype(int).tolist()
    if not rows.is_file() or rows.is_symlink() or np.load(rows, mmap_mode="r").shape != (ends[-1], width):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        np.lib.format.open_memmap(rows, "w+", np.float32, (ends[-1], width)).flush()
    places = enumerate(zip(ends, parts, strict=False))
    dask.compute(*[task(write_rows, str(rows), n, begin, *how, part) for n, (begin, part) in places])
    rows.replace(path)
    shutil.rmtree(partial)
    return da.from_array(np.load(path, mmap_mode="r"), chunks=(tuple(sizes) or (0,), width))


def _embedded(folder: str, dtype: str | None, options: dict[str, Any], part: Any) -> Array:
    """Return the embeddings of a partition; warnings reach the client, too."""
    with _one_at_a_time, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: Array = encoder(folder, dtype).encode(checked(list(part)), **options)
    for each in caught:
        (getattr(sys.modules.get("distributed"), "warn", None) or warnings.warn)(
            str(each.message), each.category
        )
    return found


@on_worker
def embed(*arguments: Any) -> Array:
    """Return the embeddings of a partition."""
    return _embedded(*arguments)


@on_worker
def count(part: Any) -> int:
    """Return the number of texts of a partition."""
    return len(list(part))


@on_worker
def write_rows(
    file: str, n: int, begin: int, folder: str, dtype: str | None, options: dict[str, Any], part: Any
) -> None:
    """Write the embeddings of a partition to their rows of a file.

    Nothing is written if a file n of its folder says that they are there.
    """
    texts, done = checked(list(part)), Path(file).with_name(str(n))
    key = f"{begin} {_key(folder, dtype, options, texts)}"
    if disk.read_kept(done) != key.encode():
        rows = np.load(file, mmap_mode="r+")
        rows[begin : begin + len(texts)] = _embedded(folder, dtype, options, texts)
        rows.flush()
        disk.write_files(done.parent, {done.name: key.encode()})


@on_worker
def write_table(
    file: str, name: str | None, folder: str, dtype: str | None, options: dict[str, Any], part: Any
) -> None:
    """Write the embeddings of a partition, and what it has beside its texts, to a Parquet file, unless it has them."""
    pa, parquet = import_extra("pyarrow"), import_extra("pyarrow.parquet")
    table, kept, stored = pa.table({}), b"", pa.BufferOutputStream()
    if hasattr(part, "index") and hasattr(part, "columns" if name else "to_frame"):  # of pandas
        table = pa.Table.from_pandas(part if name else part.to_frame()[[]], preserve_index=True)
        with pa.ipc.new_stream(stored, table.schema) as stream:
            stream.write_table(table)
        kept = stored.getvalue().to_pybytes()
    texts = checked(list(part if name is None else part[name]))
    key = _key(folder, dtype, options, texts, kept)
    if Path(file).is_file() and (parquet.read_schema(file).metadata or {}).get(b"selfattn") == key.encode():
        return
    rows = _embedded(folder, dtype, options, texts)
    lists = pa.FixedSizeListArray.from_arrays(rows.ravel(), rows.shape[1])
    described = table.schema.metadata or {}
    table = table.append_column("embedding", lists) if table.num_columns else pa.table({"embedding": lists})
    content = pa.BufferOutputStream()
    parquet.write_table(table.replace_schema_metadata({**described, "selfattn": key}), content)
    disk.write_files(Path(file).parent, {Path(file).name: content.getvalue().to_pybytes()})


def _key(folder: str, dtype: str | None, options: dict[str, Any], texts: list[str], kept: bytes = b"") -> str:
    """Return a digest of all that embeddings follow from, and of what is kept beside them."""
    of_model = digest_of(Path(folder))
    return digest([of_model, str(dtype), sorted(map(repr, options.items())), texts, kept])
