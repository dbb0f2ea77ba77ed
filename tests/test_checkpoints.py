"""Which checkpoints stay, what a full disk does, and what may be opened."""

from __future__ import annotations

import ast
import json
import pickle
import resource
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import ROOT, records

import train
from adaptive.checkpoint import Checkpoints, eval_loss, problem
from adaptive.config import BadSetting, parse
from adaptive.engine import Engine
from adaptive.state import RunState
from adaptive.tasks import Loaded, Task

RUN = [
    "--report_to", "none", "--batch_size", "4", "--schedule", "constant()", "--optim", "sgd", "--optim_args",
    "momentum=0.9", "--learning_rate", "0.01", "--max_steps", "8", "--save_every", "2 steps",
    "--eval_every", "1 steps",
]  # fmt: skip
LIMIT = 100_000  # bytes of one file; a checkpoint of Wide has 5 times as many


class Wide(Task):
    """130 KB of weights; the evaluation says what `losses` says, step by step."""

    losses, limited_from = (), 10**9

    def load(self, config):
        rows = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        self.seen = 0
        return Loaded(train=[{"x": row.numpy()} for row in rows], eval=[{"x": rows[0].numpy()}])

    def model(self, config):
        return torch.nn.Linear(64, 512)

    def loss_sum(self, model, batch):
        self.seen += 1
        if self.seen == self.limited_from:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
        return model(batch["x"]).square().sum(dim=1)

    def measure(self, model, batch):
        evaluated, Wide.asked = Wide.asked, Wide.asked + 1
        return {"loss": torch.full((len(batch["x"]),), float(self.losses[evaluated % len(self.losses)]))}


def run(folder, *more, losses=(1.0,), limited_from=10**9):
    class Told(Wide):
        pass

    Told.losses, Told.limited_from, Wide.asked = losses, limited_from, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load_task", lambda name: Told())
        return train.main(parse([*RUN, "--output_dir", str(folder), *more]))


@pytest.fixture(autouse=True)
def no_limit():
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").iterdir())


def test_the_best_stay_beside_the_newest(tmp_path):
    """Evaluations 5 3 4 1 2 6 7 8 at steps 1 to 8, saved every second step: the best stays, and a new best is
    saved at once.

    Mutations: best by highest loss; the loss of an older evaluation taken for this step's.
    """
    folder = tmp_path / "run"
    state = run(folder, "--keep_best", "1", "--keep_last", "1", losses=(5, 3, 4, 1, 2, 6, 7, 8))
    assert steps(folder) == [4, 8]
    assert eval_loss(folder / "checkpoints" / "step_4") == 1.0
    assert (state.best_eval_loss, state.best_at) == (1.0, 4)

    odd = tmp_path / "odd"
    run(odd, "--keep_best", "2", "--keep_last", "1", losses=(5, 3, 4, 2, 1, 6, 7, 8))
    assert steps(odd) == [4, 5, 8], "step 5 is no multiple of --save_every, but a new best"
    assert steps_without_best(tmp_path) == [6, 8]


def steps_without_best(folder: Path) -> list[int]:
    run(folder / "plain", losses=(5, 3, 4, 1, 2, 6, 7, 8))
    return steps(folder / "plain")


def test_a_checkpoint_between_evaluations_has_no_loss(tmp_path):
    """Mutation: manifest with the last known eval_loss, which belongs to other weights."""
    run(tmp_path / "run", "--eval_every", "3 steps", "--max_steps", "4", "--keep_best", "1")
    assert eval_loss(tmp_path / "run" / "checkpoints" / "step_2") is None


