"""`parallelism_config` of the Accelerate file, as `accelerate launch` hands it over in environment variables.

Accelerate has its own context parallelism (torch's, under FSDP2 alone) and its own sequence parallelism (under
DeepSpeed alone). hfpar has other ones, for every engine, and takes the sizes from the section. Its other settings
describe Accelerate's two: one that asks for what hfpar does anyway passes, another is refused by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hfpar.errors import ConfigError

_PREFIX = "PARALLELISM_CONFIG_"
_IN_FILE = "in the Accelerate file"

# Name, the values under which hfpar does what the file says (the first: Accelerate's default), and what to do
# about another.
_COMPANIONS = (
    ("cp_backend", ("torch",), "remove it"),
    ("cp_comm_strategy", ("allgather", "alltoall"), "remove it (keys and values pass round a ring)"),
    ("sp_backend", ("deepspeed",), "remove it"),
    ("sp_seq_length", ("none",), "remove it and set max_length, or max_tokens_per_batch"),
    ("sp_seq_length_is_variable", ("true",), "remove it (streams of any length are padded to fit)"),
    ("sp_attn_implementation", ("sdpa", "none"), "remove it and set attn_implementation"),
)


def check_parallelism(environ: Mapping[str, str], *, sharded: bool) -> None:
    """Refuse what hfpar doesn't do.

    Args:
        environ: the environment of the process.
        sharded: whether the engine shards anything at all.

    Raises:
        ConfigError: a setting, by its name in the file.
    """
    replicas = _size(environ, "dp_replicate_size")
    if replicas > 1:
        raise ConfigError(
            f"parallelism_config: dp_replicate_size {replicas} {_IN_FILE} isn't supported yet; set it to 1 "
            "(processes that tp_size, cp_size and sp_size leave are data-parallel ranks)"
        )
    for name, honoured, fix in _COMPANIONS:
        value = environ.get(_PREFIX + name.upper(), honoured[0])
        if value.lower() not in honoured:
            raise ConfigError(f"parallelism_config: {name} {value} {_IN_FILE} isn't supported; {fix}")
    _check_shards(environ, sharded)


def read_size(environ: Mapping[str, str], name: str, written: Collection[str] = ()) -> int | None:
    """What the file says of `cp_size`, `sp_size` or `tp_size`, or None.

    Args:
        environ: the environment of the process, in which all sizes stand as soon as the file has one of them.
        name: of the size.
        written: the sizes that the file or the launcher's flags really name.

    Raises:
        ConfigError: no whole number of at least 1.
    """
    size = _size(environ, name)
    return size if size > 1 or name in written else None


def _size(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(_PREFIX + name.upper(), "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"parallelism_config: {name} {text} {_IN_FILE}; must be a whole number of at least 1"
        )
    return int(text)


def _check_shards(environ: Mapping[str, str], sharded: bool) -> None:
    """All ranks with equal weights shard them; Accelerate counts those of cp and sp beside its shards."""
    shards, world_size = _size(environ, "dp_shard_size"), int(environ.get("WORLD_SIZE", "1"))
    if shards > 1 and not sharded:
        raise ConfigError(
            f"parallelism_config: dp_shard_size {shards} {_IN_FILE}, but DDP shards nothing; remove it, or set "
            "`distributed_type: FSDP`"
        )
    with_equal_weights = world_size // _size(environ, "tp_size")
    data_ranks = with_equal_weights // (_size(environ, "cp_size") * _size(environ, "sp_size"))
    if shards not in (1, with_equal_weights, data_ranks):
        raise ConfigError(
            f"parallelism_config: dp_shard_size {shards} {_IN_FILE}, but this launch has {with_equal_weights} "
            f"processes with equal weights, all of which shard; set it to {max(data_ranks, 1)} or remove it"
        )
