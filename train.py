"""Train with a batch size that is a scheduled variable.

    accelerate launch train.py                       # this machine's default: one process, or its GPUs
    accelerate launch --config_file accelerate_configs/zero2.yaml train.py --batch_size 2.5
    python train.py --help                           # every setting, with its unit

One step, top to bottom in `main`:

    signals --> schedule --> target G --> plan: n, interval, weight --> this process's positions
       ^        (rank 0 decides, all agree)                                      |
       |                                                                         v
     measure <-- optimizer step <-- backward(loss sum * scale) <-- micro-batches <-- rows

The data is an endless line of positions and a step is an interval of it: the schedule only decides where the
interval ends, and which process computes which position is arithmetic (adaptive/plan.py). What the loss is
multiplied by is derived in adaptive/scaling.py; hardware stays in adaptive/engine.py, samples in
adaptive/tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from adaptive.config import BadSetting, Batch, Config, Every, exit_with, parse_or_exit

CONFIG = parse_or_exit() if __name__ == "__main__" else None  # before torch is imported: --help is quick

from adaptive import scaling, signals  # noqa: E402
from adaptive.checkpoint import Checkpoints  # noqa: E402
from adaptive.data import Data, Share, load  # noqa: E402
from adaptive.dry_run import tell_plan  # noqa: E402
from adaptive.engine import Engine  # noqa: E402
from adaptive.evaluate import tell_evaluation  # noqa: E402
from adaptive.memory import MicroBatch  # noqa: E402
from adaptive.optim import build_optimizer  # noqa: E402
from adaptive.participation import plan_with  # noqa: E402
from adaptive.plan import Lengths, exact, passes  # noqa: E402
from adaptive.records import Audit, note_start, open_folder, train_record  # noqa: E402
from adaptive.report import Report  # noqa: E402
from adaptive.schedules import decide, first_size, global_size, load_schedule  # noqa: E402
from adaptive.self_check import check_step  # noqa: E402
from adaptive.state import RunState  # noqa: E402
from adaptive.tasks import Task, load_task, one_per_row  # noqa: E402


def main(config: Config) -> RunState:
    """Run what `config` asks for; returns the final state, the same on every process."""
    run, optim = config.run, config.optim
    decay, rule = scaling.parse_decay(optim), scaling.parse_rule(optim.lr_scaling, optim.optim)
    task = load_task(config.data.task)
    of_task = set(task.signals()).difference(signals.KNOWN)
    schedule = load_schedule(config, {*signals.KNOWN, *of_task})
    eval_every = Every.parse(config.eval.eval_every, "eval_every")
    save_every = Every.parse(config.output.save_every, "save_every")

    engine = Engine.start(config)
    with engine.main_first():
        rows = load(task, config)
    if run.dry_run:
        return tell_plan(config, schedule, rows.train, engine)
    folder = Path(engine.from_rank0(lambda: open_folder(config)))
    engine.seed(0, same_everywhere=True)
    model = task.model(config)
    wanted = signals.wanted(schedule.signals | rule.signals, config.output.track, config, of_task)
    engine.prepare(model, build_optimizer(model, optim, engine.stage), wanted)
    data = Data(rows.train, config, engine.rank, engine.world_size, engine)

    lengths = Lengths(data.lengths, exact(run.num_train_epochs), run.max_samples, run.max_steps, data.reach)
    checkpoints = Checkpoints(config, engine, rows.fingerprint)
    start = first_size(schedule, config.batch)
    state = checkpoints.resume(RunState.fresh(list(data.lengths), engine.world_size, start))
    data.seek(state)
    schedule.load_state_dict(state.schedule)
    optim.base_batch_size = optim.base_batch_size or state.initial_size
    config.batch.normalize_by = config.batch.normalize_by or task.normalize_by
    base = max(global_size(optim.base_batch_size, config.batch, state.world_size), scaling.ONE)
    warmup = optim.warmup_samples or int(optim.warmup_ratio * lengths.samples)
    audit = Audit(config, engine.rank)

    with Report(config, engine.accelerator, lengths.total, state, checkpoints.run_id) as report:
        engine.listen()
        engine.clock_from(state.seconds)
        engine.from_rank0(lambda: note_start(config, state, engine, report.wandb_run_id))
        report.say(f"{engine.describe()}; {lengths.describe()} into {folder}")
        micro_batch = MicroBatch(config, engine, task, data, state, report)
        tell = partial(tell_evaluation, engine, task, rows.eval, config, state, lengths, report)
        stop = state.evaluation_owed and not tell()
        while not (0 < run.max_steps <= state.step or stop):
            # Decide: rank 0 calls the schedule, every process gets the same exact number.
            before = state.counters()
            factor = decay(lengths.progress(state.cursor, state.samples, state.step))
            seen = signals.before_step(state, engine.world_size, factor) | task.signals()
            question = partial(decide, schedule, state, seen, config.batch, lengths, engine.seconds())
            decision = engine.from_rank0(question)
            plan = plan_with(config, decision, state, lengths)
            if plan is None:
                break
            if config.batch.check_agreement:
                engine.same_everywhere(f"{plan} {state}", f"the plan of step {state.step + 1}")

            # Gradient: the weighted sum over the step's samples, wherever they are computed.
            weights = scaling.source_weights(config.batch, plan, engine.world_size)
            ratio = float(scaling.mean_size(plan) / base)
            moment = scaling.second_moment(optim, ratio, state.beta2_product, state.updates)
            learning_rate = optim.learning_rate * factor * rule(ratio, float(base), seen.get("noise_scale"))
            learning_rate *= scaling.warmup(state.samples, plan.size, warmup)
            own = data.take(plan, weights, engine, state)
            checked = check_step(config, micro_batch, task, data, plan, gradient, weights, own)
            attempt = partial(gradient, engine, task, own, data.idle_row)
            batch, measured = micro_batch.run(attempt, plan.size)
            audit.write(state.step + 1, own)

            # Step, or not: every process sees the same sums and comes to the same conclusion.
            skipped = update(engine, measured, learning_rate, moment) if measured else "empty"

            # Learn and tell: counters move once, whatever happened.
            state.advance(plan, skipped, measured, decision, moment.beta2)
            record = train_record(
                state, lengths, plan, measured, weights, learning_rate=learning_rate, skipped=skipped,
                micro_batch_size=batch.micro_batch_size,
                passes=passes(plan.size, engine.world_size, batch.micro_batch_size),
            )  # fmt: skip
            signals.after_step(state, plan, lengths, record, measured, before["seconds"], config)
            record |= checked | {name: state.signals.get(name) for name in wanted & signals.MEASURED}
            record = {name: seen.get(name) for name in wanted & of_task} | record
            report.train(record)
            report.once(decision["clamped"])
            state.refuse_divergence(optim.max_skipped)
            stop = measured.stop if measured else engine.stop_asked_anywhere()
            state.evaluation_owed |= eval_every.due(before, state.counters())
            if state.evaluation_owed and not stop:
                stop = not tell()
            if save_every.due(before, state.counters()) or checkpoints.due(state):
                checkpoints.save(state, report)

        if not stop:
            state.refuse_no_update()
            stop = state.evaluated_at != state.step and not tell()
        if stop:
            checkpoints.finish(state, report)
            report.leave_word(state)
            return state
        checkpoints.finish(state, report, partial(engine.save_model, folder / "model", rows.tokenizer))
    return state


def gradient(
    engine: Engine, task: Task, own: Share, idle_row: Callable, batch: Batch
) -> signals.Measured | None:
    """Forward and backward of every pass of one step; leaves sum_i w_i grad l_i (scaling.py) in the engine.

    Every process runs the same number of passes; one without samples left runs a row that teaches nothing.
    None, and nothing is left of it, where some process ran out of memory.
    """
    micro, by_tokens, rows = batch.micro_batch_size, batch.normalize_by == "tokens", own.rows
    starts = range(0, passes(own.size, engine.world_size, micro) * micro, micro)
    batches = [task.collate(rows[at : at + micro] or [idle_row()]) for at in starts]
    counts = [task.items(b).tolist() for b in batches]  # of each row
    own.items = [n for count in counts for n in count][: len(rows)]  # those beyond are of idle passes
    totals = engine.open_step(batches, own.group_totals() if by_tokens else None)

    losses, scales = [], None
    with engine.passes():
        batches = task.before_passes(engine, batches, own)  # for losses that couple the samples of a step
        for at, passed, count in zip(starts, batches, counts, strict=True):
            with engine.pass_(last=at == starts[-1], idle=at >= len(rows)):
                sums = task.loss_sum(engine.model, engine.to_device(passed, micro))  # (rows,)
                sums = one_per_row(sums, len(count), micro)
                scales = scales or own.loss_scales(totals(), engine.world_size, [*map(len, counts)])
                engine.backward(sums.dot(scales[at // micro].to(sums, non_blocking=True)))
            engine.norms.close_pass(own.items[at : at + micro], scales[at // micro], engine)
            losses.append(sums.detach())
    if not engine.reduce_gradient():
        return None

    padding = [task.token_counts(b) for b, at in zip(batches, starts, strict=True) if at < len(rows)]
    return signals.Measured.reduce(engine, own, losses, by_tokens, padding)


def update(engine: Engine, measured: signals.Measured, learning_rate: float, moment=None) -> str | None:
    """Step the optimizer unless the step has nothing to learn from; None, or the reason why not."""
    if not measured.items or not measured.finite:
        overflow = engine.scales_loss and measured.loss is not None  # the loss is sound, its scale too large
        engine.discard(overflow)
        return "unsupervised" if not measured.items else "overflow" if overflow else "nonfinite"
    engine.set_step(learning_rate, moment)
    return None if engine.update(measured.grad_norm) else "overflow"


if __name__ == "__main__":
    try:
        main(CONFIG)
        Engine.leave()
    except BadSetting as error:
        exit_with(error)
    except RuntimeError as error:
        Engine.explain(error)
        raise
