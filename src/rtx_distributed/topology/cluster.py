"""Which launcher started this process, and which rank it gave it. Pure: a function of the
environment variables alone, so that every contradiction is found before any connection.

The rules, first match wins:

1. ``RANK`` and ``WORLD_SIZE`` (torchrun, or set by hand). Where torchrun set them they are
   absolute; set by hand they must agree with an MPI launcher's, and may override Slurm's.
2. Open MPI: ``OMPI_COMM_WORLD_*``. Inside a Slurm job too, where ``SLURM_PROCID`` is then the rank
   of the daemon and not of the process.
3. Slurm: ``SLURM_PROCID`` and its like, within a job step that ``srun`` made. An allocation's shell
   or batch script is no step: there a start is local, as without a launcher.
4. MPICH and Intel MPI: ``PMI_RANK``, ``PMI_SIZE``, ``MPI_LOCALRANKID``. Under ``srun`` they are
   Slurm's own way to serve MPI, and rule 3 holds.
"""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from rtx_distributed.errors import ClusterError
from rtx_distributed.topology.nodelist import expand_nodelist
from rtx_distributed.topology.variables import Variables

TORCH_PORT = 29500
"""torch's own default for ``MASTER_PORT``."""

# Slurm numbers the steps that no srun made from the top of 32 bits.
_SPECIAL_STEPS = range(0xFFFFFFF0, 0x1_0000_0000)


@dataclass(frozen=True, slots=True)
class ClusterEnv:
    """This process's place among those that a launcher started. ``None`` = the launcher does not
    say. ``source`` is torchrun, env, openmpi, slurm, or mpi (MPICH, Intel MPI)."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int | None
    node_rank: int | None
    master_addr: str | None
    master_port: int | None
    source: str

    def rendezvous(self) -> tuple[str, int]:
        """Host and port where rank 0 listens. Errors: ``ClusterError`` where they are unknown."""
        if self.world_size == 1:
            return self.master_addr or "127.0.0.1", self.master_port or 0
        missing = [
            name
            for name, value in (
                ("MASTER_ADDR", self.master_addr),
                ("MASTER_PORT", self.master_port),
            )
            if value is None
        ]
        if self.master_addr is None or self.master_port is None:
            raise ClusterError(
                f"{self.world_size} ranks on several nodes were started by {self.source}, which "
                f"does not say where rank 0 is: set {' and '.join(f'`{m}`' for m in missing)} on "
                f"all ranks to the host of rank 0 and a free port of it"
            )
        return self.master_addr, self.master_port


def detect(environ: Mapping[str, str]) -> ClusterEnv | None:
    """The place that the launcher gave to this process, None without launcher.

    Errors: ``ClusterError`` naming both variables and their values where they contradict each
    other, and the variable where one is malformed or half of a pair is missing.
    """
    env = Variables({name: value for name, value in environ.items() if value != ""})
    if env.has("RANK") and env.has("WORLD_SIZE"):
        return _from_rank(env)
    if env.has("OMPI_COMM_WORLD_RANK"):
        return _from_open_mpi(env)
    _check_slurm_tasks(env)
    if _in_slurm_step(env) and not _started_by_hydra(env):
        return _from_slurm(env)
    if env.has("PMI_RANK") and env.has("PMI_SIZE"):
        return _from_pmi(env)
    _refuse_half(env)
    return None


def _from_rank(env: Variables) -> ClusterEnv:
    torchrun = env.has("TORCHELASTIC_RUN_ID")
    if not torchrun:
        way_out = "unset the one that is left over from another start"
        env.agree("RANK", "OMPI_COMM_WORLD_RANK", way_out=way_out)
        env.agree("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", way_out=way_out)
        env.agree("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", way_out=way_out)
    env.below("RANK", "WORLD_SIZE")
    env.below("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env.at_most("LOCAL_RANK", "RANK")
    env.at_most("LOCAL_WORLD_SIZE", "WORLD_SIZE")
    rank = env.required("RANK", beside="WORLD_SIZE")
    world_size = env.required("WORLD_SIZE", beside="RANK")
    master = env.master(default_addr="127.0.0.1", default_port=TORCH_PORT)
    one_node = _is_loopback(master.addr)
    local_world_size = env.integer("LOCAL_WORLD_SIZE")
    if local_world_size is None and one_node:
        local_world_size = world_size
    return ClusterEnv(
        rank=rank,
        local_rank=_local_rank(env, rank=rank, one_node=one_node),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_first_integer(env, "GROUP_RANK", "NODE_RANK", default=0 if one_node else None),
        master_addr=master.addr,
        master_port=master.port,
        source="torchrun" if torchrun else "env",
    )


def _local_rank(env: Variables, *, rank: int, one_node: bool) -> int:
    """``LOCAL_RANK``, or what certainly is the same. The global rank is no stand-in on several
    nodes: it names a device that the node does not have, or another process's."""
    named = env.integer("LOCAL_RANK")
    if named is not None:
        return named
    for rank_name, size_name, local_name in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        same = env.integer(rank_name) == rank
        local = env.integer(local_name)
        if local is not None and same and env.integer(size_name) == env.integer("WORLD_SIZE"):
            return local
    if one_node:
        return rank
    raise ClusterError(
        f"`RANK` = {rank} and `MASTER_ADDR` = {env.variables['MASTER_ADDR']} are set and "
        f"`LOCAL_RANK` is not: set it to this process's number on its node (0 where each node "
        f"has one process)"
    )


