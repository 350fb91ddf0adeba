"""The images of a batch: their checks, and the tokens that stand for them.

A sample has its images in the form that the model's image processor makes: patches with a grid for each image, or images of one size. In
its tokens, each run of a placeholder stands for one image. Equal images of a batch are one image here, so that a model
computes the images of a common prompt once.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from areal.api.microbatch import Grid, ImageInputs

PIXELS, GRID = "pixel_values", "image_grid_thw"
IMAGE_KEYS = (PIXELS, GRID)
"""Keys of the images of a sample, see :class:`PatchRules` and :class:`SquareRules`."""

_TEXT = -1
"""Row of a token that does not stand for an image."""


def _no_index(grids: Tensor) -> Mapping[str, Tensor]:
    return {}


@dataclass(frozen=True, eq=False)
class Image:
    """An image of a batch.

    Attributes:
        pixels: ``[P, ...]``. Its rows of ``pixel_values``.
        n_tokens: number of tokens that stand for it.
        grid: its patches in time, height and width; ``None`` for images of one size.
    """

    pixels: Tensor
    n_tokens: int
    grid: Grid | None = None

    def digest(self) -> bytes:
        """Return 16 bytes that are equal exactly for equal images."""
        raw = self.pixels.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        form = repr((self.grid and self.grid[1:], str(self.pixels.dtype)[6:]))
        return hashlib.blake2b(raw, digest_size=16, person=form.encode()[:16]).digest()


@dataclass(frozen=True)
class ImageRules(ABC):
    """The images that a model takes. Picklable.

    Attributes:
        token: id of the token that stands for a part of an image.
    """

    token: int
    bidirectional: ClassVar[bool] = False
    """True if the tokens of an image see each other in both directions."""

    @abstractmethod
    def images(self, i: int, pixels: Tensor | None, grid: Tensor | None) -> list[Image]:
        """Check the shapes of the images of sample ``i``, and return its images.

        Raises:
            ValueError: names the sample, the key and the way out.
        """

    @abstractmethod
    def black(self) -> Image:
        """Return an image for ranks without images: ranks compute the same layers, whether they have images or not."""

    def positions(self, length: int, runs: Sequence[tuple[int, int]], images: Sequence[Image]) -> Tensor | None:
        """Return positions in time, height and width, ``[length, 3]``; ``None`` if each token is one position after the one before it.

        Args:
            length: tokens of a sample.
            runs: start and end of the tokens of each image.
            images: the images.
        """
        return None

    def tower(self, grids: Tensor) -> Mapping[str, Tensor]:
        """Return :attr:`~areal.api.microbatch.ImageInputs.tower` for grids ``[n, 3]``, on the host."""
        return {}


@dataclass(frozen=True)
class SquareRules(ImageRules):
    """Images of one size and number of tokens, which see each other in both directions, as Gemma 3 takes them.

    The key of a sample is ``pixel_values``, float ``[images, C, H, W]``.

    Attributes:
        n_tokens: tokens of an image.
        shape: ``C``, ``H`` and ``W``.
    """

    n_tokens: int
    shape: tuple[int, int, int]
    bidirectional: ClassVar[bool] = True

    def images(self, i: int, pixels: Tensor | None, grid: Tensor | None) -> list[Image]:
        if grid is not None:
            raise ValueError(f"sample {i} has {GRID!r}, but images of this model have one size: leave it out")
        if pixels is None:
            return []
        if pixels.dim() != 4 or pixels.shape[1:] != self.shape or not pixels.is_floating_point():
            expected = ", ".join(map(str, self.shape))
            raise ValueError(
                f"{PIXELS} of sample {i} is {pixels.dtype} {list(pixels.shape)}: pass floating-point numbers [images, {expected}]"
            )
        return [Image(each, self.n_tokens) for each in pixels.split(1)]

    def black(self) -> Image:
        return Image(torch.zeros(1, *self.shape), self.n_tokens)


@dataclass(frozen=True)
class PatchRules(ImageRules):
    """Images of any size as patches, as the image processors of Qwen2-VL make them.

    The keys of a sample are ``pixel_values``, float ``[P, C]``, the patches of its images end to end, and ``image_grid_thw``, int64
    ``[images, 3]``, the patches of each image in time, height and width.

    Attributes:
        merge: patches along a side of the square that a token stands for.
        width: numbers of a patch, ``C``.
        index: returns the result of :meth:`tower`.
    """

    merge: int
    width: int
    index: Callable[[Tensor], Mapping[str, Tensor]] = field(default=_no_index, compare=False)

    def tower(self, grids: Tensor) -> Mapping[str, Tensor]:
        return self.index(grids)

    def images(self, i: int, pixels: Tensor | None, grid: Tensor | None) -> list[Image]:
        if pixels is None or grid is None:
            if pixels is not grid:
                missing = PIXELS if pixels is None else GRID
                raise ValueError(f"sample {i} has no {missing!r}: images need both {PIXELS!r} and {GRID!r}")
            return []
        grids = self._check_grid(i, grid)
        expected = [sum(map(math.prod, grids)), self.width]
        if list(pixels.shape) != expected or not pixels.is_floating_point():
            raise ValueError(
                f"{PIXELS} of sample {i} is {pixels.dtype} {list(pixels.shape)}: its {GRID} needs floating-point numbers {expected}, the "
                "patches of its images end to end"
            )
        patches = pixels.split([math.prod(each) for each in grids])
        return [Image(x, len(x) // self.merge**2, each) for x, each in zip(patches, grids, strict=True)]

    def _check_grid(self, i: int, grid: Tensor) -> list[Grid]:
        if grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point():
            raise ValueError(
                f"{GRID} of sample {i} is {grid.dtype} {list(grid.shape)}: pass integers [images, 3], the patches in time, height and width"
            )
        grids: list[Grid] = [(t, h, w) for t, h, w in grid.tolist()]
        for each in grids:
            if each[0] != 1 or min(each) < 1 or each[1] % self.merge or each[2] % self.merge:
                raise ValueError(
                    f"{GRID} of sample {i} has {list(each)}: an image is [1, height, width] in patches, both multiples of {self.merge}"
                )
        return grids

    def black(self) -> Image:
        return Image(torch.zeros(self.merge**2, self.width), 1, (1, self.merge, self.merge))

    def positions(self, length: int, runs: Sequence[tuple[int, int]], images: Sequence[Image]) -> Tensor:
        """Return positions in time, height and width (Wang et al., 2024, Qwen2-VL), ``[length, 3]``.

        Text counts on in all three. The tokens of an image have their place in its grid in addition, and the text after it
        follows the larger side.
        """
        parts: list[Tensor] = []
        place, position = 0, 0
        for (start, stop), image in zip(runs, images, strict=True):
            parts.append(torch.arange(position, position + start - place)[:, None].expand(-1, 3))
            position += start - place
            t, h, w = image.grid or (1, 1, 1)
            sides = (t, h // self.merge, w // self.merge)
            parts.append(position + torch.cartesian_prod(*map(torch.arange, sides)))
            position += max(sides[1:])
            place = stop
        parts.append(torch.arange(position, position + length - place)[:, None].expand(-1, 3))
        return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class BatchImages:
    """The images of the samples of one rank's batch.

    Attributes:
        rules: of the model.
        distinct: the images, equal ones once.
        rows: for each sample int64 ``[S_i]``, on the host: row of each token among the tokens of all distinct images, end to end;
            -1 for text.
        positions: for each sample int64 ``[S_i, 3]`` or ``None``, on the host; see :meth:`ImageRules.positions`.
    """

    rules: ImageRules
    distinct: tuple[Image, ...] = ()
    rows: tuple[Tensor, ...] = ()
    positions: tuple[Tensor | None, ...] = ()

    @classmethod
    def of(cls, ids: Sequence[Tensor], keys: Mapping[str, Any], rules: ImageRules) -> BatchImages:
        """Check the images of a batch, and find the tokens that stand for them. Reads the device.

        Args:
            ids: tokens of each sample, ``[S_i]``.
            keys: :data:`IMAGE_KEYS` of the batch: a list for each, with a tensor or ``None`` for each sample.
            rules: of the model.

        Raises:
            ValueError: images and tokens do not match. Names the sample, the key and the way out.
        """
        numbers: dict[bytes, int] = {}
        distinct: list[Image] = []
        rows: list[Tensor] = []
        positions: list[Tensor | None] = []
        starts = [0]
        columns = [_column(key, keys.get(key, [None] * len(ids)), ids) for key in IMAGE_KEYS]
        for i, (tokens, pixels, grid) in enumerate(zip(ids, *columns, strict=True)):
            images = rules.images(i, pixels, grid)
            runs = _runs(tokens.cpu() == rules.token)
            _check_runs(i, runs, images, rules)
            row = torch.full((len(tokens),), _TEXT)
            for (start, stop), image in zip(runs, images, strict=True):
                number = numbers.setdefault(image.digest(), len(distinct))
                if number == len(distinct):
                    distinct.append(image)
                    starts.append(starts[-1] + image.n_tokens)
                row[start:stop] = torch.arange(starts[number], starts[number + 1])
            rows.append(row)
            positions.append(rules.positions(len(tokens), runs, images))
        return cls(rules, tuple(distinct), tuple(rows), tuple(positions))

    def prefix_keys(self) -> list[Tensor]:
        """Return for each sample int64 ``[S_i]``, at least 0: equal for tokens of equal parts of equal images."""
        return [row + 1 for row in self.rows]

    def n_tokens(self, sample: int) -> int:
        """Return the number of tokens of a sample that stand for images."""
        return int((self.rows[sample] != _TEXT).sum())

    def placed(self, sample: int) -> list[tuple[int, Image]]:
        """Return the images of a sample in order, each with the place of its first token."""
        row = self.rows[sample]
        begins = [start for start, _ in _runs(row != _TEXT)]
        return list(zip(begins, (self.distinct[k] for k in self._numbers(row[begins]).tolist()), strict=True))

    def _numbers(self, rows: Tensor) -> Tensor:
        """Return the number of the distinct image of each row of a token."""
        return torch.bucketize(rows, _starts(self.distinct), right=True) - 1

    def of_samples(self, members: Sequence[int]) -> ImageInputs:
        """Return the images of a micro-batch, and its tokens that stand for them.

        Args:
            members: its samples, in packed order. None for a filler, which has one token.
        """
        rows = torch.cat([self.rows[i] for i in members]) if members else torch.full((1,), _TEXT)
        starts = _starts(self.distinct)
        # The image of each token, among those of the batch, and then among those of the micro-batch.
        stands = rows != _TEXT
        used, number = torch.unique(self._numbers(rows[stands]), return_inverse=True)
        images = [self.distinct[k] for k in used.tolist()]
        own = rows.clone()
        own[stands] += (_starts(images)[:-1] - starts[used])[number]
        images = images or [self.rules.black()]
        grids = [image.grid for image in images if image.grid is not None]
        of_images = torch.tensor(grids) if grids else None
        positions = [self.positions[i] for i in members] or [self.rules.positions(1, [], [])]
        known = [each for each in positions if each is not None]
        return ImageInputs(
            torch.cat([image.pixels for image in images]),
            own,
            of_images,
            torch.cat(known) if known else None,
            stands if self.rules.bidirectional else None,
            {} if of_images is None else self.rules.tower(of_images),
        )


def read_images(ids: Sequence[Tensor], keys: Mapping[str, Any], rules: ImageRules | None) -> BatchImages | None:
    """Return the checked images of a batch; ``None`` for a model of text. Arguments as for :meth:`BatchImages.of`.

    Raises:
        ValueError: images and tokens do not match, or a model of text gets images. Names the key.
    """
    if rules is not None:
        return BatchImages.of(ids, keys, rules)
    for key in keys:
        raise ValueError(
            f"key {key!r} is in a batch, but this engine trains on text alone, and would ignore images: leave it out, and samples with "
            "such inputs, too"
        )
    return None


def _column(key: str, values: Any, ids: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the values of a key of images, one for each sample."""
    if not isinstance(values, list | tuple) or len(values) != len(ids):
        raise ValueError(
            f"key {key!r} is not a list of {len(ids)} tensors: pass one for each sample, None for one without images"
        )
    column: list[Tensor | None] = []
    for i, x in enumerate(values):
        if x is not None and (not isinstance(x, Tensor) or x.device != ids[i].device):
            what = f"on {x.device}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(
                f"key {key!r} of sample {i} is {what}: pass a tensor on {ids[i].device}, where input_ids are"
            )
        column.append(None if x is None else x.detach())
    return column


def _check_runs(i: int, runs: Sequence[tuple[int, int]], images: Sequence[Image], rules: ImageRules) -> None:
    """Check that each run of placeholders has the length of its image."""
    lengths, expected = [stop - start for start, stop in runs], [image.n_tokens for image in images]
    if lengths != expected:
        raise ValueError(
            f"input_ids of sample {i} has runs of {lengths} of the token {rules.token}, which stands for images, but {PIXELS} "
            f"has images of {expected} tokens: give each image its tokens, with another token between two images"
        )


def _starts(images: Sequence[Image]) -> Tensor:
    """Return the first row of each image among the tokens of all, and the number of all, int64."""
    return torch.tensor(list(accumulate((image.n_tokens for image in images), initial=0)))


def _runs(marked: Tensor) -> list[tuple[int, int]]:
    """Return start and end of each run of true values in ``[S]``."""
    edges = torch.nn.functional.pad(marked.to(torch.int8), (1, 1)).diff()
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))
