"""Several processes make the same run as one: samples, rewards, partition, weights; and end with one that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from dph import distributed
from dph.checkpoint import checkpoints, read_log, writer_first
from dph.trainer import Trainer
from tests.helpers import SMALL_RUN, tiny_folder
from tests.test_presampling import make
from tests.test_reliability import fails_at
from tests.test_trainer import JS, trainer

ROOT = Path(__file__).parent.parent
METHODS: dict[str, list[str]] = {
    "grpo": [],
    "dph_js": [*JS, "--train.microbatch_tokens=60"],
    "definition": [*JS, "--loss.samples=both"],
    "adapters": [*JS, "--model.adapter_rank=2"],
    "rkl": ["--loss.divergence=reverse_kl", "--loss.samples=own", "--loss.eta=0.1", "--loss.entropy=0.01"],
}


def torchrun(count: int, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", count, "--standalone", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen([*map(str, command)], text=True, stdout=pipe, stderr=pipe, env=environment, **options)


def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out, err


# ---- the dealing ---------------------------------------------------------------


def test_alone_everything_is_mine_and_nothing_is_sent() -> None:
    items, layer = [3, 1, 2], torch.nn.Linear(2, 1)
    assert distributed.deal_share(items, float) == items
    assert distributed.gather(items) is items
    distributed.shard(layer, [])
    assert not distributed.is_sharded(layer)
    with distributed.whole_weights(layer):
        distributed.sum_gradients(layer, lambda: pytest.fail("nothing is to be summed"))
    assert layer.weight.grad is None
    assert distributed.whole(layer.weight) is layer.weight


def test_the_dealing_is_even_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "size", lambda: 3)
    loads = []
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        loads.append(sum(distributed.deal_share([5, 1, 1, 1, 4, 4, 1, 1], float)))
    assert loads == [6, 6, 6]


# ---- the same run ---------------------------------------------------------------


def in_float64(folder: Path, *more: str) -> Trainer:
    """A trainer whose sums may be cut in any way: float64, where the order of summing changes nothing that matters."""
    original = Trainer.__init__

    def init(self: Trainer, config: Any, policy: Any, data: Any) -> None:
        policy.model.double()
        original(self, config, policy, data)

    with mock.patch.object(Trainer, "__init__", init):
        made = trainer(folder, "--optim.lr=1e-3", "--train.record_rollouts=true", *more)
    if made.collector.reference is not None:
        made.collector.reference.double()
    return made


def bytes_held(made: Trainer) -> dict[str, int]:
    """What this process has in memory of weights, gradients and moments where an optimizer step begins."""
    weights = list(made.policy.model.parameters())
    moments = [moment for kept in made.optimizer.adamw.state.values() for moment in kept.values() if moment.ndim]
    kinds = {"weights": weights, "gradients": [w.grad for w in weights if w.grad is not None], "moments": moments}
    return {
        kind: sum(x.to_local().nbytes if isinstance(x, DTensor) else x.nbytes for x in tensors)
        for kind, tensors in kinds.items()
    }


def train(folder: Path, more: list[str], lacks_memory: bool = False) -> None:
    """What each process does: five steps; weights.safetensors of the leader, held-RANK.json of each.

    Args:
        lacks_memory: whether the last process runs out of memory once.
    """
    with distributed.processes():
        if lacks_memory and distributed.rank() == distributed.size() - 1:
            fails_at({3}, pytest.MonkeyPatch())
        with writer_first():
            made = in_float64(folder, "--train.steps=5", *more)
        held: dict[str, int] = {}
        made.optimizer.adamw.register_step_post_hook(lambda *_: held.update(bytes_held(made)))
        made.run()
        (folder / f"held-{distributed.rank()}.json").write_text(json.dumps(held))
        weights = {
            name: distributed.whole(weight.detach()).clone(memory_format=torch.contiguous_format)
            for name, weight in made.policy.model.named_parameters()
        }
        if distributed.rank() == 0:
            save_file(weights, folder / "weights.safetensors")


@pytest.mark.distributed
def test_two_processes_divide_the_prompts_as_one_does(tmp_path: Path) -> None:
    tiny_folder(tmp_path / "model")
    found = []
    for count in (1, 2):
        more = [f"--run.name=by{count}", "--presample.rehearsal_responses=2", "--presample.stored_top_k=3"]
        finished(torchrun(count, "-m", "tests.test_distributed", "presample", tmp_path, *more))
        made = tmp_path / f"by{count}" / "presample"
        stored = load_file(made / "rehearsal.safetensors")
        found.append(((made / "partition.jsonl").read_text(), stored["tokens"].tolist(), stored["top_logprobs"]))
    assert '"pef"' in found[0][0]
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[0][2], found[1][2])


Run = tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]], list[dict[str, Any]]]


def weights_rollouts_metrics(folder: Path, count: int, *more: str) -> Run:
    """What five steps by `count` processes leave behind."""
    finished(torchrun(count, "-m", "tests.test_distributed", "train", folder, *more))
    rollouts = [load_file(folder / "run" / "rollouts" / f"step-{step}.safetensors") for step in range(1, 6)]
    return load_file(folder / "weights.safetensors"), rollouts, read_log(folder / "run" / "metrics.jsonl")


def assert_same_run(found: Run, expected: Run) -> None:
    for name, weight in expected[0].items():
        torch.testing.assert_close(found[0][name], weight, rtol=0, atol=1e-9)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        for name, values in theirs.items():
            torch.testing.assert_close(ours[name], values, rtol=0, atol=1e-6)  # tokens, rewards: integers
    for row, expected_row in zip(found[2], expected[2], strict=True):
        for name, value in expected_row.items():
            if "second" not in name and name != "sampler_gap":
                assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    "method", ["dph_js", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "dph_js")]
)
def test_any_number_of_processes_makes_the_run_of_one(tmp_path: Path, method: str) -> None:
    alone = weights_rollouts_metrics(tmp_path / "alone", 1, *METHODS[method])
    start = load_file(tmp_path / "alone" / "model" / "model.safetensors")
    trained = {name: weight for name, weight in alone[0].items() if "lora_A" not in name}
    begin = torch.zeros(())  # of an adapter's B
    assert any((weight - start.get(name, begin)).abs().max() > 1e-4 for name, weight in trained.items())
    for count, shard in ((2, "none"), (4, "none"), (1, "full"), (2, "full"), (4, "full")):
        folder = tmp_path / f"{shard}-{count}"
        assert_same_run(weights_rollouts_metrics(folder, count, *METHODS[method], f"--train.shard={shard}"), alone)


@pytest.mark.distributed
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_shard_is_a_share_of_weights_gradients_and_moments(tmp_path: Path, count: int) -> None:
    weights_rollouts_metrics(tmp_path / "alone", 1)
    weights_rollouts_metrics(tmp_path / "shards", count, "--train.shard=full")
    whole = json.loads((tmp_path / "alone" / "held-0.json").read_text())
    assert whole["moments"] == 2 * whole["weights"] == 2 * whole["gradients"] > 0
    for rank in range(count):
        held = json.loads((tmp_path / "shards" / f"held-{rank}.json").read_text())
        assert set(held) == set(whole)
        assert sum(held.values()) <= 1.3 / count * sum(whole.values())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("shard", ["none", "full"])
def test_memory_that_one_of_two_lacks_makes_both_try_again(tmp_path: Path, shard: str) -> None:
    weights = []
    for count, mode in ((1, "train"), (2, "lacks_memory")):
        folder = tmp_path / mode
        more = [*METHODS["dph_js"], f"--train.shard={shard}"]
        finished(torchrun(count, "-m", "tests.test_distributed", mode, folder, *more))
        weights.append(load_file(folder / "weights.safetensors"))
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=0, atol=1e-9)


# ---- the commands ---------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    model, path = tiny_folder(tmp_path / "model"), tmp_path / "small.toml"
    path.write_text(
        f'[run]\nname = "small"\nfolder = "{tmp_path / "runs"}"\n[model]\npath = "{model}"\n[data]\n'
        'train = "miniature:train?count=6"\neval = ["miniature:test?count=3"]\n[sampling]\nmax_new_tokens = 5\n'
        f'{SMALL_RUN}eval_every = 2\nsave_every = 1\n[loss]\ndivergence = "js"\neta = 1.0\nentropy = 0.01\n'
        "[eval]\nsamples = 2\nk = [1]\nduring_samples = 1\n"
    )
    return path


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_evaluate_as_one_does(tmp_path: Path, small: Path) -> None:
    found = []
    for count in (1, 2):
        finished(torchrun(count, ROOT / "evaluate.py", small, f"--run.name=by{count}", "--eval.samples=4"))
        (path,) = (tmp_path / "runs" / f"by{count}" / "evaluation").glob("*.json")
        (sets,) = json.loads(path.read_text())["sets"].values()
        found.append([(p["prompt"], p["correct"], p["greedy"], p["tokens"], p["distinct"]) for p in sets["problems"]])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.distributed
def test_bf16_weights_learn_alike_in_copies_and_in_shards(tmp_path: Path, small: Path) -> None:
    found = []
    for shard in ("none", "full"):
        more = [f"--run.name={shard}", f"--train.shard={shard}", "--model.dtype=bf16", "--run.dtype=bf16"]
        finished(torchrun(2, ROOT / "train.py", small, *more, "--eval.final=false"))
        run = tmp_path / "runs" / shard
        step = checkpoints(run)[-1]
        found.append((load_file(step / "model.safetensors"), load_file(step / "trainer.safetensors")))
    for name, weight in found[0][0].items():
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(found[1][0][name], weight, rtol=0.02, atol=1e-3)
    assert {name: x.shape for name, x in found[0][1].items()} == {name: x.shape for name, x in found[1][1].items()}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_goes_on_with_any_number_of_processes_in_copies_or_shards(
    tmp_path: Path, small: Path, dtype: str
) -> None:
    held_in = [f"--model.dtype={dtype}", f"--run.dtype={dtype}"]
    out, err = finished(torchrun(2, ROOT / "train.py", small, "--eval.final=false", *held_in))
    assert out.count("D_pef:") == 1
    assert err.count("pre-sampling, first:   0%") == 1
    for count, steps, shard in ((1, 3, "none"), (3, 4, "none"), (2, 5, "full")):
        more = [f"--train.steps={steps}", f"--train.shard={shard}", f"--eval.final={steps == 5}".lower(), *held_in]
        finished(torchrun(count, ROOT / "train.py", small, *more))
    run = tmp_path / "runs" / "small"
    assert [row["step"] for row in read_log(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [c.name for c in checkpoints(run)] == ["step-4", "step-5"]
    moments, weights = (load_file(run / "checkpoints" / "step-5" / f"{n}.safetensors") for n in ("trainer", "model"))
    assert {name.split(":")[0] for name in moments} == set(weights)
    assert {float(x) for name, x in moments.items() if name.endswith(":step")} == {10.0}  # two updates a step
    assert len(json.loads((run / "evaluation" / "small.json").read_text())["sets"]) == 1


@pytest.mark.distributed
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_process_that_dies_ends_the_run_and_the_next_start_goes_on(tmp_path: Path, small: Path, number: int) -> None:
    log = tmp_path / "runs" / "small" / "metrics.jsonl"
    more = ["--train.steps=400", "--train.save_every=1", "--eval.final=false", "--train.eval_every=0"]
    process = torchrun(2, ROOT / "train.py", small, *more)
    deadline = time.monotonic() + 120
    while (not log.exists() or log.read_text().count("\n") < 3) and time.monotonic() < deadline:
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    victim = process.pid if number == signal.SIGTERM else int(children[-1])
    began = time.monotonic()
    os.kill(victim, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - began < 60
    assert "SIGKILL" in err or number == signal.SIGTERM
    done = int(checkpoints(log.parent)[-1].name[5:])
    finished(torchrun(2, ROOT / "train.py", small, *more, f"--train.steps={done + 2}"))
    assert [row["step"] for row in read_log(log)] == list(range(1, done + 3))


@pytest.mark.distributed
def test_a_mistake_is_said_in_its_line(small: Path) -> None:
    process = torchrun(2, ROOT / "train.py", small, "--data.train=miniature:nowhere")
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "error: source 'miniature:nowhere': unknown set" in err


if __name__ == "__main__":
    if sys.argv[1] == "presample":
        distributed.processes()(make)(Path(sys.argv[2]), *sys.argv[3:])
    else:
        train(Path(sys.argv[2]), sys.argv[3:], lacks_memory=sys.argv[1] == "lacks_memory")
