"""Run the stages of a plan on this machine.

Enters: the flat inputs of the Dynamo graph. Leaves: its flat outputs, on the caller's device. Values cross to another
device only between stages, by a differentiable ``.to``; a stage that finds or leaves a value on a wrong device is a
:class:`DeviceError`. Several microbatches flow through one worker thread per stage, in GPipe order (``schedule.py``)::

    caller   cut ──► (m, values) ... ──► join ──► outputs           S = 3 stages, M = 4 microbatches
    worker 0    0  1  2  3                                          a stage starts m when
    worker 1       0  1  2  3                                         (1) it has finished m - 1, and
    worker 2          0  1  2  3                                      (2) the stages it reads from have finished m

One stage at home is a plain call. One microbatch, or random numbers drawn in two stages, runs in the caller's thread:
threads share torch's generator, so only a single drawing stage draws in the same order each time.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from heterps_compile.errors import DeviceError, PlanError
from heterps_compile.runtime.row_split import Piece, RowSplit, cut, merge_pieces
from heterps_compile.runtime.schedule import gpipe, stage_order
from heterps_compile.runtime.thread_state import ThreadState, is_bound_to_this_thread
from heterps_compile.runtime.workers import Job, Workers

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProgram:
    """One stage ready to run: ``run(*inputs)`` returns the tuple of ``outputs``; both are names of values.

    ``uses_rng`` tells that it draws random numbers.
    """

    name: str
    resource: str
    device: torch.device
    run: Callable[..., tuple[Any, ...]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    uses_rng: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """When a stage ran a microbatch, in seconds since the call began."""

    stage: str
    microbatch: int
    start_s: float
    end_s: float


@final
class LocalPipeline:
    """A callable over the flat graph inputs. Safe to call from several threads; :meth:`close` ends its workers.

    ``inputs`` are the names of the graph inputs in order. An item of ``outputs`` is the name of a value, or a constant
    in a one-tuple. Inputs in ``resident``, and all parameters, must already be where their stages run: they are never
    copied, because a copy would lose what a stage writes into them. ``home`` is the device outputs return to.
    """

    def __init__(
        self,
        *,
        stages: Sequence[StageProgram],
        inputs: Sequence[str],
        outputs: Sequence[str | tuple[Any]],
        home: torch.device = CPU,
        resident: Sequence[str] = (),
        row_split: RowSplit | None = None,
        num_microbatches: int = 1,
    ) -> None:
        _check_wiring(stages, inputs, outputs)
        if row_split is not None and len(row_split.merge) != len(outputs):
            raise PlanError(f"{len(row_split.merge)} merge rules for {len(outputs)} graph outputs")
        self.stages = tuple(stages)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.home = home
        self.resident = frozenset(resident)
        self.row_split = row_split
        self.num_microbatches = num_microbatches if row_split is not None else 1
        self._wires = _Wires(self.stages, self.outputs)
        self._threads_allowed = len(self.stages) > 1 and sum(stage.uses_rng for stage in self.stages) < 2
        self._devices = tuple(dict.fromkeys(stage.device for stage in self.stages))
        self._plain = _plain_call(self.stages, self.inputs, self.outputs, home)
        self._workers = Workers(tuple(f"heterps {stage.name}" for stage in self.stages))
        weakref.finalize(self, self._workers.close)

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """The flat outputs. An error of a stage arrives as it was raised, with a note on the stage and microbatch."""
        return self._plain(args) if self._plain is not None else self._run(args, None)

    def traced(self, *args: Any) -> tuple[tuple[Any, ...], tuple[Timing, ...]]:
        """The flat outputs, and who ran when."""
        timings: list[Timing] = []
        outputs = self._run(args, timings)
        return outputs, tuple(sorted(timings, key=lambda timing: timing.start_s))

    def close(self) -> None:
        """End the worker threads. A later call starts new ones."""
        self._workers.close()

    def _run(self, args: tuple[Any, ...], timings: list[Timing] | None) -> tuple[Any, ...]:
        inputs = dict(zip(self.inputs, args, strict=True))
        pieces: tuple[Piece, ...] = (Piece(num_rows=0, inputs={}),)
        if self.num_microbatches > 1 and self.row_split is not None:
            pieces = cut(self.row_split, inputs, self.num_microbatches)
        call = _Call(
            stages=self.stages,
            wires=self._wires,
            state=ThreadState.capture(self.home, self._devices),
            values=self._scatter(inputs, pieces),
            timings=timings,
            began_s=time.perf_counter(),
        )
        if len(pieces) > 1 and self._threads_allowed and not is_bound_to_this_thread():
            self._workers.run(call.job(len(pieces)))
        else:
            for m in range(len(pieces)):
                for s in range(len(self.stages)):
                    call.step(s, m)
        sizes = [piece.num_rows for piece in pieces]
        return tuple(self._collect(place, inputs, call.values, sizes) for place in range(len(self.outputs)))

    def _collect(self, place: int, inputs: Mapping[str, Any], values: Sequence[_Values], sizes: Sequence[int]) -> Any:
        """One graph output: a constant, an input as it came, or the pieces that stages made, sent home."""
        item = self.outputs[place]
        if isinstance(item, tuple):
            return item[0]
        if item in inputs:
            return inputs[item]
        pieces = [of_microbatch[item, None] for of_microbatch in values]
        whole = pieces[0] if self.row_split is None else merge_pieces(self.row_split.merge[place], pieces, sizes)
        return _to(whole, self.home)

    def _scatter(self, inputs: Mapping[str, Any], pieces: Sequence[Piece]) -> list[_Values]:
        """Put the inputs on the devices that read them: shared ones once, the others piece by piece."""
        own = pieces[0].inputs.keys()
        shared = _Values()
        for name, value in inputs.items():
            if name not in own:
                self._place(shared, name, value)
        placed = []
        for piece in pieces:
            values = _Values(shared)
            for name, value in piece.inputs.items():
                self._place(values, name, value)
            placed.append(values)
        return placed

    def _place(self, values: _Values, name: str, value: Any) -> None:
        stays = name in self.resident or isinstance(value, torch.nn.Parameter)
        for device in self._wires.devices.get(name, ()):
            if stays and not _is_on(value, device):
                readers = ", ".join(
                    stage.name for stage in self.stages if name in stage.inputs and stage.device == device
                )
                raise DeviceError(
                    f"stage {readers} runs on {device}, but its parameter or buffer {name} is on {value.device}",
                    hint="move_in_place() brings it there once, before the first call",
                )
            values[name, device] = value if stays else _to(value, device)


class _Values(dict[tuple[str, torch.device | None], Any]):
    """The values of one microbatch by (name, device they are needed on); None stands for a graph output."""


@final
class _Wires:
    """For each value the devices that read it (None: the caller); for each stage the stages it waits for."""

    def __init__(self, stages: Sequence[StageProgram], outputs: Sequence[str | tuple[Any]]) -> None:
        self.devices: dict[str, tuple[torch.device | None, ...]] = {}
        maker = {name: s for s, stage in enumerate(stages) for name in stage.outputs}
        for stage in stages:
            for name in stage.inputs:
                self._need(name, stage.device)
        for name in maker.keys() & {item for item in outputs if isinstance(item, str)}:
            self._need(name, None)
        self.waits_for = tuple(tuple({maker[name] for name in stage.inputs if name in maker}) for stage in stages)

    def _need(self, name: str, device: torch.device | None) -> None:
        known = self.devices.get(name, ())
        if device not in known:
            self.devices[name] = (*known, device)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One call of the pipeline on its way through the stages."""

    stages: tuple[StageProgram, ...]
    wires: _Wires
    state: ThreadState
    values: list[_Values]
    timings: list[Timing] | None
    began_s: float

    def job(self, num_microbatches: int) -> Job:
        """The same work for worker threads, in GPipe order."""
        S = len(self.stages)
        orders = tuple(tuple(action.m for action in stage_order(gpipe(num_microbatches, S), s)) for s in range(S))
        return Job(orders=orders, waits_for=self.wires.waits_for, step=self.step, entered=self.state.entered)

    def step(self, s: int, m: int) -> None:
        """Run stage ``s`` on microbatch ``m`` and send its outputs to the devices that read them."""
        stage, values = self.stages[s], self.values[m]
        start_s = time.perf_counter()
        try:
            with self.state.on(stage.device):
                results = stage.run(*(values[name, stage.device] for name in stage.inputs))
            self._send(stage, values, results)
        except BaseException as error:
            place = f"stage {stage.name} on {stage.device} (resource {stage.resource})"
            error.add_note(f"in {place}, microbatch {m} of {len(self.values)}")
            raise
        if self.timings is not None:
            end_s = time.perf_counter()
            begin, end = start_s - self.began_s, end_s - self.began_s
            self.timings.append(Timing(stage=stage.name, microbatch=m, start_s=begin, end_s=end))

    def _send(self, stage: StageProgram, values: _Values, results: tuple[Any, ...]) -> None:
        if len(results) != len(stage.outputs):
            raise PlanError(f"stage {stage.name} returned {len(results)} values for its {len(stage.outputs)} outputs")
        for name, value in zip(stage.outputs, results, strict=True):
            if not _is_on(value, stage.device):
                raise DeviceError(
                    f"stage {stage.name} runs on {stage.device} but left its output {name} on {value.device}",
                    hint="an operation inside it names another device, such as torch.zeros(..., device=...)",
                )
            for device in self.wires.devices.get(name, ()):
                values[name, device] = value if device is None else _to(value, device)


