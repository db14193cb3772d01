"""R39: one table of rules; contradictions are errors before any connection."""

from __future__ import annotations

import pytest

from rtx_distributed.errors import ClusterError
from rtx_distributed.topology import ClusterEnv, detect, expand_nodelist

SLURM = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NODELIST": "node[01-02]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}


def place(environ: dict[str, str]) -> tuple[int, int, int]:
    found = detect(environ)
    assert found is not None
    return found.rank, found.local_rank, found.world_size


def test_r39_slurm() -> None:
    found = detect(SLURM)
    assert found == ClusterEnv(
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=None,
        node_rank=1,
        master_addr="node01",
        master_port=15000 + 7002,
        source="slurm",
    )
    assert found.rendezvous() == ("node01", 22002)


def test_r39_slurm_without_step_id() -> None:
    assert place({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}) == (5, 1, 8)


def test_r39_node_list_names_the_master() -> None:
    assert expand_nodelist("a[1-3,7],b2") == ["a1", "a2", "a3", "a7", "b2"]
    found = detect({**SLURM, "SLURM_STEP_NODELIST": "a[1-3,7],b2"})
    assert found is not None
    assert found.master_addr == "a1"


def test_r39_tasks_contradict_tasks_per_node() -> None:
    environ = {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "2"}
    with pytest.raises(ClusterError, match=r"`SLURM_NTASKS` = 1 .*`SLURM_NTASKS_PER_NODE` = 2"):
        detect(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NODELIST": "n1"},
        # a batch script has a rank, and no step
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        # salloc's interactive step, sbatch's batch step
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
        {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"},
        # srun --pty bash
        {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_PTY_PORT": "41000"},
        {},
        {"RANK": "", "WORLD_SIZE": ""},
        {"WORLD_SIZE": "1"},
    ],
)
def test_r39_allocation_without_step_is_a_local_start(environ: dict[str, str]) -> None:
    assert detect(environ) is None


def test_r39_rank_and_world_size_override_slurm() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    found = detect(environ)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank) == (1, 2, 1)
    assert found.rendezvous() == ("127.0.0.1", 29500)


def test_r39_open_mpi() -> None:
    assert place(OPEN_MPI) == (3, 1, 4)
    # mpirun inside a Slurm job: the step is that of its daemons
    assert place({**OPEN_MPI, **SLURM, "SLURM_PROCID": "1"}) == (3, 1, 4)


