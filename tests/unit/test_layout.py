"""Where each rank stands, for every rank, without processes."""

import pytest

from hfpar.errors import ConfigError
from hfpar.parallel.layout import AXES, Layout


def test_data_parallel_ranks_draw_different_samples():
    layouts = [Layout(rank=rank, world_size=4) for rank in range(4)]
    assert [layout.dp_rank for layout in layouts] == [0, 1, 2, 3]
    assert {layout.dp_size for layout in layouts} == {layout.batch_size for layout in layouts} == {4}
    assert layouts[0].name == "dp4"
    assert Layout(rank=0, world_size=1).name == "dp1"


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_stages_furthest_apart():
    layouts = [Layout(rank=rank, world_size=64, tp_size=4, pp_size=4) for rank in range(64)]
    assert layouts[0].sizes == (4, 4, 1, 1, 4)
    assert [layout.coordinates["tp"] for layout in layouts[:5]] == [0, 1, 2, 3, 0]
    assert [layout.coordinates["dp"] for layout in layouts[:17:4]] == [0, 1, 2, 3, 0]
    assert [layout.coordinates["pp"] for layout in layouts[::16]] == [0, 1, 2, 3]
    assert layouts[0].batch_size == 4


def test_ranks_of_a_sequence_group_draw_the_same_samples():
    layouts = [Layout(rank=rank, world_size=8, cp_size=2, sp_size=2) for rank in range(8)]
    assert [layout.dp_rank for layout in layouts] == [0] * 4 + [1] * 4
    assert layouts[0].batch_size == 8
    assert layouts[0].name == "dp2cp2sp2"


def test_every_rank_has_coordinates_of_its_own():
    layouts = [Layout(rank=rank, world_size=24, pp_size=2, cp_size=3, tp_size=2) for rank in range(24)]
    assert len({tuple(layout.coordinates[axis] for axis in AXES) for layout in layouts}) == 24


def test_sizes_that_do_not_divide_the_world_are_refused():
    with pytest.raises(
        ConfigError, match=r"^tp_size 4 doesn't divide the 6 processes; with 6, it can be 1 or 2 or 3"
    ):
        Layout(rank=0, world_size=6, tp_size=4)
    with pytest.raises(ConfigError, match=r"^cp_size 2 x sp_size 2 = 4 doesn't divide the 6 processes"):
        Layout(rank=0, world_size=6, cp_size=2, sp_size=2)


def test_ranks_of_the_batch_group_are_numbered_in_mesh_order():
    layouts = [Layout(rank=rank, world_size=16, cp_size=2, sp_size=2, tp_size=2) for rank in range(16)]
    assert [layout.batch_rank for layout in layouts] == [rank // 2 for rank in range(16)]