def _is_on(value: Any, device: torch.device | None) -> bool:
    """Whether an operation on ``device`` may read ``value``; numbers and CPU scalars may be read anywhere."""
    if not isinstance(value, torch.Tensor) or device is None or value.device == device:
        return True
    same = value.device.type == device.type and device.index is None
    return same or (value.dim() == 0 and value.device.type == "cpu")


def _to(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, torch.Tensor) or device is None or value.device == device:
        return value
    return value.to(device)


def _plain_call(
    stages: Sequence[StageProgram], inputs: Sequence[str], outputs: Sequence[str | tuple[Any]], home: torch.device
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
    """For one stage at home: a call that only picks arguments. None for everything else."""
    if len(stages) != 1 or stages[0].device.type != home.type:
        return None
    run, (stage,) = stages[0].run, stages
    if stage.inputs == tuple(inputs) and stage.outputs == tuple(outputs):
        return lambda args: run(*args)
    picks = [inputs.index(name) for name in stage.inputs]

    def call(args: tuple[Any, ...]) -> tuple[Any, ...]:
        made = dict(zip(stage.outputs, run(*[args[i] for i in picks]), strict=True))
        return tuple(
            item[0] if isinstance(item, tuple) else made[item] if item in made else args[inputs.index(item)]
            for item in outputs
        )

    return call


def _check_wiring(stages: Sequence[StageProgram], inputs: Sequence[str], outputs: Sequence[str | tuple[Any]]) -> None:
    known = set(inputs)
    for stage in stages:
        _need_known(stage.inputs, known, f"stage {stage.name} reads")
        twice = known.intersection(stage.outputs)
        if twice:
            raise PlanError(f"stage {stage.name} makes {sorted(twice)}, which exist before it")
        known.update(stage.outputs)
    _need_known([item for item in outputs if isinstance(item, str)], known, "the graph returns")


def _need_known(names: Sequence[str], known: set[str], who: str) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PlanError(
            f"{who} {unknown}, which no graph input and no earlier stage provides",
            hint="list the stages in the order of their data",
        )
