"""RunState, weights and optimizer <-> a folder that is whole or does not count.

    OUTPUT_DIR/checkpoints/step_{k}/
        manifest.json    the state (state.py), files, sizes, checksums of the small ones, processes, data
                         fingerprint, W&B run
        ...              what the engine keeps: weights, optimizer, loss scaler

All processes write into a folder of another name; they agree that nothing failed; rank 0 writes the manifest,
flushes, renames once, and only then removes older ones. There is no pointer file: the newest folder whose
manifest fits counts. Any number of processes may open it: positions are absolute, and draws are functions of
(seed, rank, step).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from adaptive import order
from adaptive.config import BadSetting, Batch, Config, sources
from adaptive.records import last_run_id
from adaptive.schedules import global_size, in_unit
from adaptive.state import RunState

MANIFEST, STEP = "manifest.json", re.compile(r"step_(\d+)$")
SMALL = 1 << 20  # bytes: a file up to this size has its checksum in the manifest


class Checkpoints:
    """Those of one run."""

    def __init__(self, config: Config, engine: Any, fingerprint: str):
        self.config, self.engine, self.fingerprint = config, engine, fingerprint
        self.folder = Path(config.run.output_dir, "checkpoints")
        self.opened: Path | None = None  # never pruned
        self.saved_step, self.error = 0, None  # of the last save that failed
        self.saved_evaluated = 0  # step of the last evaluation that the last checkpoint knows of
        self.run_id: str | None = None

    def save(self, state: RunState, report: Any) -> bool:
        """Collective. False, with a warning, when a process could not write; older checkpoints are then
        untouched.
        """
        if state.step == self.saved_step:
            error = self._attempt(lambda: self._note_evaluation(state))
            if error:
                report.warn(f"the checkpoint of step {state.step} lacks its evaluation ({error})")
            return True
        target, partial = self.folder / f"step_{state.step}", self.folder / f".step_{state.step}.partial"
        error = self._attempt(lambda: self._clear(partial) if self.engine.is_main else None)
        error = error or self._attempt(lambda: self.engine.save_state(partial))
        error = error or self._attempt(
            lambda: self._seal(partial, target, state, report) if self.engine.is_main else None
        )
        self.error = error
        if error:
            if self.engine.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            report.warn(f"the checkpoint of step {state.step} was not saved ({error}); training goes on")
            return False
        self.saved_step, self.saved_evaluated = state.step, state.evaluated_at
        if self.engine.is_main:
            self._prune()
        return True

    def _note_evaluation(self, state: RunState) -> None:
        """Tell the checkpoint of this step what its evaluation said, which came after it was written."""
        path = self.folder / f"step_{state.step}" / MANIFEST
        if not self.engine.is_main or self.saved_evaluated == state.evaluated_at or not path.exists():
            return
        fields = {"state": state.to_json(), "eval_loss": state.signals.get("eval_loss")}
        written = path.with_suffix(".partial")
        written.write_text(json.dumps(json.loads(path.read_text()) | fields, indent=1))
        _flush(written)
        os.replace(written, path)
        self._prune()

    def due(self, state: RunState) -> bool:
        """Whether --keep_best wants this step: it was just evaluated, and better than any before."""
        return self.config.output.keep_best > 0 and state.best_at == state.step

    def finish(self, state: RunState, report: Any, save_model: Callable[[], None] | None = None) -> None:
        """Collective: the last state, and the model. BadSetting where either was not written: the run did
        not leave what was asked for.
        """
        self.save(state, report)
        error = self._attempt(save_model) if save_model else None
        if self.error or error:
            raise BadSetting(
                f"the last {'checkpoint' if self.error else 'model'} could not be written to "
                f"{self.config.run.output_dir} ({self.error or error}); free some space, or write another "
                "--output_dir"
            )

    def _attempt(self, work: Any) -> str | None:
        """Run `work` here; the error of any process, on every process."""
        error = None
        try:
            work()
        except Exception as failure:  # a full disk has many names: OSError, RuntimeError, SafetensorError
            error = f"rank {self.engine.rank}: {' '.join(str(failure).split())[:200]}"
        (failures,) = self.engine.sum_integers([error is not None])
        return error or (f"{failures} process(es) failed" if failures else None)

    def _clear(self, partial: Path) -> None:
        for stale in self.folder.glob(".step_*"):  # what a kill left of a save or of a conversion
            shutil.rmtree(stale)
        partial.mkdir(parents=True)

    def _seal(self, partial: Path, target: Path, state: RunState, report: Any) -> None:
        files = {
            str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()
        }
        manifest = {
            "state": state.to_json(),
            "files": files,
            "checksums": {n: _checksum(partial / n) for n, size in files.items() if size <= SMALL},
            "world_size": self.engine.world_size,
            "engine": self.engine.kind,
            "order_version": order.VERSION,
            "fingerprint": self.fingerprint,
            "seed": self.config.run.seed,
            "wandb_run_id": report.wandb_run_id,
            "eval_loss": state.signals.get("eval_loss") if state.evaluated_at == state.step else None,
            "config": self.config.flat(),
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
        records = [self.folder.parent / "metrics.jsonl", *self.folder.parent.glob("audit/rank*.jsonl")]
        for path in [*partial.rglob("*"), partial, *filter(Path.exists, records)]:
            _flush(path)
        replaced = self.folder / f".{target.name}.replaced"
        if target.exists():  # a step that was saved before
            os.rename(target, replaced)
        os.rename(partial, target)
        _flush(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self) -> None:
        """Keep the newest --keep_last and the --keep_best of lowest eval_loss; foreign names and the one
        resumed from stay.
        """
        output = self.config.output
        whole = [path for _, path in sorted(_numbered(self.folder))]
        best = sorted((loss, path) for path in whole if (loss := eval_loss(path)) is not None)
        kept = {*whole[-output.keep_last :], *(path for _, path in best[: output.keep_best])}
        for path in whole:
            if path not in kept and path.resolve() != self.opened:
                shutil.rmtree(path, ignore_errors=True)

    def resume(self, fresh: RunState) -> RunState:
        """The state to go on from: `fresh`, or that of --resume_from_checkpoint with weights and optimizer
        loaded.

        Rank 0 chooses. BadSetting when the checkpoint is not whole, or another dataset, seed or order made
        it.
        """
        wanted = self.config.run.resume_from_checkpoint
        if not wanted:
            return fresh
        chosen = self.engine.from_rank0(lambda: self._choose(wanted))
        if chosen is None:
            self.run_id = last_run_id(self.folder.parent)
            self._go_back(0)
            return fresh
        self.opened = Path(chosen).resolve()
        manifest = self.engine.from_rank0(lambda: json.loads((self.opened / MANIFEST).read_text()))
        state = state_at(self.opened, manifest, self.config)
        self._same_names(manifest["config"]["dataset_name"])
        # A source that was added (--allow_dataset_change) begins at its start; one that went is forgotten.
        state.cursor = {source: state.cursor.get(source, at) for source, at in fresh.cursor.items()}
        state.carry = {source: state.carry.get(source, rest) for source, rest in fresh.carry.items()}
        if self.config.run.weights_only:
            with self._of_this_run():
                self.engine.load_weights(self.opened, manifest)
            if self.engine.is_main:
                print(f"weights and counters of {chosen}; the optimizer starts afresh (--weights_only)")
        else:
            self._same_optimizer(manifest)
            with self._of_this_run(), self.engine.own_settings():
                self.engine.load_state(self.opened, manifest)
        self.saved_step, self.saved_evaluated = state.step, state.evaluated_at
        if self.opened.parent == self.folder.resolve():  # else a branch, which is a run of its own
            self.run_id = manifest["wandb_run_id"]
        if self.engine.is_main:
            if not self.config.searched:  # whose settings the search has said
                for line in changes(manifest["config"], self.config.flat(), state.size):
                    print(line, flush=True)
            if manifest["world_size"] != self.engine.world_size:
                processes = f"{self.engine.world_size} process(es) go on from {manifest['world_size']}"
                print(f"{processes}: the same samples in each step, dropout with other masks", flush=True)
        self._learn(self._go_back(state.step), state)
        return state

    def _learn(self, evaluation: dict[str, Any] | None, state: RunState) -> None:
        """Of the step gone on from, where a kill came between its record and the checkpoint's word of it."""
        if evaluation is None or state.evaluated_at == state.step:
            return
        state.learn_evaluation(evaluation["eval_loss"])
        state.evaluation_owed = False
        if self.opened.parent == self.folder.resolve():
            self._attempt(lambda: self._note_evaluation(state))

    def _same_names(self, before: list[str]) -> None:
        """BadSetting where a dataset of the checkpoint has another name here: its order is of its name, so it
        would begin anew.
        """
        data = self.config.data
        then, now = sources(replace(data, dataset_name=tuple(before))), sources(data)
        for name, dataset in then.items():
            here = [other for other, the_same in now.items() if the_same == dataset]
            if here and name not in now:
                raise BadSetting(
                    f"{dataset} is the source {name} of the checkpoint, and as {here[0]} it would begin "
                    f"anew; write --dataset_name {name}={dataset}"
                )

    def _same_optimizer(self, manifest: dict[str, Any]) -> None:
        before, here = manifest["config"]["optim"], self.config.optim.optim
        if before != here:
            raise BadSetting(
                f"{self.opened} has the state of --optim {before} and this is {here}; continue with the "
                "same, or write --weights_only to start the optimizer afresh"
            )

    @contextlib.contextmanager
    def _of_this_run(self) -> Iterator[None]:
        """BadSetting where torch finds that the checkpoint's tensors are not those of this model."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            text = " ".join(str(error).split())
            if not ("state_dict" in text or "state dict" in text):
                raise
            raise BadSetting(
                f"{self.opened} is of another model, or of other groups of its parameters ({text[:200]}); "
                "continue with the --model, --task, --peft and --layer_lr_decay of its run"
            ) from None

    def _go_back(self, step: int) -> dict[str, Any] | None:
        """Collective: `step` is the last one. Its records end there, on every number of processes that wrote
        some, and checkpoints of later steps no longer count. Returns the evaluation of `step` among them,
        which the run's last one comes to after the checkpoint is written.
        """
        output, rank = self.folder.parent, self.engine.rank
        own = [output / "audit" / f"rank{rank}.jsonl"]
        if self.engine.is_main:
            stems = {path: path.stem.removeprefix("rank") for path in output.glob("audit/rank*.jsonl")}
            own += [path for path, r in stems.items() if r.isdigit() and int(r) >= self.engine.world_size]
            own += [output / "metrics.jsonl"]
            for number, path in sorted(_numbered(self.folder)):
                if number > step:
                    print(f"{path} is not part of this run any more: kept as {_set_aside(path)}", flush=True)
        for path in own:
            cut_back(path, step)
        return self.engine.from_rank0(lambda: _evaluation(output / "metrics.jsonl", step))

    def _choose(self, wanted: str) -> str | None:
        if wanted == "auto":
            for path in sorted(self.folder.glob(".step_*")):
                print(f"passing over {path.name}: a kill cut it short", flush=True)
            for _, path in sorted(_numbered(self.folder), reverse=True):
                missing = problem(path)
                if missing is None:
                    return str(self._checked(path))
                print(f"passing over {path}: {missing}", flush=True)
            return None
        missing = problem(Path(wanted))
        if missing:
            raise BadSetting(
                f"--resume_from_checkpoint {wanted}: {missing}; write auto, or a folder checkpoints/step_N"
            )
        return str(self._checked(Path(wanted)))

    def _checked(self, path: Path) -> Path:
        """`path`, unless continuing it here would train on other samples."""
        manifest = json.loads((path / MANIFEST).read_text())
        here = {"fingerprint": self.fingerprint, "seed": self.config.run.seed, "order_version": order.VERSION}
        names = {
            "fingerprint": "dataset, --sequence_length or --packing",
            "seed": "--seed",
            "order_version": "version of the data order",
        }
        differing = [name for name, value in here.items() if manifest.get(name) != value]
        if "fingerprint" in differing and self.config.run.allow_dataset_change:
            differing.remove("fingerprint")
        if differing:
            name = differing[0]
            raise BadSetting(
                f"{path} was made with another {names[name]} ({manifest.get(name)}, here {here[name]}); "
                "continue with the same"
                + (", or write --allow_dataset_change" if name == "fingerprint" else "")
            )
        return path


def state_at(path: Path, manifest: dict[str, Any], config: Config) -> RunState:
    """The state with which a run of `config` goes on from the checkpoint `path`."""
    try:
        state = RunState.from_json(manifest["state"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadSetting(
            f"{path} cannot be gone on from ({type(error).__name__}: {error}); continue with the version of "
            "this program that saved it, or from another checkpoint"
        ) from None
    if _name(manifest["config"]["schedule"]) != _name(config.batch.schedule):
        state.schedule = None  # another one's memory
    _in_this_unit(state, manifest["config"], config.batch)
    return state


def _in_this_unit(state: RunState, before: dict[str, Any], now: Batch) -> None:
    """The same samples, where this start's sizes are per device and the checkpoint's were not, or so."""
    names = ("per_device_train_batch_size", "fraction", "samples_per_pass")
    then = replace(now, **{name: before.get(name, getattr(now, name)) for name in names})
    if in_unit(Fraction(1), then, 3) == in_unit(Fraction(1), now, 3):
        return

    def converted(size: float) -> float:
        return in_unit(global_size(size, then, state.world_size), now, state.world_size) if size else size

    state.size, state.initial_size = converted(state.size), converted(state.initial_size)
    state.sizes = {source: converted(size) for source, size in state.sizes.items()}


def problem(path: Path) -> str | None:
    """Why `path` is no whole checkpoint, None if it is."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, checksums = manifest["files"].items(), manifest.get("checksums", {})
    except OSError:
        return "it has no manifest.json"
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its manifest.json is damaged"
    for name, size in files:
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or has another size"
        if name in checksums and _checksum(file) != checksums[name]:
            return f"{name} has other content than was saved"
    return None