def test_no_checkpoint_at_all_is_no_success(tmp_path, capfd):
    """R81. A quota from the start: warnings, training to its end with all records, then one line, status 2.

    Mutations: the last failure swallowed (status 0); training stopped by the first.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
    with pytest.raises(BadSetting, match="the last checkpoint could not be written .*rank 0"):
        run(tmp_path / "run")
    assert [r["step"] for r in records(tmp_path / "run")] == list(range(1, 9))
    assert capfd.readouterr().err.count("was not saved") == 5, "four, and the last again"
    assert steps(tmp_path / "run") == []


def test_older_checkpoints_survive_a_full_disk(tmp_path):
    """R81. A quota in the middle: what was saved before stays whole, nothing half-written, and resumes.

    Mutation: pruning before the new one is complete.
    """
    folder = tmp_path / "run"
    with pytest.raises(BadSetting, match="could not be written"):
        run(folder, limited_from=6)
    assert steps(folder) == [2, 4] and problem(folder / "checkpoints" / "step_4") is None
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert run(folder, "--resume_from_checkpoint", "auto").step == 8
    assert [r["step"] for r in records(folder)] == list(range(1, 9))


def test_a_real_full_disk(tmp_path):
    """R81. A file system of 700 kB: two checkpoints fit, the third does not. Mutation: as above."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:  # the quota above is tried everywhere
        assert "ermission denied" in mounted.stderr or "must be superuser" in mounted.stderr, mounted.stderr
        pytest.skip(f"this user may not mount a file system: {mounted.stderr.strip()}")
    try:
        with pytest.raises(BadSetting, match="could not be written"):
            run(disk / "run")
        assert steps(disk / "run") == [2, 4]
        assert problem(disk / "run" / "checkpoints" / "step_4") is None
        assert records(disk / "run")[-1]["step"] == 8
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_another_optimizer_is_refused_or_asked_for(tmp_path, capfd):
    """Never a silent fresh optimizer: refused in a line that names the flag; with it the weights are the
    checkpoint's, the counters go on, and the line says that the optimizer starts afresh.

    Mutations: torch's load_state_dict, which takes SGD's state for AdamW's without a word; the flag kept in
    config.yaml, from which the run goes on: each stop would lose the optimizer's state.
    """
    folder = tmp_path / "run"
    run(folder, "--max_steps", "4")
    weights = torch.load(folder / "model" / "weights.pt")["weight"]
    resume = ["--resume_from_checkpoint", "auto", "--optim", "adamw_torch", "--optim_args", ""]
    with pytest.raises(BadSetting, match="the state of --optim sgd .* --weights_only"):
        run(folder, *resume)
    state = run(folder, *resume, "--weights_only", "--max_steps", "4")
    assert state.step == 4 and state.updates == 4
    assert torch.equal(torch.load(folder / "model" / "weights.pt")["weight"], weights)
    assert "optimizer starts afresh" in capfd.readouterr().out
    assert run(folder, *resume, "--weights_only", "--max_steps", "6").updates == 6
    assert not parse(["--config", str(folder / "config.yaml")]).run.weights_only, "once, not at every resume"


def test_settings_of_a_resumed_start_hold(tmp_path, capfd):
    """R59. Another rate, decay and momentum hold from the first resumed step on, and are told; the momentum
    that was gathered is the checkpoint's. Without them it is the run without a stop, to the bit.

    Mutation: own_settings left out (torch's load_state_dict takes weight decay and momentum of the file).
    """
    always = ["--lr_scheduler_type", "constant", "--weight_decay", "0.1", "--save_every", "1 steps"]

    def weight(folder, *more):
        assert run(folder, *always, *more).step
        return torch.load(folder / "model" / "weights.pt")["weight"]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    last = weight(whole, "--max_steps", "4")
    weight(cut, "--max_steps", "3")
    held = torch.load(cut / "checkpoints" / "step_3" / "training.pt")
    shutil.copytree(cut, tmp_path / "same")
    on = ["--max_steps", "4", "--resume_from_checkpoint", "auto"]
    assert torch.equal(weight(tmp_path / "same", *on), last)

    capfd.readouterr()
    changed = ["--learning_rate", "0.03", "--weight_decay", "0.5", "--optim_args", "momentum=0.2"]
    moved = weight(cut, *on, *changed)
    told = capfd.readouterr().out
    assert "--learning_rate is 0.03, and was 0.01" in told and "--weight_decay is 0.5, and was 0.1" in told
    before, gathered = held["model"]["weight"], held["optimizer"]["state"][0]["momentum_buffer"]
    used = torch.load(whole / "checkpoints" / "step_4" / "training.pt")["optimizer"]["state"][0]
    gradient = used["momentum_buffer"] - 0.9 * gathered - 0.1 * before
    right = before - 0.03 * (gradient + 0.5 * before + 0.2 * gathered)
    assert torch.allclose(moved, right, atol=1e-6) and not torch.allclose(moved, last, atol=1e-4)


