"""How a script finds the run it belongs to: started by our supervisor, by another launcher, or by
hand."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.util
import os
import socket
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from rtx_distributed.config import Config, load
from rtx_distributed.elastic.control import Control
from rtx_distributed.elastic.serve import RecorderThread, serve_in_thread
from rtx_distributed.errors import ClusterError, CommError, ConfigError, RtxError
from rtx_distributed.metrics import make_console
from rtx_distributed.topology import ClusterEnv, detect
from rtx_distributed.trainer.farewell import exit_code_of, show_farewell
from rtx_distributed.trainer.faults import inject_faults, refuse_faults
from rtx_distributed.trainer.folders import claim_folder, run_id_of, saved_config, sink_opener
from rtx_distributed.trainer.given import given_settings, overlay, too_late
from rtx_distributed.trainer.publisher import RunPublisher
from rtx_distributed.trainer.session import Session, open_session, worker_device

_STORE_S = 60.0
_NOT_ELASTIC = "nothing is elastic here: a fault ends the run"


@dataclass(slots=True)
class Place:
    """A process's place in a run, shared by all trainers that the process makes.

    Attributes:
        summary: what the run says at its end; the last ``train`` decides.
        given: the configuration that the script gave.
        explicit: settings that a file, the environment or the command line set.
    """

    session: Session
    config: Config
    local_rank: int
    run_dir: Path
    run_id: str
    notes: list[str] = field(default_factory=list)
    recorder: RecorderThread | None = None
    supervised: bool = False
    summary: dict[str, Any] = field(default_factory=dict)
    given: Config | None = None
    explicit: tuple[str, ...] = ()

    def finish(self, summary: dict[str, Any]) -> None:
        """The end of a training. Under our supervisor the script may go on, so the farewell comes
        when it ends; elsewhere the run's files are completed at once."""
        self.summary = summary
        if not self.supervised:
            self.leave()

    def leave(self, *, exit_code: int = 0, cause: str = "") -> None:
        """Says goodbye and closes what this process holds. A second call does nothing."""
        if _HOLDER.place is not self:
            return
        _HOLDER.place = None
        control = self.session.control
        if exit_code == 0:
            if self.summary and self.summary["ending"] is None and self.session.rank == 0:
                control.warn(
                    f"the loop was left in step {self.summary['step']} of {self.summary['of']}: "
                    "the run is incomplete, and steps after its last checkpoint are not saved"
                )
            control.done(self.summary)
            exit_code = exit_code_of(self.summary)
            cause = "stopped by a signal" if exit_code else cause
        _HOLDER.exit_code = exit_code
        self.session.close()
        control.close()
        if self.recorder is not None:
            self.recorder.close(exit_code=exit_code, cause=cause)
            show_farewell(exit_code, self.summary)


class _Holder:
    """The one place of this process. A script makes trainers without handing anything on, so there
    has to be one thing that it need not be told of."""

    def __init__(self) -> None:
        self.place: Place | None = None
        self.supervisor: tuple[Control, dict[str, Any]] | None = None
        self.joins = 0
        self.error: BaseException | None = None
        self.hooked = False
        self.exit_code = 0


_HOLDER = _Holder()


def adopt(control: Control, payload: dict[str, Any]) -> None:
    """Tells this process, before the script runs, that a supervisor owns it."""
    _HOLDER.supervisor = (control, payload)


def current() -> Place | None:
    """The place of this process, if it has joined a run."""
    return _HOLDER.place


def join(config: Config | None = None) -> Place:
    """This process's place; found at the first call and kept.

    Raises:
        ClusterError: the launcher's variables contradict each other.
        CommError: the others did not come.
    """
    if _HOLDER.place is not None:
        if config is not None and config != _HOLDER.place.given:
            raise ConfigError(
                "this process has joined its run with other settings; give the same `config` to "
                "all trainers of a script, or to the first one alone"
            )
        return _HOLDER.place
    given = config
    if _HOLDER.supervisor is not None:
        place = _join_supervised(*_HOLDER.supervisor, config)
        explicit = _HOLDER.supervisor[1]["explicit"]
    else:
        _leave_at_exit()
        cluster = detect(os.environ)
        loaded = load((), environ=os.environ)
        explicit = given_settings(loaded)
        config = loaded.config if config is None else overlay(config, explicit)
        if cluster is not None and cluster.world_size > 1:
            place = join_external(config, cluster, name=_script_name())
        else:
            place = _join_alone(config)
    place.given, place.explicit = given, tuple(explicit)
    _HOLDER.place = place
    return place


def _join_supervised(control: Control, payload: dict[str, Any], config: Config | None) -> Place:
    settings = Config(**payload["config"])
    if config is not None:
        settings = overlay(config, payload["explicit"])
        if config.run.dir is not None and "run.dir" not in payload["explicit"]:
            control.warn(
                f"the script's `run.dir` ({config.run.dir}) is not used: the launcher has made the "
                "run folder already; give `--run.dir` to `rtxd launch`"
            )
        for key in too_late(config, payload["explicit"]):
            control.warn(
                f"the script's `{key}` is not used: it counts before a worker is started; give "
                f"`--{key}` to `rtxd launch`"
            )
    device = worker_device(settings)
    inject_faults(control, payload["faults"], accelerator=device.type != "cpu")
    session = open_session(control, settings, device=device)
    return Place(
        session,
        settings,
        local_rank=session.rank,
        run_dir=Path(payload["run_dir"]),
        run_id=payload["run_id"],
        notes=list(payload["notes"]),
        supervised=True,
    )


