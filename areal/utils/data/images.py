"""The images of a batch: their checks, and the tokens that stand for them.

A sample has the patches of its images, end to end, as the image processors of Qwen2-VL make them, and the grid of each image. In its
tokens, each run of a placeholder stands for one image. Equal images of a batch are one image here, so that a model computes
the images of a common prompt once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from areal.api.microbatch import Grid, ImageInputs

PIXELS, GRID = "pixel_values", "image_grid_thw"
IMAGE_KEYS = (PIXELS, GRID)
"""Keys of the images of a sample: float ``[P, C]``, its patches, and int64 ``[n, 3]``, the patches of each image in time, height and width."""

_TEXT = -1
"""Row of a token that does not stand for an image."""


def _no_index(grids: Tensor) -> Mapping[str, Tensor]:
    return {}


@dataclass(frozen=True)
class ImageRules:
    """The images that a model takes. Picklable.

    Attributes:
        token: id of the token that stands for a part of an image.
        merge: patches along a side of the square that a token stands for.
        width: numbers of a patch, ``C``.
        index: returns :attr:`~areal.api.microbatch.ImageInputs.tower` for grids ``[n, 3]``, on the host.
    """

    token: int
    merge: int
    width: int
    index: Callable[[Tensor], Mapping[str, Tensor]] = field(default=_no_index, compare=False)

    def tokens(self, grid: Grid) -> int:
        """Return the number of tokens of an image."""
        return math.prod(grid) // self.merge**2


@dataclass(frozen=True, eq=False)
class BatchImages:
    """The images of the samples of one rank's batch.

    Attributes:
        rules: of the model.
        pixels: patches ``[P, C]`` of each distinct image.
        grids: grid of each distinct image.
        rows: for each sample int64 ``[S_i]``, on the host: row of each token among the tokens of all distinct images, end to end;
            -1 for text.
        positions: for each sample int64 ``[S_i, 3]``, on the host; see :class:`~areal.api.microbatch.ImageInputs`.
    """

    rules: ImageRules
    pixels: tuple[Tensor, ...] = ()
    grids: tuple[Grid, ...] = ()
    rows: tuple[Tensor, ...] = ()
    positions: tuple[Tensor, ...] = ()

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
        distinct: dict[bytes, int] = {}
        pixels: list[Tensor] = []
        grids: list[Grid] = []
        rows: list[Tensor] = []
        positions: list[Tensor] = []
        starts = [0]
        columns = [_column(key, keys.get(key, [None] * len(ids)), ids) for key in IMAGE_KEYS]
        for i, (tokens, patches, grid) in enumerate(zip(ids, *columns, strict=True)):
            shapes = _check_sample(i, patches, grid, rules)
            runs = _runs(tokens.cpu() == rules.token)
            _check_runs(i, runs, shapes, rules)
            row = torch.full((len(tokens),), _TEXT)
            images = () if patches is None else patches.split([math.prod(shape) for shape in shapes])
            for (start, stop), image, shape in zip(runs, images, shapes, strict=True):
                number = distinct.setdefault(_digest(image, shape), len(grids))
                if number == len(grids):
                    pixels.append(image)
                    grids.append(shape)
                    starts.append(starts[-1] + stop - start)
                row[start:stop] = torch.arange(starts[number], starts[number + 1])
            rows.append(row)
            positions.append(_positions(len(tokens), runs, shapes, rules.merge))
        return cls(rules, tuple(pixels), tuple(grids), tuple(rows), tuple(positions))

    def prefix_keys(self) -> list[Tensor]:
        """Return for each sample int64 ``[S_i]``, at least 0: equal for tokens of equal parts of equal images."""
        return [row + 1 for row in self.rows]

    def n_tokens(self, sample: int) -> int:
        """Return the number of tokens of a sample that stand for images."""
        return int((self.rows[sample] != _TEXT).sum())

    def of_samples(self, members: Sequence[int]) -> ImageInputs:
        """Return the images of a micro-batch, and its tokens that stand for them.

        Args:
            members: its samples, in packed order. None for a filler, which has one token.
        """
        rows = torch.cat([self.rows[i] for i in members]) if members else torch.full((1,), _TEXT)
        positions = (
            torch.cat([self.positions[i] for i in members]) if members else torch.zeros((1, 3), dtype=torch.int64)
        )
        starts = torch.tensor(list(accumulate(map(self.rules.tokens, self.grids), initial=0)))
        # The image of each token, among those of the batch, and then among those of the micro-batch.
        used, number = torch.unique(torch.bucketize(rows[rows != _TEXT], starts, right=True) - 1, return_inverse=True)
        grids = [self.grids[k] for k in used.tolist()]
        own_starts = torch.tensor(list(accumulate(map(self.rules.tokens, grids), initial=0)))
        own = rows.clone()
        own[rows != _TEXT] += (own_starts[:-1] - starts[used])[number]
        pixels = [self.pixels[k] for k in used.tolist()]
        if not grids:
            # Ranks compute the same layers, whether they have images or not.
            grids = [(1, self.rules.merge, self.rules.merge)]
            pixels = [torch.zeros(self.rules.merge**2, self.rules.width)]
        of_images = torch.tensor(grids)
        return ImageInputs(torch.cat(pixels), of_images, own, positions, self.rules.index(of_images))


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


def _check_sample(i: int, patches: Tensor | None, grid: Tensor | None, rules: ImageRules) -> list[Grid]:
    """Check the shapes of the images of a sample. Returns their grids."""
    if patches is None or grid is None:
        if patches is not grid:
            missing = PIXELS if patches is None else GRID
            raise ValueError(f"sample {i} has no {missing!r}: images need both {PIXELS!r} and {GRID!r}")
        return []
    if grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point():
        raise ValueError(
            f"{GRID} of sample {i} is {grid.dtype} {list(grid.shape)}: pass integers [images, 3], the patches in time, height and width"
        )
    shapes: list[Grid] = [(t, h, w) for t, h, w in grid.tolist()]
    bad = next(
        (each for each in shapes if each[0] != 1 or min(each) < 1 or each[1] % rules.merge or each[2] % rules.merge),
        None,
    )
    if bad is not None:
        raise ValueError(
            f"{GRID} of sample {i} has {list(bad)}: an image is [1, height, width] in patches, both multiples of {rules.merge}"
        )
    expected = [sum(map(math.prod, shapes)), rules.width]
    if list(patches.shape) != expected or not patches.is_floating_point():
        raise ValueError(
            f"{PIXELS} of sample {i} is {patches.dtype} {list(patches.shape)}: its {GRID} needs floating-point numbers {expected}, the patches "
            "of its images end to end"
        )
    return shapes


def _check_runs(i: int, runs: Sequence[tuple[int, int]], shapes: Sequence[Grid], rules: ImageRules) -> None:
    """Check that each run of placeholders has the length of its image."""
    lengths, expected = [stop - start for start, stop in runs], [rules.tokens(shape) for shape in shapes]
    if lengths != expected:
        raise ValueError(
            f"input_ids of sample {i} has runs of {lengths} of the token {rules.token}, which stands for images, but {GRID} describes "
            f"images of {expected} tokens: give each image its tokens, with another token between two images"
        )


def _runs(marked: Tensor) -> list[tuple[int, int]]:
    """Return start and end of each run of true values in ``[S]``."""
    edges = torch.nn.functional.pad(marked.to(torch.int8), (1, 1)).diff()
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))


def _positions(length: int, runs: Sequence[tuple[int, int]], shapes: Sequence[Grid], merge: int) -> Tensor:
    """Return positions in time, height and width (Wang et al., 2024, Qwen2-VL), ``[S, 3]``.

    Text counts on in all three. The tokens of an image have their place in its grid in addition, and the text after it
    follows the larger side.
    """
    parts: list[Tensor] = []
    place, position = 0, 0
    for (start, stop), (t, h, w) in zip(runs, shapes, strict=True):
        parts.append(torch.arange(position, position + start - place)[:, None].expand(-1, 3))
        position += start - place
        sides = (t, h // merge, w // merge)
        parts.append(position + torch.cartesian_prod(*map(torch.arange, sides)))
        position += max(sides[1:])
        place = stop
    parts.append(torch.arange(position, position + length - place)[:, None].expand(-1, 3))
    return torch.cat(parts)


def _digest(pixels: Tensor, grid: Grid) -> bytes:
    """Return bytes that are equal exactly for equal images."""
    raw = pixels.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(raw, digest_size=16, person=repr((grid[1:], str(pixels.dtype)[6:])).encode()[:16]).digest()