def eval_loss(path: Path) -> float | None:
    """Of the weights in checkpoint `path`, None where they were not evaluated."""
    try:
        return json.loads((path / MANIFEST).read_text()).get("eval_loss")
    except (OSError, ValueError):
        return None


def changes(before: dict[str, Any], now: dict[str, Any], size: float) -> list[str]:
    """One line for each setting that a resumed start has given otherwise; `size`: the last target."""
    lines = []
    for name, value in json.loads(json.dumps(now)).items():
        if name in ("output_dir", "resume_from_checkpoint") or value in (None, before.get(name, value)):
            continue
        sized = name in ("batch_size", "per_device_train_batch_size")
        note = f"; sizes go on from {size:g} as --schedule says" if sized else ""
        lines.append(f"--{name} is {value}, and was {before.get(name)} when this checkpoint was saved{note}")
    return lines


def _name(schedule: str) -> str:
    """Of "my/idea.py:grow(rate=2)": "idea.py:grow", wherever the file lies."""
    return schedule.split("(")[0].rpartition("/")[2].strip()


def cut_back(path: Path, step: int) -> None:
    """Remove the JSON lines after `step`, and a last line that was not finished."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    short = path.with_suffix(".cut")
    short.write_text("".join(kept))
    _flush(short)
    os.replace(short, path)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    paths = folder.iterdir() if folder.is_dir() else []
    return [(int(found[1]), path) for path in paths if (found := STEP.match(path.name)) and path.is_dir()]


def _evaluation(path: Path, step: int) -> dict[str, Any] | None:
    lines = path.read_text().splitlines()[-2:] if path.exists() else []
    found = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
    return next((record for record in found if record["step"] == step), None)


def _set_aside(path: Path) -> Path:
    """Rename a checkpoint so that it counts no longer; what a user may want to keep is not removed."""
    number, aside = 1, path.with_name(f"set_aside_{path.name}")
    while aside.exists():
        number, aside = number + 1, path.with_name(f"set_aside_{path.name}_{number + 1}")
    os.rename(path, aside)
    return aside


def _checksum(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
