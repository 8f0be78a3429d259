"""Several processes make the same run as one: samples, rewards, partition, weights; and end with one that dies."""

import contextlib
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
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from dph import distributed
from dph.checkpoint import checkpoints, read_log
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
    items, weight = [3, 1, 2], torch.ones(2, requires_grad=True)
    assert distributed.deal(items, float) == [items]
    assert distributed.gather(items) is items
    with distributed.sum_gradients([weight], 1):
        assert weight.grad is None
    distributed.publish([[weight]])
    assert weight.grad is None


def test_the_dealing_is_even_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "size", lambda: 3)
    shares = distributed.deal([5, 1, 1, 1, 4, 4, 1, 1], float)
    assert [sum(share) for share in shares] == [6, 6, 6]


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


def train(folder: Path, more: list[str], full: bool = False) -> None:
    """What each process does: five steps, then the leader writes the weights. `full`: the last lacks memory once."""
    with distributed.processes():
        if full and distributed.rank() == distributed.size() - 1:
            fails_at({3}, pytest.MonkeyPatch())
        with distributed.leader_first():
            made = in_float64(folder, "--train.steps=5", *more)
        made.run()
        if distributed.rank() == 0:
            weights = {
                name: w.detach().clone(memory_format=torch.contiguous_format)
                for name, w in made.policy.model.named_parameters()
            }
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


@pytest.mark.distributed
@pytest.mark.parametrize(
    "method", ["dph_js", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "dph_js")]
)
def test_two_and_four_processes_make_the_run_of_one(tmp_path: Path, method: str) -> None:
    found = {}
    for count in (1, 2, 4):
        folder = tmp_path / str(count)
        finished(torchrun(count, "-m", "tests.test_distributed", "train", folder, *METHODS[method]))
        rollouts = [load_file(folder / "run" / "rollouts" / f"step-{step}.safetensors") for step in range(1, 6)]
        found[count] = load_file(folder / "weights.safetensors"), rollouts, read_log(folder / "run" / "metrics.jsonl")
    start = load_file(tmp_path / "1" / "model" / "model.safetensors")
    assert any((start[name] - w).abs().max() > 1e-4 for name, w in found[1][0].items())
    for count in (2, 4):
        for name, expected in found[1][0].items():
            torch.testing.assert_close(found[count][0][name], expected, rtol=0, atol=1e-9)
        for ours, theirs in zip(found[count][1], found[1][1], strict=True):
            for name, expected in theirs.items():
                torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-6)  # tokens, rewards: integers
        for ours, theirs in zip(found[count][2], found[1][2], strict=True):
            for name, value in theirs.items():
                if "second" not in name and name != "sampler_gap":
                    assert ours[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.slow
@pytest.mark.distributed
def test_memory_that_one_of_two_lacks_makes_both_try_again(tmp_path: Path) -> None:
    weights = []
    for count, mode in ((1, "train"), (2, "full")):
        folder = tmp_path / mode
        finished(torchrun(count, "-m", "tests.test_distributed", mode, folder, *METHODS["dph_js"]))
        weights.append(load_file(folder / "weights.safetensors"))
    for name, expected in weights[0].items():
        torch.testing.assert_close(weights[1][name], expected, rtol=0, atol=1e-9)


class Fails(torch.autograd.Function):
    """Memory is full half way through a backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError


def sums() -> None:
    """What each of two processes does: the first has no backward pass, the other three, of which the last may fail."""
    torch.manual_seed(0)
    first, last, x = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.ones(5, 3)
    parameters = [*first.parameters(), *last.parameters()]
    alone = torch.autograd.grad(last(first(x).tanh()).sum(), parameters)
    with distributed.processes(), mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
        for fails in (False, True):
            sent.reset_mock()
            with distributed.sum_gradients(parameters, 3 * distributed.rank()):
                for i in range(3 * distributed.rank()):
                    assert sent.call_count == 0, "sent before the last pass"
                    middle = first(x).tanh()
                    with contextlib.suppress(torch.OutOfMemoryError):
                        last(Fails.apply(middle) if fails and i == 2 else middle).sum().backward()  # type: ignore[no-untyped-call]
                early = sent.call_count
            assert early == distributed.rank() * (2 if fails else 4)
            assert sent.call_count == 4
            for p, one, times in zip(parameters, alone, (3 - fails, 3 - fails, 3, 3), strict=True):
                torch.testing.assert_close(p.grad, times * one)


@pytest.mark.distributed
def test_gradients_are_summed_within_the_last_pass_whatever_becomes_of_it() -> None:
    finished(torchrun(2, "-m", "tests.test_distributed", "sums"))


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
def test_a_run_begun_by_two_goes_on_with_one_and_with_three(tmp_path: Path, small: Path) -> None:
    out, err = finished(torchrun(2, ROOT / "train.py", small, "--eval.final=false"))
    assert out.count("D_pef:") == 1
    assert err.count("pre-sampling, first:   0%") == 1
    for count, steps in ((1, 3), (3, 5)):
        finished(
            torchrun(count, ROOT / "train.py", small, f"--train.steps={steps}", f"--eval.final={count == 3}".lower())
        )
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
    elif sys.argv[1] == "sums":
        sums()
    else:
        train(Path(sys.argv[2]), sys.argv[3:], full=sys.argv[1] == "full")
