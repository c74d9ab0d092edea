"""The local pipeline: transparent in numbers and modes, strict about devices, clean about threads."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterps_compile.devices import sim
from heterps_compile.devices.move import move_in_place
from heterps_compile.errors import DeviceError, PlanError
from heterps_compile.runtime.local import LocalPipeline, StageProgram
from heterps_compile.runtime.row_split import Merge, RowSplit

CPU, SIM = torch.device("cpu"), sim.install()
WEIGHTS = ("table", "w1", "b1", "w2", "b2")
INPUTS = ("ids", "dense", "target", *WEIGHTS)
OUTPUTS = ("logits", "loss", ("constant",), "ids")
SPLIT = RowSplit(
    split=("ids", "dense", "target"),
    merge=(Merge(), Merge(kind="mean"), Merge(kind="same"), Merge(kind="same")),
)


def weights() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(*shape)) for shape in ((20, 4), (5, 7), (5,), (1, 5), (1,))]


def look_up(ids: Tensor, table: Tensor) -> tuple[Any, ...]:
    return (F.embedding(ids, table),)


def hide(rows: Tensor, dense: Tensor, w1: Tensor, b1: Tensor) -> tuple[Any, ...]:
    return (F.linear(torch.cat([rows, dense], 1), w1, b1).relu(),)


def score(hidden: Tensor, rows: Tensor, target: Tensor, w2: Tensor, b2: Tensor) -> tuple[Any, ...]:
    logits = F.linear(hidden, w2, b2).squeeze(1) + rows.sum(1)  # rows skip the stage in the middle
    return logits, F.mse_loss(logits, target)


def stage(name: str, device: torch.device, run: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> StageProgram:
    return StageProgram(name=name, resource=device.type, device=device, run=run, inputs=inputs, outputs=outputs)


def stages(middle: torch.device = CPU, **replaced: Any) -> tuple[StageProgram, ...]:
    runs = {"look_up": look_up, "hide": hide, "score": score} | replaced
    return (
        stage("look_up", CPU, runs["look_up"], ("ids", "table"), ("rows",)),
        stage("hide", middle, runs["hide"], ("rows", "dense", "w1", "b1"), ("hidden",)),
        stage("score", CPU, runs["score"], ("hidden", "rows", "target", "w2", "b2"), ("logits", "loss")),
    )


def pipeline(middle: torch.device = CPU, num_microbatches: int = 3, **replaced: Any) -> LocalPipeline:
    return LocalPipeline(
        stages=stages(middle, **replaced),
        inputs=INPUTS,
        outputs=OUTPUTS,
        row_split=SPLIT,
        num_microbatches=num_microbatches,
    )


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randint(0, 20, (rows,)), torch.randn(rows, 3), torch.randn(rows)


def eager(args: tuple[Any, ...]) -> tuple[Any, ...]:
    ids, dense, target, table, w1, b1, w2, b2 = args
    (rows,) = look_up(ids, table)
    (hidden,) = hide(rows, dense, w1, b1)
    return (*score(hidden, rows, target, w2, b2), "constant", ids)


def pipeline_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("heterps ")]


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    if pipeline_threads():
        gc.collect()
    assert pipeline_threads() == []


@pytest.mark.parametrize("middle", [CPU, SIM], ids=["cpu", "cpu+sim"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_outputs_and_gradients_are_those_of_eager(middle: torch.device, microbatches: int, rows: int) -> None:
    run, mine, theirs = pipeline(middle, microbatches), weights(), weights()
    for parameter in mine[1:3]:
        move_in_place(parameter, middle)
    data = batch(rows)
    dense = data[1].requires_grad_(), data[1].detach().clone().requires_grad_()
    for _ in range(2):
        ours = run(data[0], dense[0], data[2], *mine)
        reference = eager((data[0], dense[1], data[2], *theirs))
        assert ours[2:] == ("constant", data[0])
        for out, other in zip(ours[:2], reference[:2], strict=True):
            assert out.device == CPU
            torch.testing.assert_close(out, other)
        (ours[0].square().mean() + ours[1]).backward()
        (reference[0].square().mean() + reference[1]).backward()
    for parameter, other in zip([dense[0], *mine], [dense[1], *theirs], strict=True):
        assert parameter.grad is not None
        assert parameter.grad.device == parameter.device
        torch.testing.assert_close(parameter.grad.cpu(), other.grad, rtol=1e-5, atol=1e-5)
    assert len(pipeline_threads()) == (3 if min(microbatches, rows) > 1 else 0)


@pytest.mark.parametrize("middle", [CPU, SIM], ids=["cpu", "cpu+sim"])
def test_an_empty_batch(middle: torch.device) -> None:
    args = [*batch(0), *weights()]
    for parameter in args[4:6]:
        move_in_place(parameter, middle)
    logits = pipeline(middle)(*args)[0]
    assert logits.shape == (0,)
    logits.sum().backward()


def test_one_microbatch_is_bitwise_eager() -> None:
    args = (*batch(9), *weights())
    for ours, theirs in zip(pipeline(CPU, 1)(*args)[:2], eager(args)[:2], strict=True):
        assert torch.equal(ours, theirs)


def test_results_repeat_bit_for_bit() -> None:
    run, args = pipeline(SIM, 4), (*batch(13), *weights())
    for parameter in args[4:6]:
        move_in_place(parameter, SIM)
    seen = []
    for _ in range(5):
        outputs = run(*args)
        seen.append([outputs[0].detach(), *torch.autograd.grad(outputs[1], args[3:])])
    for again in seen[1:]:
        assert all(torch.equal(ours.cpu(), first.cpu()) for ours, first in zip(again, seen[0], strict=True))


def test_each_value_crosses_once_and_shared_inputs_once_per_call() -> None:
    run, args = pipeline(SIM, 4), (*batch(8), *weights())
    for parameter in args[4:6]:
        move_in_place(parameter, SIM)
    before = sim.transfers()
    with torch.no_grad():
        run(*args)
    crossed = sim.transfers() - before
    assert (crossed.num_to_sim, crossed.num_to_cpu) == (8, 4)  # rows and dense; hidden
    assert (crossed.bytes_to_sim, crossed.bytes_to_cpu) == (8 * (4 + 3) * 4, 8 * 5 * 4)

    shared = LocalPipeline(
        stages=(
            stage("scale", SIM, lambda x, mask: (x * mask,), ("x", "mask"), ("y",)),
            stage("sum", CPU, lambda y: (y.sum(1),), ("y",), ("z",)),
        ),
        inputs=("x", "mask"),
        outputs=("z",),
        row_split=RowSplit(split=("x",), merge=(Merge(),)),
        num_microbatches=3,
    )
    before = sim.transfers()
    assert torch.equal(shared(torch.ones(6, 2), torch.tensor([1.0, 2.0]))[0], torch.full((6,), 3.0))
    assert (sim.transfers() - before).num_to_sim == 3 + 1


def test_one_stage_at_home_gets_the_arguments_themselves() -> None:
    seen: list[tuple[Any, ...]] = []

    def run(*args: Any) -> tuple[Any, ...]:
        seen.append(args)
        return (args[0] + 1,)

    x, w = torch.ones(2), torch.ones(3)
    same = LocalPipeline(stages=(stage("all", CPU, run, ("x", "w"), ("y",)),), inputs=("x", "w"), outputs=("y",))
    assert same(x, w)[0].tolist() == [2.0, 2.0]
    picked = LocalPipeline(
        stages=(stage("all", CPU, run, ("w",), ("y",)),), inputs=("x", "w"), outputs=(("k",), "x", "y")
    )
    constant, given, made = picked(x, w)
    assert (constant, given) == ("k", x)
    assert made.shape == (3,)
    assert [[id(arg) for arg in args] for args in seen] == [[id(x), id(w)], [id(w)]]


def test_outputs_go_home() -> None:
    run = LocalPipeline(
        stages=(stage("all", SIM, lambda x: (x * 2, 7), ("x",), ("y", "n")),), inputs=("x",), outputs=("y", "n")
    )
    y, n = run(torch.ones(2))
    assert (y.device, n) == (CPU, 7)
    at_home_on_sim = LocalPipeline(
        stages=(stage("all", CPU, lambda x: (x * 2,), ("x",), ("y",)),), inputs=("x",), outputs=("y",), home=SIM
    )
    assert at_home_on_sim(torch.ones(2, device="sim"))[0].device == SIM


# ---------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_parameter_left_behind_is_named(microbatches: int) -> None:
    with pytest.raises(DeviceError, match=r"stage hide runs on sim:0, but its parameter or buffer w1 is on cpu"):
        pipeline(SIM, microbatches)(*batch(5), *weights())


def test_a_resident_buffer_is_never_copied() -> None:
    def count(x: Tensor, seen: Tensor) -> tuple[Any, ...]:
        seen.add_(x.sum())
        return (x,)

    run = LocalPipeline(
        stages=(stage("count", SIM, count, ("x", "seen"), ("y",)),),
        inputs=("x", "seen"),
        outputs=("y",),
        resident=("seen",),
    )
    with pytest.raises(DeviceError, match=r"(?s)stage count runs on sim:0.*buffer seen is on cpu.*move_in_place"):
        run(torch.ones(2), torch.zeros(1))
    buffer = torch.zeros(1)
    move_in_place(buffer, SIM)
    run(torch.ones(2), buffer)
    assert buffer.item() == 2.0


def test_a_value_left_on_the_wrong_device_is_named() -> None:
    def stray(rows: Tensor, dense: Tensor, w1: Tensor, b1: Tensor) -> tuple[Any, ...]:
        return (hide(rows, dense, w1, b1)[0].cpu(),)

    args = (*batch(5), *weights())
    for parameter in args[4:6]:
        move_in_place(parameter, SIM)
    with pytest.raises(DeviceError, match=r"stage hide runs on sim:0 but left its output hidden on cpu"):
        pipeline(SIM, 1, hide=stray)(*args)


def test_an_operation_inside_a_stage_may_not_mix_devices() -> None:
    def mixed(rows: Tensor, dense: Tensor, w1: Tensor, b1: Tensor) -> tuple[Any, ...]:
        return (hide(rows, dense, w1, b1)[0] + torch.zeros(1, 5),)

    args = (*batch(5), *weights())
    for parameter in args[4:6]:
        move_in_place(parameter, SIM)
    with pytest.raises(DeviceError, match=r"aten\.add.*two devices") as caught:
        pipeline(SIM, 3, hide=mixed)(*args)
    assert "in stage hide on sim:0 (resource sim), microbatch 0 of 3" in caught.value.__notes__


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("where", ["look_up", "hide", "score"])
def test_an_error_arrives_with_its_place_and_the_next_call_works(microbatches: int, where: str) -> None:
    healthy = {"look_up": look_up, "hide": hide, "score": score}[where]
    broken = [True]

    def breaks(*args: Any) -> tuple[Any, ...]:
        if broken[0]:
            raise IndexError("id 99 is out of range")
        return healthy(*args)  # type: ignore[operator,no-any-return]

    run, args = pipeline(CPU, microbatches, **{where: breaks}), (*batch(8), *weights())
    for _ in range(2):
        with pytest.raises(IndexError, match="id 99 is out of range") as caught:
            run(*args)
        assert caught.value.__notes__ == [f"in stage {where} on cpu (resource cpu), microbatch 0 of {microbatches}"]
        assert "breaks" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    broken[0] = False
    torch.testing.assert_close(run(*args)[0], eager(args)[0])


def test_the_first_error_wins_and_later_stages_do_not_run() -> None:
    scored = []

    def fails_on_the_third(ids: Tensor, table: Tensor) -> tuple[Any, ...]:
        if len(ids) == 2:
            raise ValueError("third")
        return look_up(ids, table)

    def scores(*args: Tensor) -> tuple[Any, ...]:
        scored.append(len(args[0]))
        return score(*args)

    run = pipeline(CPU, 3, look_up=fails_on_the_third, score=scores)
    with pytest.raises(ValueError, match="third") as caught:
        run(*batch(8), *weights())
    assert caught.value.__notes__ == ["in stage look_up on cpu (resource cpu), microbatch 2 of 3"]
    assert scored in ([], [3], [3, 3])


def test_a_failed_call_keeps_no_tensor_alive() -> None:
    def breaks(*args: Any) -> tuple[Any, ...]:
        raise ValueError("no")

    run, data = pipeline(CPU, 3, score=breaks), batch(8)
    with pytest.raises(ValueError, match="no"):
        run(*data, *weights())
    dense = weakref.ref(data[1])
    del data
    assert dense() is None  # without a garbage collection: nothing held it in a circle


def test_wiring_is_checked() -> None:
    first, second, third = stages()
    with pytest.raises(PlanError, match=r"(?s)stage hide reads \['rows'\].*in the order of their data"):
        LocalPipeline(stages=(second, first, third), inputs=INPUTS, outputs=OUTPUTS)
    with pytest.raises(PlanError, match=r"the graph returns \['nothing'\]"):
        LocalPipeline(stages=(first,), inputs=INPUTS, outputs=("nothing",))
    with pytest.raises(PlanError, match=r"stage look_up makes \['rows'\], which exist before it"):
        LocalPipeline(stages=(first, first), inputs=INPUTS, outputs=("rows",))
    with pytest.raises(PlanError, match="4 merge rules for 1 graph outputs"):
        LocalPipeline(stages=(first,), inputs=INPUTS, outputs=("rows",), row_split=SPLIT)
    two = stage("two", CPU, lambda x: (x, x), ("ids",), ("a",))
    with pytest.raises(PlanError, match="stage two returned 2 values for its 1 outputs"):
        LocalPipeline(stages=(two, third), inputs=("ids", "hidden", "rows", "target", "w2", "b2"), outputs=("a",))(
            *[torch.ones(1)] * 6
        )


# ------------------------------------------------------------------------------------------------------------ modes


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=["no_grad", "inference", "grad"]
)
def test_workers_run_in_the_callers_modes(microbatches: int, mode: Callable[[], Any]) -> None:
    seen: set[tuple[Any, ...]] = set()

    def watched(*args: Any) -> tuple[Any, ...]:
        seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return score(*args)

    with mode():
        expected = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        outputs = pipeline(CPU, microbatches, score=watched)(*batch(6), *weights())
    assert seen == {expected}
    assert (outputs[0].requires_grad, outputs[0].is_inference()) == expected


@pytest.mark.parametrize("middle", [CPU, SIM], ids=["cpu", "cpu+sim"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_autocast_reaches_every_stage_wherever_it_runs(middle: torch.device, microbatches: int) -> None:
    dtypes: set[torch.dtype] = set()

    def watched(*args: Any) -> tuple[Any, ...]:
        dtypes.add(args[0].dtype)
        return score(*args)

    args = (*batch(6), *weights())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reference = eager(args)
    for parameter in args[4:6]:
        move_in_place(parameter, middle)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = pipeline(middle, microbatches, score=watched)(*args)
    assert dtypes == {torch.bfloat16}
    torch.testing.assert_close(outputs[0], reference[0], rtol=0.02, atol=0.02)
    outputs[0].sum().backward()
    assert not torch.is_autocast_enabled("cpu")


def test_modes_that_threads_cannot_share_keep_the_work_here() -> None:
    here: set[int] = set()

    def watched(*args: Any) -> tuple[Any, ...]:
        here.add(threading.get_ident())
        return score(*args)

    run, args = pipeline(CPU, 3, score=watched), (*batch(6), *weights())
    for mode in (torch.autograd.graph.save_on_cpu(), torch.device("cpu"), torch.autograd.forward_ad.dual_level()):
        with mode:
            run(*args)
    assert here == {threading.get_ident()}
    run(*args)
    assert len(here) == 2


# ---------------------------------------------------------------------------------------------------------- threads


def test_a_pipeline_may_be_called_from_several_threads() -> None:
    run, args = pipeline(CPU, 3), weights()
    results: dict[int, Tensor] = {}

    def call(rows: int) -> None:
        for _ in range(5):
            results[rows] = run(*batches[rows], *args)[0]

    batches = {rows: batch(rows) for rows in (4, 6, 9, 12)}
    callers = [threading.Thread(target=call, args=(rows,)) for rows in batches]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for rows, data in batches.items():
        torch.testing.assert_close(results[rows], eager((*data, *args))[0])
    assert len(pipeline_threads()) == 3


def test_stages_run_at_the_same_time_in_gpipe_order() -> None:
    meeting = threading.Barrier(2, timeout=30)

    def first(ids: Tensor, table: Tensor) -> tuple[Any, ...]:
        if len(ids) == 2:  # the second microbatch of 5 rows in 2
            meeting.wait()
        return look_up(ids, table)

    def second(*args: Tensor) -> tuple[Any, ...]:
        if len(args[0]) == 3:
            meeting.wait()
        return hide(*args)

    outputs, timings = pipeline(CPU, 2, look_up=first, hide=second).traced(*batch(5), *weights())
    assert outputs[0].shape == (5,)
    order = {name: [t.microbatch for t in timings if t.stage == name] for name in ("look_up", "hide", "score")}
    assert order == {"look_up": [0, 1], "hide": [0, 1], "score": [0, 1]}
    when = {(t.stage, t.microbatch): t for t in timings}
    assert all(0 <= t.start_s <= t.end_s for t in timings)
    assert when["look_up", 1].start_s < when["hide", 0].end_s
    assert when["hide", 1].start_s >= when["look_up", 1].end_s


def test_close_ends_the_threads_and_a_later_call_starts_new_ones() -> None:
    run, args = pipeline(CPU, 2), (*batch(4), *weights())
    assert pipeline_threads() == []
    first = run(*args)[0]
    assert pipeline_threads() == ["heterps look_up", "heterps hide", "heterps score"]
    run.close()
    run.close()
    assert pipeline_threads() == []
    assert torch.equal(run(*args)[0], first)


def test_one_stage_drawing_random_numbers_draws_in_order() -> None:
    def noisy(*args: Any) -> tuple[Any, ...]:
        logits, loss = score(*args)
        return logits + torch.rand_like(logits), loss

    def with_rng(count: int) -> LocalPipeline:
        first, second, third = stages(score=noisy)
        marked = [
            StageProgram(
                name=s.name,
                resource="cpu",
                device=CPU,
                run=s.run,
                inputs=s.inputs,
                outputs=s.outputs,
                uses_rng=n < count,
            )
            for n, s in enumerate((third, second, first))
        ]
        return LocalPipeline(stages=marked[::-1], inputs=INPUTS, outputs=OUTPUTS, row_split=SPLIT, num_microbatches=4)

    args = (*batch(11), *weights())
    for count, threads in ((1, 3), (2, 0)):
        run, seen = with_rng(count), []
        for _ in range(3):
            torch.manual_seed(4)
            seen.append(run(*args)[0])
        assert torch.equal(seen[0], seen[1])
        assert torch.equal(seen[0], seen[2])
        assert len(pipeline_threads()) == threads
        run.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_starts_its_own_workers() -> None:
    run, args = pipeline(CPU, 2), (*batch(4), *[w.detach() for w in weights()])
    expected = run(*args)[0]
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(60)  # a child without workers would wait for ever
        try:
            torch.set_num_threads(1)  # OpenMP's own threads did not survive the fork either
            code = 0 if torch.equal(run(*args)[0], expected) and len(pipeline_threads()) == 3 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_model_and_its_pipeline_can_be_dropped_in_any_order() -> None:
    run, args = pipeline(CPU, 3), (*batch(6), *copy.deepcopy(weights()))
    loss = run(*args)[1]
    del run
    gc.collect()
    assert pipeline_threads() == []
    loss.backward()