@pytest.mark.parametrize("more", [{"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "4"}])
def test_r39_open_mpi_contradicts_rank(more: dict[str, str]) -> None:
    with pytest.raises(ClusterError, match="`RANK` = 0 contradicts `OMPI_COMM_WORLD_RANK` = 3"):
        detect({**OPEN_MPI, **more})


def test_torchrun() -> None:
    expected = ClusterEnv(5, 1, 8, 4, 1, "node01", 29400, "torchrun")
    assert detect(TORCHRUN) == expected
    # under mpirun or srun too: torchrun made these processes, the others made torchrun
    assert detect({**TORCHRUN, **OPEN_MPI, **SLURM, **PMI}) == expected


def test_local_rank_is_never_the_global_rank_of_another_node() -> None:
    by_hand = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node01"}
    with pytest.raises(ClusterError, match="`LOCAL_RANK` is not"):
        detect(by_hand)
    assert place({**SLURM, **by_hand}) == (5, 1, 8)
    assert place({**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n"}) == (3, 1, 4)


def test_pmi_of_mpich_and_intel() -> None:
    found = detect(PMI)
    assert found == ClusterEnv(3, 1, 4, 2, None, None, None, "mpi")
    with pytest.raises(ClusterError, match="`MASTER_ADDR` and `MASTER_PORT`"):
        found.rendezvous()
    found = detect({**PMI, "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"})
    assert found is not None
    assert found.rendezvous() == ("127.0.0.1", 29500)
    assert (found.local_world_size, found.node_rank) == (4, 0)


def test_pmi_under_srun_is_slurm() -> None:
    found = detect({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"})
    assert found is not None
    assert found.source == "slurm"
    with pytest.raises(ClusterError, match="`PMI_RANK` = 3 contradicts `SLURM_PROCID` = 5"):
        detect({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "8"})
    # mpiexec of MPICH or Intel inside a Slurm job
    found = detect({**SLURM, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", **PMI})
    assert found is not None
    assert (found.source, found.rank, found.world_size) == ("mpi", 3, 4)


def test_slurm_tasks_of_this_node() -> None:
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    found = detect(environ)
    assert found is not None
    assert found.local_world_size == 4
    uneven = {**SLURM, "SLURM_NODELIST": "a[1-4]", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"}
    found = detect({**uneven, "SLURM_PROCID": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x2),3,1"})
    assert found is not None
    assert found.local_world_size == 1


@pytest.mark.parametrize(
    ("environ", "first", "second"),
    [
        ({**SLURM, "SLURM_PROCID": "8"}, "`SLURM_PROCID` = 8", "`SLURM_NTASKS` = 8"),
        ({**SLURM, "SLURM_NODEID": "2"}, "`SLURM_NODEID` = 2", "= node[01-02]"),
        ({**SLURM, "SLURM_LOCALID": "6"}, "`SLURM_LOCALID` = 6", "`SLURM_PROCID` = 5"),
        (
            {**SLURM, "SLURM_LOCALID": "4", "SLURM_TASKS_PER_NODE": "4(x2)"},
            "`SLURM_LOCALID` = 4",
            "`SLURM_TASKS_PER_NODE` = 4(x2)",
        ),
        ({**TORCHRUN, "RANK": "8"}, "`RANK` = 8", "`WORLD_SIZE` = 8"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "`LOCAL_RANK` = 4", "`LOCAL_WORLD_SIZE` = 4"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "`LOCAL_WORLD_SIZE` = 9", "`WORLD_SIZE` = 8"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"},
            "`OMPI_COMM_WORLD_RANK` = 4",
            "`OMPI_COMM_WORLD_SIZE` = 4",
        ),
        ({**OPEN_MPI, "WORLD_SIZE": "2"}, "`WORLD_SIZE` = 2", "`OMPI_COMM_WORLD_SIZE` = 4"),
        ({**PMI, "PMI_RANK": "4"}, "`PMI_RANK` = 4", "`PMI_SIZE` = 4"),
        ({**PMI, "MPI_LOCALRANKID": "2"}, "`MPI_LOCALRANKID` = 2", "`MPI_LOCALNRANKS` = 2"),
        ({"RANK": "0"}, "`RANK` = 0", "`WORLD_SIZE` is not"),
        ({"WORLD_SIZE": "2"}, "`WORLD_SIZE` = 2", "`RANK` is not"),
        ({"LOCAL_RANK": "1"}, "`LOCAL_RANK` = 1", "`RANK` is not"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "`MASTER_PORT` = 70000", "65535"),
        ({**TORCHRUN, "RANK": "-1"}, "`RANK` = '-1'", "whole number"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "`WORLD_SIZE` = 'two'", "whole number"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "`PMI_RANK` = 1", "`MPI_LOCALRANKID` is not"),
    ],
)
def test_contradictions_name_both(environ: dict[str, str], first: str, second: str) -> None:
    with pytest.raises(ClusterError) as caught:
        detect(environ)
    assert first in str(caught.value)
    assert second in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node01", ["node01"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
        ("b,a", ["b", "a"]),
    ],
)
def test_expand_nodelist(text: str, hosts: list[str]) -> None:
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a[", "a[1-", "a[]", "a[x]", "a[3-1]", "a,,b", "a[1-9999999]"]
)
def test_malformed_nodelist(text: str) -> None:
    with pytest.raises(ClusterError, match="node list"):
        expand_nodelist(text)
