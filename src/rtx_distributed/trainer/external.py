"""``rtxd train`` in ranks that torchrun, srun or mpirun started."""

from __future__ import annotations

import torch

from rtx_distributed.config import LoadedConfig
from rtx_distributed.errors import RtxError
from rtx_distributed.topology import ClusterEnv
from rtx_distributed.trainer.ambient import join_external
from rtx_distributed.trainer.farewell import exit_code_of, show_farewell
from rtx_distributed.trainer.resolve import resolve
from rtx_distributed.trainer.worker import train_decoder


def train_external(loaded: LoadedConfig, cluster: ClusterEnv) -> int:
    """Trains as one rank of another launcher's, and returns this rank's exit code."""
    on_cpu = loaded.config.run.device == "cpu" or not torch.cuda.is_available()
    run = resolve(loaded.config, device_kind="cpu" if on_cpu else "cuda")
    place = join_external(run.config, cluster, name=run.config.model.preset or "run")
    session = place.session
    try:
        _, summary = train_decoder(
            session,
            run.config,
            run_dir=place.run_dir,
            run_id=place.run_id,
            notes=[*place.notes, *run.notes],
        )
        session.control.done(summary)
    except BaseException as error:
        session.control.fault(error)
        session.control.close()
        if place.recorder is not None:
            place.recorder.close(exit_code=1, cause=f"{type(error).__name__}: {error}")
        if isinstance(error, RtxError) and place.recorder is not None:
            return error.exit_code  # the recorder has shown it, once
        raise
    session.close()
    session.control.close()
    code = exit_code_of(summary)
    if place.recorder is not None:
        place.recorder.close(exit_code=code)
        show_farewell(code, summary, again=["train", str(place.run_dir / "config.toml")])
    return code
