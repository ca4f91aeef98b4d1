"""Who computes what: the sizes of each dimension of parallelism, and the groups that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hfpar.errors import ConfigError

AXES = ("pp", "dp", "cp", "sp", "tp")
"""Mesh axes, outermost first: tp ranks are neighbours, pp ranks furthest apart."""

BATCH_AXES = ("dp", "cp", "sp")
"""Ranks along these axes hold the same weights: to an engine they are all data-parallel ranks."""

SEQUENCE_AXES = ("cp", "sp")
"""Ranks along these axes share one stream."""


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
    tp_sequence: bool = False
    """Whether tp ranks share the tokens, too, wherever they don't share a layer's weights."""

    def __post_init__(self) -> None:
        """Refuse sizes that don't divide the world."""
        sizes = {f"{axis}_size": getattr(self, f"{axis}_size") for axis in AXES if axis != "dp"}
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name}: {size!r}; must be a whole number of at least 1")
        if self.tp_sequence and self.tp_size == 1:
            raise ConfigError("tp_sequence: true with tp_size 1, so that no ranks share tokens; set tp_size")
        product = math.prod(sizes.values())
        if self.world_size % product:
            chosen = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            divisors = [str(size) for size in range(1, self.world_size + 1) if self.world_size % size == 0]
            product_text = f" = {product}" if chosen.count("_size") > 1 else ""
            raise ConfigError(
                f"{chosen}{product_text} doesn't divide the {self.world_size} processes; with "
                f"{self.world_size}, it can be {' or '.join(divisors)}; or use --num_processes {product}"
            )

    @classmethod
    def of_world(cls, *, cp_size: int = 1, sp_size: int = 1) -> Layout:
        """The layout of this process in the process group that exists, or of one process where there is none.

        Raises:
            ConfigError: sizes that don't divide the processes, or no group yet for several of them.
        """
        if not dist.is_initialized():
            if cp_size != 1 or sp_size != 1:
                raise ConfigError(
                    f"cp_size: {cp_size}, sp_size: {sp_size} before there is a process group; make it first "
                    "(Accelerator() does, in a launch of several processes)"
                )
            return cls(rank=0, world_size=1, cp_size=cp_size, sp_size=sp_size)
        return cls(rank=dist.get_rank(), world_size=dist.get_world_size(), cp_size=cp_size, sp_size=sp_size)

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
    def cp_rank(self) -> int:
        """Place in the ring."""
        return self.coordinates["cp"]

    @property
    def sp_rank(self) -> int:
        """Place among the ranks that exchange heads."""
        return self.coordinates["sp"]

    @property
    def tp_rank(self) -> int:
        """Place among the ranks that share each layer's weights."""
        return self.coordinates["tp"]

    @property
    def sequence_size(self) -> int:
        """Number of ranks that share one stream (cp x sp)."""
        return self.cp_size * self.sp_size

    @property
    def batch_size(self) -> int:
        """Number of ranks over which an engine averages gradients (dp x cp x sp)."""
        return self.dp_size * self.sequence_size

    @property
    def batch_rank(self) -> int:
        """This rank's place among those: no two have the same tokens."""
        return (self.dp_rank * self.cp_size + self.cp_rank) * self.sp_size + self.sp_rank

    @property
    def name(self) -> str:
        """Short name in tables, such as `dp4`."""
        sizes = zip(AXES, self.sizes, strict=True)
        return "".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "dp1"

    @property
    def device_type(self) -> str:
        """`cuda` where ranks talk through NCCL, else `cpu`."""
        return "cuda" if "nccl" in str(dist.get_backend()) or "cuda" in str(dist.get_backend()) else "cpu"

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The only DeviceMesh, with the axes of `AXES`. Every rank must ask for it together."""
        return init_device_mesh(self.device_type, self.sizes, mesh_dim_names=AXES)

    @cached_property
    def batch_mesh(self) -> DeviceMesh:
        """One axis over the batch group: what FSDP2 shards over."""
        if self.batch_size == self.world_size:
            return DeviceMesh.from_group(self.batch_group, self.device_type, mesh_dim_names=("batch",))
        return self.mesh[BATCH_AXES]._flatten("batch")

    @cached_property
    def cp_group(self) -> dist.ProcessGroup:
        """The ring: ranks that differ in `cp_rank` alone."""
        group = self.mesh["cp"].get_group()
        # NCCL wants all of a group in its first call, and a ring's exchanges can leave a rank out.
        dist.all_reduce(torch.zeros(1, device=self.device_type), group=group)
        return group

    @cached_property
    def sp_group(self) -> dist.ProcessGroup:
        """Ranks that differ in `sp_rank` alone."""
        return self.mesh["sp"].get_group()

    @cached_property
    def tp_group(self) -> dist.ProcessGroup:
        """Ranks that differ in `tp_rank` alone."""
        return self.mesh["tp"].get_group()

    def copies_group(self, copies: int) -> dist.ProcessGroup:
        """The tp ranks that keep the same key-value head; all ranks must ask for it together."""
        if copies == self.tp_size:
            return self.tp_group
        if copies not in self._copies_groups:
            self._copies_groups[copies] = dist.new_subgroups(group_size=copies)[0]
        return self._copies_groups[copies]

    @cached_property
    def _copies_groups(self) -> dict[int, dist.ProcessGroup]:
        return {}

    @cached_property
    def sequence_group(self) -> dist.ProcessGroup:
        """All ranks that share a stream."""
        if self.sequence_size == self.world_size:
            return self.batch_group
        return self.mesh[SEQUENCE_AXES]._flatten("sequence").get_group()

    def shard(self, batch: Mapping[str, Any], *, num_items_in_batch: int | None = None) -> dict[str, Any]:
        """This rank's part of an ordinary batch, as keyword arguments of a model call; see `shard_batch`."""
        from hfpar.parallel.batch import shard_batch

        return shard_batch(batch, self, num_items_in_batch=num_items_in_batch)

    @cached_property
    def batch_group(self) -> dist.ProcessGroup:
        """All ranks that hold the same weights."""
        if self.batch_size == self.world_size:
            assert dist.group.WORLD is not None, "no process group yet"
            return dist.group.WORLD
        return self.batch_mesh.get_group()