@pytest.mark.parametrize("beta_scaling", ["none", "half_life"])
def test_settings_of_the_optimizer_are_those_of_the_resume(tmp_path, beta_scaling):
    """And without others the ones of the checkpoint, to the bit (test_checkpoint_faults.py).

    Mutation: the groups as torch's load_state_dict leaves them: the first start's decay for ever, while a
    line says that it is another.
    """
    adam = ["--optim", "adamw_torch", "--optim_args", "", "--beta_scaling", beta_scaling]
    run(tmp_path, *adam, "--max_steps", "4", "--weight_decay", "0.1")
    changed = ["--weight_decay", "0.5", "--adam_beta1", "0.8", "--adam_epsilon", "1e-3"]
    run(tmp_path, *adam, *changed, "--resume_from_checkpoint", "auto", "--max_steps", "5")
    held = torch.load(tmp_path / "checkpoints" / "step_5" / "training.pt")["optimizer"]
    told = [(group["weight_decay"], group["betas"][0], group["eps"]) for group in held["param_groups"]]
    assert torch.allclose(torch.tensor(told), torch.tensor([(0.5, 0.8, 1e-3), (0.0, 0.8, 1e-3)]))
    assert all(state["step"] == 5 for state in held["state"].values()), "its moments go on"


def test_what_was_loaded_outlives_its_file(tmp_path):
    """A checkpoint is read through a map of its file, which pruning removes: nothing stays mapped.

    Mutation: `_own_part` that returns what it was given.
    """
    engine = Engine.start(
        config := parse(["--output_dir", str(tmp_path), "--resume_from_checkpoint", "auto"])
    )
    engine.prepare(model := torch.nn.Linear(64, 512), torch.optim.AdamW(model.parameters()))
    engine.backward(engine.model(torch.ones(1, 64)).sum())
    engine.update(1.0)
    checkpoints = Checkpoints(config, engine, "")
    assert checkpoints.save(RunState(step=1), SimpleNamespace(wandb_run_id=None))
    checkpoints.resume(RunState())
    assert checkpoints.opened and "training.pt" not in Path("/proc/self/maps").read_text()


def test_another_model_is_one_line(tmp_path):
    """Mutation: torch's own error, a traceback with every size of the model."""
    run(tmp_path, "--max_steps", "4")
    for weights_only in ("--weights_only", "--no_weights_only"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(BadSetting, match="is of another model"):
            patch.setattr(Wide, "model", lambda self, config: torch.nn.Linear(64, 500))
            run(tmp_path, "--resume_from_checkpoint", "auto", weights_only)


def test_the_same_data_in_other_rows_is_another_dataset(tmp_path):
    """As with another --sequence_length: what is at a position is another row then.

    Mutation: a fingerprint of the texts alone: rows are lost and seen twice without a word.
    """
    run(tmp_path, "--max_steps", "4")
    load, resume = Wide.load, ["--resume_from_checkpoint", "auto", "--max_steps", "5"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wide, "load", lambda self, config: Loaded(load(self, config).train[:50]))
        with pytest.raises(
            BadSetting, match="another dataset, --sequence_length or --packing .*/64, here /50"
        ):
            run(tmp_path, *resume)
        assert run(tmp_path, *resume, "--allow_dataset_change").step == 5


def test_a_branch_does_not_overwrite_a_run(tmp_path):
    """Mutation: any folder taken where something is resumed: the other run's records are cut back to the
    branch's step, its checkpoints set aside.
    """
    run(tmp_path / "one", "--max_steps", "4")
    run(tmp_path / "other", "--max_steps", "8")
    branch = [
        "--resume_from_checkpoint",
        str(tmp_path / "one" / "checkpoints" / "step_4"),
        "--max_steps",
        "6",
    ]
    with pytest.raises(BadSetting, match="holds a run of its own"):
        run(tmp_path / "other", *branch)
    assert len(records(tmp_path / "other")) == 8 and steps(tmp_path / "other") == [6, 8]
    assert run(tmp_path / "new", *branch).step == 6
    assert run(tmp_path / "one", *branch).step == 6, "a run's own older state"


@pytest.mark.parametrize("change, words", [
    ({"files": []}, "its manifest.json is damaged"), ({"fingerprint": None}, "made with another dataset"),
    ({"state": {"slots": 3}}, "unknown fields"), ({"state": {"carry": {"train": "x"}}}, "ValueError"),
])  # fmt: skip
def test_a_manifest_that_was_changed_is_one_line(tmp_path, change, words):
    """Mutations: `except (ValueError, KeyError)` alone; the state read bare: tracebacks."""
    run(tmp_path, "--max_steps", "2")
    checkpoint = tmp_path / "checkpoints" / "step_2"
    path = checkpoint / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadSetting, match=words):
        run(tmp_path, "--resume_from_checkpoint", str(checkpoint), "--max_steps", "3")


