"""Speed, as a ratio within one run (a time would depend on the machine); compiled layers give the same results."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decode, operations
from benchmarks.measure import cost
from benchmarks.sampler import limit
from benchmarks.scaling import make_model
from dph.answering import acting
from dph.cli import load_policy
from dph.config import load_config
from dph.miniature_base import Recipe, build_base
from dph.model import Decoder
from dph.model_folder import load_model
from dph.prompts import PromptSet
from dph.rollouts import collate
from dph.sampler import SamplingSettings, sample
from dph.scoring import token_logprobs
from dph.tasks.base import Prompt
from tests.helpers import rollout
from tests.test_trainer import JS, METHODS, comparable, trainer

ROWS, TOKENS = 64, 32


def test_decoding_keeps_near_the_limit_of_its_matrix_products() -> None:
    """Sampling takes a bounded multiple of its matrix products alone (it measures 2 to 3 on a quiet machine)."""
    model, settings = make_model(4096, "cpu"), SamplingSettings((0,), (), TOKENS, max_rows=ROWS)
    prompts = [Prompt(i, tokens=[1, 2, 3]) for i in range(ROWS // 8)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratios = []
        for _ in range(5):
            with cost() as ours:
                sample(model, prompts, [range(8)] * len(prompts), settings)
            with cost() as products:
                limit(model, ROWS, TOKENS)
            ratios.append(ours.seconds / products.seconds)
    finally:
        torch.set_num_threads(threads)
    assert statistics.median(ratios) < 5


def test_compiled_layers_change_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_eagerly(monkeypatch)
    base = build_base(tmp_path, 0, progress=False, recipe=Recipe(pairs=200, steps=2))
    config = load_config("configs/miniature_grpo.toml", [f"--model.path={base}", "--model.compile=true"])
    policy = load_policy(config.model.path, config, torch.device("cpu"))
    plain, compiled = load_model(base), policy.model
    assert compiled.compiled
    assert acting(policy, "bf16").model.compiled  # a bf16 copy that samples
    batch = collate([rollout([1, 5, 6], [7, 8, 2]), rollout([1, 9], [10, 2])], "cpu")
    scores = []
    for model in (plain, compiled):
        scored = token_logprobs(model, batch, 1.0).logprobs
        torch.autograd.backward(scored.sum())
        scores.append(scored)
    torch.testing.assert_close(*scores)
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    prompts = [Prompt(0, tokens=[1, 5, 6]), Prompt(1, tokens=[1, 9])]
    there, here = (sample(m, prompts, [range(4)] * 2, SamplingSettings((0,), (2,), 10)) for m in (plain, compiled))
    assert [r.tokens for r in there] == [r.tokens for r in here]


def test_every_other_way_of_a_decode_step_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:  # type: ignore[type-arg]
    compile_eagerly(monkeypatch)
    monkeypatch.setattr(operations, "LAYERS", 1)
    monkeypatch.setattr("sys.argv", ["operations", "--rows", "4", "--repeats", "1"])
    with torch.inference_mode():
        operations.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "| ms a step | float32, 4 rows | bfloat16, 4 rows |"
    assert len(lines) == 3 + 18 + 6  # machine, head, rule; a line for each way; and the table of rounding


@pytest.mark.parametrize("method", [METHODS["rkl_k3"], [*JS, "--loss.samples=both"]], ids=["rkl", "definition"])
def test_a_compiled_run_with_adapters_is_the_one_that_is_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: list[str]
) -> None:
    """The layers are compiled first; then adapters come, learn, go off for pi_ref, and are merged to sample."""
    compile_eagerly(monkeypatch)
    torch.compiler.reset()  # what other tests have compiled does not count towards the limit
    torch._dynamo.utils.counters.clear()

    def compiled(*given: Any) -> Decoder:
        model = load_model(*given)
        model.compile_layers()
        return model

    for name in ("plain", "compiled"):
        if name == "compiled":
            monkeypatch.setattr("tests.test_trainer.load_model", compiled)
        more = ["--model.adapter_rank=4", "--optim.lr=1e-2", "--train.eval_every=2", "--train.recompute=true"]
        more += ["--model.compile=true"]  # keeps the copy that samples
        made = trainer(tmp_path / name, *method, *more)
        made.eval_sets = [PromptSet(made.collector.task, made.collector.explored)]
        made.run()
    stopped = torch._dynamo.utils.counters["unimplemented"]
    assert not [why for why in stopped if "recompile limit" in why], "beyond it layers run as they are"
    assert made.collector.actor is not None
    assert made.collector.actor.model.compiled, "the merged copy that samples"
    assert comparable(tmp_path / "plain") == comparable(tmp_path / "compiled")


def test_the_profile_of_a_step_names_its_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:  # type: ignore[type-arg]
    options = ["--tiny", "--plain", "--rows", "16", "--columns", "8", "--repeats", "2"]
    monkeypatch.setattr("sys.argv", ["decode", *options])
    decode.main()
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(table) == 1 + 1 + 4, "a head, a rule, and two lines for each type, without packing and with"
    assert {len(line) for line in table} == {len(decode.PARTS) + 3}
    for line in table[2:]:
        step, parts = float(line[2]), [float(cell.split()[0]) for cell in line[3:]]
        assert sum(parts) == pytest.approx(step, abs=0.5)


def compile_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced into graphs as ever, but these are run as they are: no compiler is needed, and no minute."""
    compile_ = torch.nn.Module.compile

    def eager(module: torch.nn.Module, **options: Any) -> None:
        compile_(module, backend="eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", eager)
