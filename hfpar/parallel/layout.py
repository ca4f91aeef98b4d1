"""Who computes what: the sizes of each dimension of parallelism, and the groups that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hfpar.errors import ConfigError

AXES = ("pp", "dp", "cp", "sp", "tp")
"""Mesh axes, outermost first: tp ranks are neighbours, pp ranks furthest apart."""

BATCH_AXES = ("dp", "cp", "sp")
"""Ranks along these axes hold the same weights: to an engine they are all data-parallel ranks."""


@dataclass(frozen=True)
class Layout:
    """The place of one rank. Pure: every rank can be asked about without processes.

    `mesh` and the groups exist only where a process group does.
    """

    rank: int
    world_size: int
    pp_size: int = 1
    cp_size: int = 1
    sp_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that don't divide the world."""
        model_ranks = self.pp_size * self.cp_size * self.sp_size * self.tp_size
        if self.world_size % model_ranks:
            raise ConfigError(
                f"pp_size x cp_size x sp_size x tp_size = {model_ranks} doesn't divide the {self.world_size} "
                "processes"
            )

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: what the other sizes leave of the world."""
        return self.world_size // (self.pp_size * self.cp_size * self.sp_size * self.tp_size)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(pp, dp, cp, sp, tp)."""
        return (self.pp_size, self.dp_size, self.cp_size, self.sp_size, self.tp_size)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's index along each axis."""
        coordinates, rest = {}, self.rank
        for axis, size in reversed(list(zip(AXES, self.sizes, strict=True))):
            coordinates[axis], rest = rest % size, rest // size
        return coordinates

    @property
    def dp_rank(self) -> int:
        """Which samples this rank draws: ranks with the same `dp_rank` draw the same ones."""
        return self.coordinates["dp"]

    @property
    def batch_size(self) -> int:
        """Number of ranks over which an engine averages gradients (dp x cp x sp)."""
        return self.dp_size * self.cp_size * self.sp_size

    @property
    def name(self) -> str:
        """Short name in tables, such as `dp4`."""
        sizes = zip(AXES, self.sizes, strict=True)
        return "".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "dp1"

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The only DeviceMesh, with the axes of `AXES`. Every rank must ask for it together."""
        return init_device_mesh(_device_type(), self.sizes, mesh_dim_names=AXES)

    @cached_property
    def batch_mesh(self) -> DeviceMesh:
        """One axis over the batch group: what FSDP2 shards over."""
        if self.batch_size == self.world_size:
            return DeviceMesh.from_group(self.batch_group, _device_type(), mesh_dim_names=("batch",))
        return self.mesh[BATCH_AXES]._flatten("batch")

    @cached_property
    def batch_group(self) -> dist.ProcessGroup:
        """All ranks that hold the same weights."""
        if self.batch_size == self.world_size:
            assert dist.group.WORLD is not None, "no process group yet"
            return dist.group.WORLD
        return self.batch_mesh.get_group()


def _device_type() -> str:
    return "cuda" if "nccl" in dist.get_backend() or "cuda" in str(dist.get_backend()) else "cpu"