def test_sizes_go_on_in_the_unit_of_the_resume(tmp_path):
    """A global size, then the share of an update that one pass is, then global again: 16 samples throughout.

    Mutation: `_in_this_unit` left out (a share of 16 is refused, and 0.5 samples a step are run).
    """
    resume = ["--resume_from_checkpoint", "auto", "--batch_size"]
    share = ["--per_device_train_batch_size", "0.5", "--fraction", "accumulate", "--samples_per_pass", "8"]
    epochs = ["--num_train_epochs", "9"]
    run(tmp_path, *epochs, "--max_steps", "2", "--batch_size", "16")
    state = run(tmp_path, *epochs, *resume, "None", *share, "--max_steps", "4")
    assert (state.size, state.initial_size) == (0.5, 0.5) and state.sizes == {"train": 0.5}
    state = run(tmp_path, *epochs, *resume, "16", "--max_steps", "6")
    assert (state.size, state.initial_size) == (16, 16)
    assert [r["target_batch_size"] for r in records(tmp_path)] == [16] * 6


def test_another_schedule_starts_without_the_memory_of_the_one_before(tmp_path):
    """The same one with other settings goes on with it.

    Mutation: the memory handed to whatever schedule comes: a KeyError, an AttributeError of a function.
    """
    resume = ["--resume_from_checkpoint", "auto", "--max_steps"]
    run(tmp_path, "--max_steps", "4", "--schedule", "loss_plateau(threshold=1e9)")
    state = run(tmp_path, *resume, "6", "--schedule", "loss_plateau(patience=9, threshold=1e9)")
    assert state.schedule["since"] == 1, "counted from the first start"
    assert run(tmp_path, *resume, "8", "--schedule", "constant()").schedule is None
    run(tmp_path, *resume, "9", "--schedule", "loss_plateau()")
    assert run(tmp_path, *resume, "10", "--schedule", "gradient_memory()").schedule == {"history": []}


def test_the_last_evaluation_is_in_the_checkpoint_that_came_before_it(tmp_path):
    """The last step was saved, then evaluated: it is the best, and stays so at the resume.

    Mutations: nothing written after the save (step 4 is pruned); the resume told only that there was one.
    """
    once = ["--keep_best", "1", "--keep_last", "1", "--eval_every", "100 steps", "--save_every", "2 steps"]
    run(tmp_path, *once, "--max_steps", "4", losses=(1.0,))
    path = tmp_path / "checkpoints" / "step_4" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["eval_loss"] == manifest["state"]["best_eval_loss"] == 1.0
    resume = ["--resume_from_checkpoint", "auto", "--num_train_epochs", "9"]
    state = run(tmp_path, *once, *resume, "--max_steps", "8", losses=(2.0,))
    assert (state.best_eval_loss, state.best_at) == (1.0, 4) and steps(tmp_path) == [4, 8]


def test_an_evaluation_that_a_kill_parted_from_its_checkpoint_is_found(tmp_path):
    """metrics.jsonl has it. Mutation: `evaluated_at` alone: no loss, no signal, and no best."""
    run(tmp_path, "--max_steps", "4", "--eval_every", "100 steps", losses=(1.0,))
    path = tmp_path / "checkpoints" / "step_4" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["state"] |= {"evaluated_at": 0, "best_eval_loss": None, "best_at": 0, "signals": {}}
    path.write_text(json.dumps(manifest | {"eval_loss": None}))
    more = ["--resume_from_checkpoint", "auto", "--max_steps", "5", "--num_train_epochs", "9"]
    state = run(tmp_path, *more, "--eval_every", "100 steps", losses=(2.0,))
    assert (state.best_eval_loss, state.best_at) == (1.0, 4)
    assert json.loads(path.read_text())["eval_loss"] == 1.0