def _from_open_mpi(env: Variables) -> ClusterEnv:
    rank_name, size_name = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    way_out = "unset the one that is left over from another start"
    env.agree("RANK", rank_name, way_out=way_out)
    env.agree("WORLD_SIZE", size_name, way_out=way_out)
    env.below(rank_name, size_name)
    env.below("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    env.at_most("OMPI_COMM_WORLD_LOCAL_RANK", rank_name)
    env.at_most("OMPI_COMM_WORLD_LOCAL_SIZE", size_name)
    namespace = env.variables.get("PMIX_NAMESPACE")
    return _mpi(
        env,
        rank=env.required(rank_name, beside=rank_name),
        local_rank=env.required("OMPI_COMM_WORLD_LOCAL_RANK", beside=rank_name),
        world_size=env.required(size_name, beside=rank_name),
        local_world_size=env.integer("OMPI_COMM_WORLD_LOCAL_SIZE"),
        # Open MPI 4 numbers a job's namespace, 5 names it; both are the same on all its ranks.
        port=None if namespace is None else _port(zlib.crc32(namespace.encode())),
        source="openmpi",
    )


def _from_pmi(env: Variables) -> ClusterEnv:
    way_out = "unset the one that is left over from another start"
    env.agree("RANK", "PMI_RANK", way_out=way_out)
    env.agree("WORLD_SIZE", "PMI_SIZE", way_out=way_out)
    env.below("PMI_RANK", "PMI_SIZE")
    size = env.required("PMI_SIZE", beside="PMI_RANK")
    local_name = env.first("MPI_LOCALRANKID", "PMI_LOCAL_RANK")
    local_size_name = env.first("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
    if local_name and local_size_name:
        env.below(local_name, local_size_name)
    if local_name:
        env.at_most(local_name, "PMI_RANK")
    if local_size_name:
        env.at_most(local_size_name, "PMI_SIZE")
    if local_name is None and size > 1:
        env.required("MPI_LOCALRANKID", beside="PMI_RANK")
    return _mpi(
        env,
        rank=env.required("PMI_RANK", beside="PMI_SIZE"),
        local_rank=0 if local_name is None else env.required(local_name, beside="PMI_RANK"),
        world_size=size,
        local_world_size=env.integer(local_size_name) if local_size_name else None,
        port=None,
        source="mpi",
    )


def _mpi(
    env: Variables,
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int | None,
    port: int | None,
    source: str,
) -> ClusterEnv:
    one_node = local_world_size == world_size or world_size == 1
    master = env.master(
        default_addr="127.0.0.1" if one_node else None,
        default_port=TORCH_PORT if port is None and one_node else port,
    )
    return ClusterEnv(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        # OMPI_COMM_WORLD_NODE_RANK is a rank on the node, for all its name.
        node_rank=0 if one_node else None,
        master_addr=master.addr,
        master_port=master.port,
        source=source,
    )


def _in_slurm_step(env: Variables) -> bool:
    """Whether ``srun`` started this process as one of a step's tasks."""
    procid = env.integer("SLURM_PROCID")
    if procid is None:
        return False
    name = env.first("SLURM_STEP_ID", "SLURM_STEPID")
    if name is None:
        return procid > 0  # a batch script has SLURM_PROCID too, and there it is 0
    if env.integer(name) in _SPECIAL_STEPS:
        return False
    # `srun --pty bash` is a step of one task in which somebody types: as good as a local shell.
    tasks = env.integer(_tasks_name(env))
    return not (env.has("SLURM_PTY_PORT") and tasks == 1)


def _started_by_hydra(env: Variables) -> bool:
    """MPICH's and Intel's ``mpiexec`` inside a Slurm job: srun started its daemon, one per
    node, and the daemon this process. ``SLURM_PROCID`` is the daemon's."""
    if not (env.has("PMI_RANK") and env.has("PMI_SIZE")):
        return False
    tasks = _tasks_name(env)
    same = env.integer("PMI_RANK") == env.integer("SLURM_PROCID")
    if same and env.integer("PMI_SIZE") == env.integer(tasks):
        return False
    if env.has("MPI_LOCALRANKID"):
        return True
    way_out = "both launchers claim this process; start it with one of them"
    env.agree("PMI_RANK", "SLURM_PROCID", way_out=way_out)
    env.agree("PMI_SIZE", tasks, way_out=way_out)
    return False


def _tasks_name(env: Variables) -> str:
    return env.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") or "SLURM_NTASKS"


def _check_slurm_tasks(env: Variables) -> None:
    tasks, per_node = env.integer("SLURM_NTASKS"), env.integer("SLURM_NTASKS_PER_NODE")
    if tasks is not None and per_node is not None and tasks < per_node:
        raise ClusterError(
            f"`SLURM_NTASKS` = {tasks} contradicts `SLURM_NTASKS_PER_NODE` = {per_node}: fewer "
            f"tasks than one node was asked to run; give `--ntasks-per-node` alone, or the same "
            f"`--ntasks` and `--ntasks-per-node` to both sbatch and srun"
        )


def _from_slurm(env: Variables) -> ClusterEnv:
    tasks = _tasks_name(env)
    env.below("SLURM_PROCID", tasks)
    env.at_most("SLURM_LOCALID", "SLURM_PROCID")
    rank = env.required("SLURM_PROCID", beside="SLURM_PROCID")
    world_size = env.required(tasks, beside="SLURM_PROCID")
    node_rank = env.integer("SLURM_NODEID")
    nodes_name = env.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = expand_nodelist(env.variables[nodes_name]) if nodes_name else []
    if nodes_name and node_rank is not None and node_rank >= len(nodes):
        raise ClusterError(
            f"`SLURM_NODEID` = {node_rank} contradicts `{nodes_name}` = "
            f"{env.variables[nodes_name]}: it has {len(nodes)} nodes"
        )
    job = env.integer("SLURM_JOB_ID") or env.integer("SLURM_JOBID")
    step = _first_integer(env, "SLURM_STEP_ID", "SLURM_STEPID", default=0) or 0
    master = env.master(
        default_addr=nodes[0] if nodes else None,
        # Two steps of one job, or two jobs on one node, shall not meet at one port.
        default_port=None if job is None else _port(job * 7 + step),
    )
    return ClusterEnv(
        rank=rank,
        local_rank=env.required("SLURM_LOCALID", beside="SLURM_PROCID"),
        world_size=world_size,
        local_world_size=_slurm_local_size(env, node_rank=node_rank, world_size=world_size),
        node_rank=node_rank,
        master_addr=master.addr,
        master_port=master.port,
        source="slurm",
    )


def _slurm_local_size(env: Variables, *, node_rank: int | None, world_size: int) -> int | None:
    """Tasks on this node, from ``2(x3),1``: three nodes with 2 tasks each and one with 1."""
    name = env.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name is None or node_rank is None:
        return None
    counts: list[int] = []
    for part in env.variables[name].split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip(), re.ASCII)
        if not found:
            raise ClusterError(f"`{name}` = {env.variables[name]!r}: malformed; as in `2(x3),1`")
        counts += [int(found[1])] * int(found[2] or 1)
    if node_rank >= len(counts) or sum(counts) != world_size:
        return None  # the allocation's, not the step's
    local_id = env.integer("SLURM_LOCALID")
    if local_id is not None and local_id >= counts[node_rank]:
        raise ClusterError(
            f"`SLURM_LOCALID` = {local_id} contradicts `{name}` = {env.variables[name]}: node "
            f"{node_rank} has {counts[node_rank]} tasks"
        )
    return counts[node_rank]


def _refuse_half(env: Variables) -> None:
    """A launcher's variable without the others would silently become many worlds of one."""
    if env.has("RANK"):
        env.required("WORLD_SIZE", beside="RANK")
    if env.has("WORLD_SIZE") and env.integer("WORLD_SIZE") != 1:
        env.required("RANK", beside="WORLD_SIZE")
    if env.has("LOCAL_RANK"):
        env.required("RANK", beside="LOCAL_RANK")
    if env.has("PMI_RANK"):
        env.required("PMI_SIZE", beside="PMI_RANK")


def _first_integer(env: Variables, *names: str, default: int | None) -> int | None:
    name = env.first(*names)
    return default if name is None else env.integer(name)


def _port(number: int) -> int:
    """A port below the range from which Linux gives out its own (32768 and up)."""
    return 15000 + number % 15000


def _is_loopback(host: str | None) -> bool:
    if host is None or host.lower() == "localhost":
        return host is not None
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