def _join_alone(config: Config) -> Place:
    refuse_faults(config)
    folder = claim_folder(config, name=_script_name())
    run_id = run_id_of(folder)
    recorder = _record(config, folder, workers=1)
    device = worker_device(config)
    control = Control.connect(recorder.address, token=recorder.token, worker=recorder.first_worker)
    notes = [f"run folder: {folder}", f"one worker, started by hand: {_NOT_ELASTIC}"]
    visible = torch.cuda.device_count() if device.type == "cuda" else 0
    if visible > 1:
        notes.append(
            f"{visible} devices are visible and one is used; `rtxd launch --nproc {visible} "
            f"{sys.argv[0]}` uses all"
        )
    session = open_session(control, config, device=device)
    return Place(session, config, 0, folder, run_id, notes=notes, recorder=recorder)


def _record(
    config: Config, folder: Path, *, workers: int, host: str = "127.0.0.1"
) -> RecorderThread:
    return serve_in_thread(
        folder,
        workers=workers,
        console=make_console(sys.stderr, log_every=config.metrics.log_every),
        publisher=RunPublisher(folder, keep=config.checkpoint.keep),
        host=host,
        config_toml=saved_config(config, folder),
        open_sink=sink_opener(config, folder),
    )


def join_external(config: Config, cluster: ClusterEnv, *, name: str) -> Place:
    """The place of a rank that torchrun, srun or mpirun started. Rank 0 hosts the recorder."""
    refuse_faults(config)
    store = _external_store(cluster)
    recorder: RecorderThread | None = None
    one_node = cluster.local_world_size == cluster.world_size
    if cluster.rank == 0:
        try:
            folder = claim_folder(config, name=name)
            host = "127.0.0.1" if one_node else cluster.rendezvous()[0]
            recorder = _record(config, folder, workers=cluster.world_size, host=host)
        except (RtxError, OSError) as error:
            store.set("failed", f"rank 0 could not open the run folder: {error}")
            raise
        store.set("folder", str(folder.absolute()))
        store.set("run_id", run_id_of(folder))
        store.set("address", f"{recorder.address[0]}:{recorder.address[1]}")
        store.set("first_worker", str(recorder.first_worker))
        store.set("token", recorder.token)
    address = _fetch(store, "address")
    host, _, port = address.rpartition(":")
    control = Control.connect(
        (host, int(port)),
        token=_fetch(store, "token"),
        worker=int(_fetch(store, "first_worker")) + cluster.rank,
    )
    run_dir = Path(_fetch(store, "folder"))
    session = open_session(
        control,
        config,
        device=worker_device(config, local_rank=cluster.local_rank),
        store=store,
    )
    return Place(
        session,
        config,
        local_rank=cluster.local_rank,
        run_dir=run_dir,
        run_id=_fetch(store, "run_id"),
        notes=[
            f"run folder: {run_dir}",
            f"{cluster.world_size} ranks started by {cluster.source}: {_NOT_ELASTIC}",
        ],
        recorder=recorder,
    )


def _external_store(cluster: ClusterEnv) -> c10d.Store:
    """The launcher's own store where it has one, else one that rank 0 serves."""
    host, port = cluster.rendezvous()
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise ClusterError(
            f"the host of rank 0, `{host}`, has no address here: {error}; set `MASTER_ADDR` to a "
            "name or address that every node can resolve"
        ) from error
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = c10d.TCPStore(
            host,
            port,
            world_size=None,
            is_master=cluster.rank == 0 and not agents,
            timeout=timedelta(seconds=_STORE_S),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        raise CommError(
            f"rank {cluster.rank} cannot meet the others at `{host}:{port}`: {line}"
        ) from error
    _HOLDER.joins += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return c10d.PrefixStore(f"rtxd/{attempt}/{_HOLDER.joins}/", store)


def _fetch(store: c10d.Store, key: str) -> str:
    """A value of rank 0, or its word that it failed."""
    for _ in range(int(_STORE_S * 2)):
        if store.check(["failed"]):
            raise ClusterError(store.get("failed").decode())
        try:
            store.wait([key], timedelta(seconds=0.5))
        except RuntimeError:
            continue
        return str(store.get(key).decode())
    raise CommError(f"rank 0 did not say its `{key}` within {_STORE_S:g} s")


def _script_name() -> str:
    stem = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    return stem if stem not in ("", "-c", "-") else "python"


def _leave_at_exit() -> None:
    """A script that just ends has done its work; one that raises has not."""
    if _HOLDER.hooked:
        return
    _HOLDER.hooked = True
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        _HOLDER.error = error
        shown(kind, error, trace)

    sys.excepthook = hook
    atexit.register(_say_goodbye)


def _say_goodbye() -> None:
    """The last act of a script that no supervisor started. A run that was stopped, or that the
    user's input ended, has an exit code of its own, which the interpreter would make 0 or 1."""
    place, error = _HOLDER.place, _HOLDER.error
    if error is not None:
        code = error.exit_code if isinstance(error, RtxError) else 1
        if place is not None:
            place.session.control.fault(error)
            place.leave(exit_code=code, cause=f"{type(error).__name__}: {error}")
        _HOLDER.exit_code = code
    elif place is not None:
        place.leave()
    if _HOLDER.exit_code:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(_HOLDER.exit_code)