def test_a_source_does_not_begin_anew_under_another_name(tmp_path):
    """Its order is of its name: alone it is called train, beside another one by its file.

    Mutation: "one that went is forgotten", whatever it is called now: its rows again, in another order.
    """
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} line {k}, long enough\n" for k in range(99)))
    a, b, folder = f"{tmp_path}/a.txt", f"{tmp_path}/b.txt", tmp_path / "run"
    flags = [
        "--task",
        "causal_lm",
        "--report_to",
        "none",
        "--sequence_length",
        "16",
        "--output_dir",
        str(folder),
    ]
    flags += ["--eval_share", "0.2", "--batch_size", "4"]
    train.main(parse([*flags, "--dataset_name", a, "--max_steps", "2"]))
    more = ["--resume_from_checkpoint", "auto", "--allow_dataset_change", "--max_steps", "4"]
    with pytest.raises(BadSetting, match=f"source train of the checkpoint.*write --dataset_name train={a}"):
        train.main(parse([*flags, *more, "--dataset_name", a, b]))
    state = train.main(parse([*flags, *more, "--dataset_name", f"train={a}", b]))
    assert state.cursor["train"] > 8 and state.cursor["b"] > 0


def test_a_checkpoint_cannot_run_code(tmp_path):
    """R56. A pickle in place of training.pt, its manifest forged: refused in one line, and not run.

    Mutation: weights_only=False.
    """
    folder = tmp_path / "run"
    run(folder, "--max_steps", "2")
    trap, sprung = folder / "checkpoints" / "step_2", tmp_path / "sprung"

    class Trap:
        def __reduce__(self):
            return Path.touch, (sprung,)

    (trap / "training.pt").write_bytes(pickle.dumps(Trap()))
    manifest = json.loads((trap / "manifest.json").read_text())
    manifest["files"]["training.pt"] = (trap / "training.pt").stat().st_size
    manifest["checksums"].pop("training.pt", None)
    (trap / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadSetting, match="training.pt holds more than tensors"):
        run(folder, "--resume_from_checkpoint", "auto")
    assert not sprung.exists()


def test_another_engine_is_refused_or_asked_for(tmp_path):
    """R30. ZeRO's checkpoint on DDP: a line that names the flag. Mutation: opened without optimizer state."""
    folder = tmp_path / "run"
    run(folder, "--max_steps", "2")
    path = folder / "checkpoints" / "step_2" / "manifest.json"
    path.write_text(path.read_text().replace('"engine": "plain"', '"engine": "zero2"'))
    with pytest.raises(BadSetting, match="saved by the engine zero2 and this is plain.*--weights_only"):
        run(folder, "--resume_from_checkpoint", "auto")


DEEPSPEEDS_OWN = {("adaptive/engine.py", "_saved_weights")}  # its files hold its own objects


def test_nothing_foreign_is_executed():
    """torch.load only with weights_only=True (DeepSpeed's own file apart), no pickle, eval, exec, shell,
    unsafe YAML, and remote code off unless asked. Mutation: any of them anywhere in the package.
    """
    for path in [ROOT / "train.py", *(ROOT / "adaptive").rglob("*.py")]:
        tree, name = ast.parse(path.read_text()), str(path.relative_to(ROOT))
        for function in [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))]:
            for node in ast.walk(function):
                if not isinstance(node, ast.Call):
                    continue
                called, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
                own = (name, getattr(function, "name", "")) in DEEPSPEEDS_OWN or function is tree
                assert called != "torch.load" or given.get("weights_only") == "True" or own, name
                assert called not in ("eval", "exec", "os.system", "yaml.load", "yaml.unsafe_load"), name
                assert not called.startswith(("pickle.", "marshal.", "dill.")), name
                assert given.get("shell", "False") == "False", name
    assert parse(["--report_to", "none"]).model.trust_remote_code is False
