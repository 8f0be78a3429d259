"""What a model can do of each family of skills: python -m study.candidates MODEL [--dtype bf16] [options]

Prints a Markdown table, a row for each family of skills.py: pass@1 and pass@16 of the model as it is, the share of
questions that it solves in 8 of 8 (what pre-sampling would call near-perfect), the share solved in some of 8 and not in
others (what exploration learns from), distinct right answers a question, tokens an answer, and answers a second.

    python -m study.candidates models/SmolLM2-135M-Instruct --dtype bf16
    python -m study.candidates MODEL --families name+rhyme --count 60 --show 3     # and some answers, to be read
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from dph.answering import Answer, Policy
from dph.cli import fail, load_policy, open_task, set_up, to_the_end
from dph.config import Config, load_config
from dph.errors import UserError
from dph.evaluation import evaluate, pass_at_k
from dph.prompts import tokenize
from study.families import plain
from study.skills import FAMILIES, SPLITS, questions_of

SKILLS = Path(__file__).parent / "skills.py"
SAMPLES = 16
K = 8
COLUMNS = ("pass@1", "pass@16", "8 of 8", "some of 8", "distinct right", "tokens", "answers/s")


def candidate(policy: Policy, config: Config, source: str, show: int) -> dict[str, float]:
    """The row of one source: its numbers by column.

    Args:
        show: how many questions are printed with their answers, on standard error.
    """
    data = tokenize(open_task(source, config), policy.tokenizer, config)
    began = time.thread_time()
    result, answers = evaluate(policy, data, config, SAMPLES, greedy=False, bar=False)
    seconds = time.thread_time() - began
    forms: dict[int, set[str]] = {prompt.index: set() for prompt in data.prompts}
    for each in answers:
        if each.reward.value == 1:
            forms[each.rollout.prompt].add(plain(each.text))
    for prompt in data.prompts[:show]:
        said = [shown(each) for each in answers if each.rollout.prompt == prompt.index]
        print(prompt.messages[-1]["content"], *said, sep="\n    ", file=sys.stderr)
    correct = [problem["correct"] for problem in result["problems"]]
    all_right = [1 - pass_at_k(SAMPLES, SAMPLES - c, K) for c in correct]
    some_right = [pass_at_k(SAMPLES, c, K) for c in correct]
    return {
        "pass@1": float(np.mean(correct)) / SAMPLES,
        "pass@16": float(np.mean([c > 0 for c in correct])),
        "8 of 8": float(np.mean(all_right)),
        "some of 8": float(np.mean(some_right)) - float(np.mean(all_right)),
        "distinct right": float(np.mean([len(each) for each in forms.values()])),
        "tokens": float(np.mean([problem["tokens"] for problem in result["problems"]])),
        "answers/s": len(answers) / seconds,
    }


def shown(answer: Answer) -> str:
    """One answer on one line, with its verdict."""
    return f"{answer.reward.outcome:10}{answer.text!r}"


def main(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Prints the table, row by row."""
    names = list(FAMILIES) if arguments.families is None else arguments.families.split("+")
    for name in names:
        if name not in FAMILIES:
            raise UserError(f"--families: {name!r} should be some of {', '.join(FAMILIES)}, joined by +")
    given = [f"--model.path={arguments.model}", f"--run.dtype={arguments.dtype}", f"--model.dtype={arguments.dtype}"]
    given += [f"--eval.temperature={arguments.temperature}", "--run.device=cpu", *overrides]
    config = load_config(arguments.config, given)
    policy = load_policy(config.model.path, config, set_up(config))
    print(f"| family | group | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 2)}", flush=True)
    for name in names:
        count = min(arguments.count, len(questions_of(name, arguments.split)))
        source = f"task:{SKILLS}?family={name}&split={arguments.split}&count={count}&shots={arguments.shots}"
        row = candidate(policy, config, source, arguments.show)
        cells = " | ".join(f"{row[column]:.2f}" if row[column] < 10 else f"{row[column]:.0f}" for column in COLUMNS)
        print(f"| {name} | {FAMILIES[name].group} | {cells} |", flush=True)


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The command line; what it does not know are overrides of the config."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.error = fail  # type: ignore[method-assign]  # its own prints the usage, too
    parser.add_argument("model", help="a folder in Hugging Face layout, or a hub name")
    parser.add_argument("--config", default="configs/smollm2_study.toml", help="whose [data] and [sampling] are taken")
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--families", metavar="NAMES", help="families, joined by +; default: all")
    parser.add_argument("--split", default="validation", choices=SPLITS)
    parser.add_argument("--count", default=24, type=int, help="questions a family, at most")
    parser.add_argument("--shots", default=0, type=int, help="worked examples before each question")
    parser.add_argument("--temperature", default=1.0, type=float)
    parser.add_argument("--show", default=0, type=int, metavar="N", help="print the answers to N questions, too")
    return parser.parse_known_args()


if __name__ == "__main__":
    known, rest = parse()
    to_the_end(lambda: main(known, rest), debug=False)
