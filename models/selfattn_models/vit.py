"""Vision transformers: ViT and DINOv2, on arrays of pixels. Dosovitskiy et al., 2021; Oquab et al., "DINOv2", 2023."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn.engine import Array, as_array, copy_doc, linear_backward, transformer
from selfattn.engine import linear as multiply
from selfattn.engine.transformer import Transformer
from selfattn.nn.module import Gradients, checked_pullback
from selfattn_models._folder import Config
from selfattn_models._pretrained import Parameters, Pretrained, Pulled, Shapes, linear

Grid: TypeAlias = tuple[int, int]

CLASS, PLACES = "embeddings.cls_token", "embeddings.position_embeddings"
PATCHES = "embeddings.patch_embeddings.projection"


class ViTModel(Pretrained):
    """ViT's encoder, or DINOv2's, under the names of ``transformers.ViTModel`` and ``Dinov2Model``.

    Called with pixels (n, channels, height, width), or of one image, it returns the last hidden states (n, 1 +
    patches, d), the class token first. Pixels must be scaled and normalised as the model was trained. Images of ViT
    have the size that the configuration says; DINOv2 takes any multiple of the patches, and resizes its table of
    positions.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn_models as models
    >>> config = {
    ...     "model_type": "vit", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    ...     "intermediate_size": 16,
    ...     "image_size": 8, "patch_size": 4,
    ... }
    >>> model = models.ViTModel(config, rng=0)
    >>> model(np.zeros((2, 3, 8, 8), np.float32)).shape
    (2, 5, 8)
    """

    _norm_in_states: ClassVar[bool] = False
    kinds: ClassVar[dict[str, str]] = {"vit": "ViT", "dinov2": "Dinov2"}
    prefix = "vit."
    layer_name = "encoder.layer."
    fields: ClassVar[dict[str, str]] = {
        "attention_norm": "layernorm_before",
        "query": "attention.attention.query",
        "key": "attention.attention.key",
        "value": "attention.attention.value",
        "output": "attention.output.dense",
        "feed_forward_norm": "layernorm_after",
        "up": "intermediate.dense",
        "down": "output.dense",
    }
    names_of_dino: ClassVar[dict[str, str]] = {
        "attention_norm": "norm1",
        "feed_forward_norm": "norm2",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    }

    def _read(self, config: Config) -> None:
        self.dino = config.raw("model_type") == "dinov2"
        self.prefix = "dinov2." if self.dino else "vit."  # type: ignore[misc]
        self.hidden_size = config.size("hidden_size")
        self.num_layers = config.size("num_hidden_layers", least=0)
        self.num_heads = config.size("num_attention_heads")
        self.image, self.patch = config.size("image_size", 224), config.size("patch_size", 16)
        self.channels = config.size("num_channels", 3)
        self.activation = config.activation("hidden_act")
        self.eps = config.number("layer_norm_eps", 1e-6 if self.dino else 1e-12)
        self.unbiased = () if config.flag("qkv_bias", True) else ("query", "key", "value")
        if self.dino:
            self.factors = {"output": "layer_scale1.lambda1", "down": "layer_scale2.lambda1"}
            ratio = config.number("mlp_ratio", 4)
            if ratio * self.hidden_size >= 2**31:
                raise config.error(f"mlp_ratio {ratio} is too large")
            self.wide = int(self.hidden_size * ratio)
        else:
            self.wide = config.size("intermediate_size")
        config.check_multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_heads)
        config.check_multiple("image_size", self.image, "patch_size", self.patch)

    def _more_shapes(self) -> tuple[Shapes, bool]:
        d = self.hidden_size
        return {"embeddings.mask_token": (1, d)} if self.dino else linear("pooler.dense", d, d), True

    def _settings(self, p: Parameters, longest: int) -> Transformer:  # the same for all lengths
        d = self.hidden_size
        p.array(CLASS, 1, 1, d)
        p.array(PLACES, 1, (self.image // self.patch) ** 2 + 1, d)
        p.array(f"{PATCHES}.weight", d, self.channels, self.patch, self.patch)
        p.array(f"{PATCHES}.bias", d)
        return Transformer(self._layers(p, longest), final_norm=self._norm(p, "layernorm", self.hidden_size))

    def _fields(self, n: int) -> dict[str, str]:
        return self.fields | self.names_of_dino if self.dino else self.fields

    def _options(self, n: int, longest: int, dtype: Any) -> dict[str, Any]:
        return {"norm_first": True}

    # ------------------------------------------------------------------------------------------------------ pixels

    def _patches(self, pixels: npt.ArrayLike) -> tuple[Array, Grid]:
        """Return (images, patches, channels · patch · patch), and the numbers of rows and columns of patches."""
        images, patch = as_array("pixels", pixels), self.patch
        dtype = self.arrays[CLASS].dtype
        if images.dtype != dtype:
            scaled = "scaled and normalised as the model was trained"
            raise TypeError(f"pixels must be {dtype}, {scaled}, not {images.dtype}")
        images = images[None] if images.ndim == 3 else images
        sides = images.shape[2:]
        fits = (
            all(n > 0 and n % patch == 0 for n in sides) if self.dino else sides == (self.image, self.image)
        )
        if images.ndim != 4 or images.shape[1] != self.channels or not fits:
            own = f"{self.image}, {self.image})"
            own = f"height, width) with multiples of {patch}" if self.dino else own
            raise ValueError(f"pixels must have shape (n, {self.channels}, {own}, not {np.shape(pixels)}")
        n, _, height, width = images.shape
        down, across = height // patch, width // patch
        cut = images.reshape(n, self.channels, down, patch, across, patch).transpose(0, 2, 4, 1, 3, 5)
        return cut.reshape(n, down * across, self.channels * patch**2), (down, across)

    def _resized(self, positions: Array, grid: Grid, back: bool = False) -> Array:
        """Resize the table of positions (1, 1 + patches, d) to a grid.

        With ``back``, lead from its gradient there to that of the table.
        """
        side, d = self.image // self.patch, self.hidden_size
        if grid == (side, side):
            return positions
        stretches = [_cubic(side, to).astype(self.arrays[PLACES].dtype) for to in grid]
        sums, shape = ("ik,jl,ijd->kld", grid) if back else ("ik,jl,kld->ijd", (side, side))
        square = np.einsum(sums, *stretches, positions[0, 1:].reshape(*shape, d), optimize=True)
        return np.concatenate([positions[:, :1], square.reshape(1, -1, d)], axis=1)

    def _weight(self) -> Array:
        weight: Array = self.arrays[f"{PATCHES}.weight"].reshape(self.hidden_size, -1)
        return weight

    def _rows(self, pixels: npt.ArrayLike) -> tuple[Array, Array, Array, Grid]:
        """Return the rows of all images, where each image begins, the patches, and their grid."""
        patches, grid = self._patches(pixels)
        n, count, _ = patches.shape
        x = np.empty((n, count + 1, self.hidden_size), patches.dtype)
        x[:, :1] = self.arrays[CLASS]
        x[:, 1:] = multiply(patches, self._weight(), self.arrays[f"{PATCHES}.bias"])
        x += self._resized(self.arrays[PLACES], grid)
        return x.reshape(-1, self.hidden_size), np.arange(n + 1) * (count + 1), patches, grid

    def forward(self, pixels: npt.ArrayLike) -> Array:
        """Compute the last hidden states.

        Parameters
        ----------
        pixels : ndarray, shape (n, channels, height, width) or (channels, height, width)

        Returns
        -------
        ndarray, shape (n, 1 + patches, d) or (1 + patches, d)
        """
        rows, cu_seqlens, _, grid = self._rows(pixels)
        y = transformer.forward(self._built(1)[0], rows, cu_seqlens)
        return self._shaped(y, pixels, grid)

    def _shaped(self, rows: Array, pixels: npt.ArrayLike, grid: Grid) -> Array:
        count = grid[0] * grid[1] + 1
        y = rows.reshape(len(rows) // count, count, self.hidden_size)
        return y[0] if np.ndim(pixels) == 3 else y

    @copy_doc(forward)
    def vjp(self, pixels: npt.ArrayLike) -> tuple[Array, Pulled]:
        """Compute what :meth:`forward` does, and its pullback, ``dy -> grads``; pixels have no gradient."""
        rows, cu_seqlens, patches, grid = self._rows(pixels)
        settings, parameters = self._built(1)
        y, core_pullback = transformer.vjp(settings, rows, cu_seqlens)

        def backward(dy: Array) -> Gradients:
            dx, grads, _ = core_pullback(dy.reshape(rows.shape))
            found = parameters.gradients(transformer.arrays(settings), grads)
            d_rows = dx.reshape(len(patches), patches.shape[1] + 1, self.hidden_size)
            found[PLACES] = self._resized(d_rows.sum(axis=0, keepdims=True), grid, back=True)
            found[CLASS] = d_rows[:, :1].sum(axis=0, keepdims=True)
            _, d_weight, d_bias = linear_backward(d_rows[:, 1:], patches, self._weight())
            found[f"{PATCHES}.weight"] = d_weight.reshape(self.arrays[f"{PATCHES}.weight"].shape)
            found[f"{PATCHES}.bias"] = d_bias
            return self._named(found)

        y = self._shaped(y, pixels, grid)
        return y, checked_pullback(self, y, self.arrays.values(), backward)

    def _one(self, pixels: npt.ArrayLike) -> tuple[transformer.Transformer, Array, None]:
        if np.ndim(pixels) != 3:
            raise ValueError(f"pixels must have shape (channels, height, width), not {np.shape(pixels)}")
        return self._built(1)[0], self._rows(pixels)[0], None


def _cubic(given: int, wanted: int) -> Array:
    """Return the matrix (wanted, given) that resizes a line of samples by cubic convolution.

    Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981, equation 4 with a = −0.75, as PyTorch's
    ``interpolate`` has it. Samples are in the middle of their pixels; beyond both ends the last sample is repeated.
    """
    a = -0.75
    at = (np.arange(wanted) + 0.5) * (given / wanted) - 0.5
    first = np.floor(at).astype(int) - 1
    matrix = np.zeros((wanted, given))
    for tap in range(4):
        distance = np.abs(at - (first + tap))
        near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
        far = a * (distance**3 - 5 * distance**2 + 8 * distance - 4)
        weight = np.where(distance <= 1, near, far)
        np.add.at(matrix, (np.arange(wanted), np.clip(first + tap, 0, given - 1)), weight)
    return matrix
