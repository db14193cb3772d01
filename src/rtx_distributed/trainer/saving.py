"""Checkpoints as the loop sees them: save together, and agree together where to go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from rtx_distributed.checkpoint.layout import assign, grid, model_fingerprint
from rtx_distributed.checkpoint.manifest import Header, is_weight, read_manifest
from rtx_distributed.checkpoint.read import read_tensors
from rtx_distributed.checkpoint.store import FOLDER, candidates, temporary_name
from rtx_distributed.checkpoint.verify import verify
from rtx_distributed.checkpoint.write import DTYPES, specs_of, write_shard
from rtx_distributed.config import Config
from rtx_distributed.data import BatchPlan
from rtx_distributed.elastic.messages import CheckpointPublished
from rtx_distributed.engine import EarlyStop, Evaluation, LossScale, RunState
from rtx_distributed.errors import CheckpointError, ResumeError
from rtx_distributed.parallel import Replicate
from rtx_distributed.parallel.optimizer import ensure_tensor, restore_scalars, state_scalars
from rtx_distributed.trainer.fixed import refuse_differences
from rtx_distributed.trainer.session import Session


class Scheduler(Protocol):
    """A learning-rate scheduler of the user's; its state is plain numbers."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Saver:
    """Writes and reads the run's checkpoints.

    Args:
        fixed: what a resumed run must agree on, beyond the model; JSON values.
        run_id: names the run; the run folder's own, kept in its first checkpoint.
    """

    def __init__(
        self,
        session: Session,
        layout: Replicate,
        config: Config,
        *,
        run_dir: Path,
        fixed: dict[str, Any],
        run_id: str,
    ) -> None:
        self.session = session
        self.layout = layout
        self.config = config
        self.run_dir = run_dir
        self.fixed = fixed
        self.run_id = run_id
        self.scheduler: Scheduler | None = None
        self.last_path: str | None = None
        self._attempts: dict[int, int] = {}

    def save(self, state: RunState) -> bool:
        """Writes this rank's part, waits until the checkpoint is published or dropped, and tells
        whether anybody was asked to stop meanwhile.

        A failed write drops the attempt on all ranks; training goes on.
        """
        session = self.session
        session.control.phase("checkpoint", state.step)
        attempt = self._attempts.get(state.step, 0)
        self._attempts[state.step] = attempt + 1
        name = temporary_name(
            generation=session.communicator.generation, step=state.step, attempt=attempt
        )
        folder = self.run_dir / FOLDER / name
        tensors = self.layout.tensors()
        specs = specs_of(tensors)
        report, error = None, None
        try:
            chunks = assign(grid(specs), session.world_size)[session.rank]
            report = write_shard(folder, rank=session.rank, chunks=chunks, tensors=tensors)
        except (CheckpointError, OSError) as caught:
            error = str(caught)
        header = self._header(state, specs) if session.rank == 0 else None
        session.control.shard_written(
            state.step, folder=folder, report=report, manifest=header, error=error
        )
        answer = session.control.wait_checkpoint(state.step)
        if isinstance(answer, CheckpointPublished):
            self.last_path = answer.path
        wanted = [float(session.control.stop_requested)]
        return session.communicator.sum_scalars(wanted, device=session.device)[0] > 0

    def _header(self, state: RunState, specs: dict[str, Any]) -> Header:
        layout = self.layout
        return Header(
            run_id=self.run_id,
            generation=self.session.communicator.generation,
            step=state.step,
            samples=state.samples,
            tokens=state.tokens,
            seed=self.config.train.seed,
            world_size=self.session.world_size,
            model_fingerprint=model_fingerprint({n: s for n, s in specs.items() if is_weight(n)}),
            config=self.config.model_dump(mode="json"),
            tensors=specs,
            data=self.fixed,
            aliases=layout.aliases(),
            state=self._encode(state),
        )

    def choose(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that verifies on all ranks, and what was passed over.

        Raises:
            CheckpointError: there are checkpoints, but none that verifies.
        """
        wish = self.config.run.resume
        if wish not in ("auto", "never"):
            path = Path(wish)
            problems = self._problems(path)
            if problems:
                raise CheckpointError(
                    f"`run.resume` names `{path}`, which does not verify: {problems}"
                )
            return path, []
        if wish == "never":
            return None, []
        passed: list[str] = []
        found = candidates(self.run_dir)
        self._agree_on_list([candidate.step for candidate in found])
        for candidate in found:
            problem = self._problems(candidate.path, known=candidate.problem)
            if not problem:
                return candidate.path, passed
            passed.append(f"{candidate.path.name}: {problem}")
        if passed:
            lines = "\n".join(f"  {line}" for line in passed)
            raise CheckpointError(
                f"no checkpoint in `{self.run_dir / FOLDER}` is complete:\n{lines}\n"
                "Nothing was deleted. Restore the missing files, or start in another `run.dir`"
            )
        return None, []

    def _agree_on_list(self, steps: list[int]) -> None:
        """All ranks must see the same folder, or they would resume from different steps."""
        session = self.session
        key = float(hash(tuple(steps)) % 2**50)
        extremes = torch.tensor([key, -key], dtype=torch.float64, device=session.device)
        session.communicator.all_reduce(extremes, op="max").wait()
        top, bottom = extremes.tolist()
        if top != -bottom:
            raise CheckpointError(
                f"rank {session.rank} sees the checkpoints of steps {steps} in `{self.run_dir}`, "
                "another rank sees others: is the path shared by all nodes?"
            )

    def _problems(self, path: Path, *, known: str | None = None) -> str | None:
        """What is wrong with a checkpoint, by the checks of all ranks: each reads its share of the
        files. The text is of the lowest rank that found something."""
        session = self.session
        mine = known
        if mine is None:
            try:
                files = sorted(read_manifest(path).files)[session.rank :: session.world_size]
                found = verify(path, full=True, files=files)
                mine = "; ".join(str(problem) for problem in found[:5]) or None
            except CheckpointError as error:
                mine = str(error)
        length = 0 if mine is None else len(mine.encode())
        lengths = torch.zeros(session.world_size, dtype=torch.int64, device=session.device)
        lengths[session.rank] = length
        session.communicator.all_reduce(lengths).wait()
        bad = [rank for rank, size in enumerate(lengths.tolist()) if size]
        if not bad:
            return None
        text = torch.zeros(int(lengths[bad[0]]), dtype=torch.uint8, device=session.device)
        if session.rank == bad[0]:
            assert mine is not None
            text.copy_(torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8))
        session.communicator.broadcast(text, root=bad[0]).wait()
        return bytes(text.cpu().tolist()).decode(errors="replace")

    def load(self, path: Path, first: RunState) -> RunState:
        """Fills model and optimizer from ``path``.

        Raises:
            ResumeError: it is of another model, data or fixed setting.
            CheckpointError: it cannot be read.
        """
        manifest = read_manifest(path)
        refuse_differences(path, manifest.data, self.fixed)
        wanted = self.layout.tensors()
        for name, entry in manifest.tensors.items():
            if name not in wanted:
                tensor = ensure_tensor(
                    self.layout.optimizer,
                    self.layout.names,
                    name,
                    tuple(entry.shape),
                    DTYPES[entry.dtype],
                )
                if tensor is not None:
                    wanted[name] = tensor
        read_tensors(path, wanted)
        self.layout.buffers.reload()
        self.run_id = manifest.run_id
        self.last_path = str(path)
        counts = {"step": manifest.step, "samples": manifest.samples, "tokens": manifest.tokens}
        return self.take_numbers(manifest.state | counts, first)

    def numbers(self, state: RunState) -> dict[str, Any]:
        """The numbers of the committed state, beside its tensors; see `take_numbers`."""
        return self._encode(state) | {
            "step": state.step,
            "samples": state.samples,
            "tokens": state.tokens,
        }

    def take_numbers(self, numbers: dict[str, Any], first: RunState) -> RunState:
        """Puts the optimizer's numbers back, and returns the state."""
        layout = self.layout
        restore_scalars(layout.optimizer, layout.names, numbers.get("optimizer", {}))
        groups = layout.optimizer.param_groups
        for group, rate in zip(groups, numbers.get("rates", []), strict=False):
            group["lr"] = rate
        if self.scheduler is not None and numbers.get("scheduler"):
            self.scheduler.load_state_dict(numbers["scheduler"])
        return _decode_state(numbers, first)

    def _encode(self, state: RunState) -> dict[str, Any]:
        encoded = _encode_state(state, self.layout)
        if self.scheduler is not None:
            plain = {
                key: value
                for key, value in self.scheduler.state_dict().items()
                if not callable(value) and not isinstance(value, torch.optim.Optimizer)
            }
            encoded["scheduler"] = msgspec.to_builtins(plain)
        return encoded


class SaveOnly:
    """Step boundaries of a loop whose evaluation is the user's own."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def evaluate(self, state: RunState) -> Evaluation | None:
        return None

    def save(self, state: RunState) -> bool:
        return self._saver.save(state)


def resume(saver: Saver, first: RunState, plan: BatchPlan) -> RunState:
    """The state to go on from: of the newest valid checkpoint, else ``first``. The run folder's
    rows from there on are cut away before this returns.

    Raises:
        ResumeError: it is of another run, or ended with a short step and ``plan`` goes on.
        CheckpointError: none verifies.
    """
    path, passed = saver.choose()
    state = first if path is None else saver.load(path, first)
    if path is not None and state.step < plan.steps:
        _refuse_after_short_step(path, state, plan)
    saver.session.control.resumed(state.step, path=path, passed_over=passed)
    saver.session.communicator.barrier()
    return state


def _refuse_after_short_step(path: Path, state: RunState, plan: BatchPlan) -> None:
    """A step of fixed epochs may be short at their end. Going on after it would leave out, or see
    again, the samples that a longer run has in that step."""
    whole = state.step * plan.global_batch
    if state.samples != whole:
        raise ResumeError(
            f"`{path}` ended with a short step: {state.samples} samples in {state.step} steps of "
            f"{plan.global_batch}, so a longer run has other samples in its last step. Go on from "
            "the checkpoint before it (`--run.resume PATH --run.dir NEW`), or start anew"
        )


def _encode_state(state: RunState, layout: Replicate) -> dict[str, Any]:
    scale = state.scale
    return {
        "updates": state.updates,
        "loss_scale": None if scale is None else {"value": scale.value, "good": scale.good},
        "early_stop": {"best": state.early.best, "bad": state.early.bad},
        "optimizer": state_scalars(layout.optimizer, layout.names),
        "rates": [float(group["lr"]) for group in layout.optimizer.param_groups],
    }


def _decode_state(saved: dict[str, Any], first: RunState) -> RunState:
    scale = first.scale
    if scale is not None and saved.get("loss_scale"):
        scale = LossScale(saved["loss_scale"]["value"], saved["loss_scale"]["good"])
    early = saved.get("early_stop") or {}
    return replace(
        first,
        step=saved["step"],
        updates=saved["updates"],
        tokens=saved["tokens"],
        samples=saved["samples"],
        scale=scale,
        early=EarlyStop(first.early.patience, early.get("best"), early.get("bad", 0)),
    )
