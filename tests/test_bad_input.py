"""Wrong inputs, each answered by one line and exit code 2, with nothing half-written.

The lines stand in docs/bad_input.txt; `python -m tests.test_bad_input > docs/bad_input.txt` writes them anew.
"""

import contextlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import evaluate
import presample
import train
from dph.cli import config_argument, run_command
from dph.config import load_config, to_toml
from dph.model_folder import save_model
from dph.tokenizer import load_tokenizer
from tests.helpers import ONE_STEP, SMALL_HERE, tiny_folder, tiny_model

COMMANDS = {"train": train, "presample": presample, "evaluate": evaluate}
DOCUMENT = Path(__file__).parent.parent / "docs" / "bad_input.txt"
DATA = """\
train = "miniature:train?count=4"
eval = ["miniature:test?count=2"]
"""
AFTER = """\
[eval]
final = false
samples = 1
k = [1]
[loss]
divergence = "js"
eta = 0.1
"""
SMALL = SMALL_HERE + DATA + ONE_STEP + AFTER
PLAIN = ("--loss.divergence=none", "--loss.eta=0")
Damage = Callable[[], object]
CASES: dict[str, tuple[str, list[str], Damage | None]] = {}  # what is wrong: command, arguments, how it is made


def case(what: str, *arguments: str, damage: Damage | None = None, command: str = "train", config: bool = True) -> None:
    assert what not in CASES
    CASES[what] = (command, [*(["small.toml"] if config else []), *arguments], damage)


def writes(path: str, content: str | bytes) -> Damage:
    def write() -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def config_file(content: str | bytes) -> Damage:
    return writes("small.toml", content)


# ---- the command line and the config -----------------------------------------------------------------------------

case("no config", config=False)
case("a config that is not there", "nowhere.toml", config=False)
case("a folder in place of a config", "model", config=False)
case("a config that is no TOML", damage=config_file("[optim\nlr = 1"))
case("a config that is not UTF-8", damage=config_file(b"[run]\nname = '\xff'"))
case("a key outside a section", damage=config_file("lr = 1"))
case("a list of tables in place of a section", damage=config_file("[[train]]\nsteps = 1"))
case("a config that extends itself", damage=config_file('extends = "small.toml"'))
case("a config that extends a missing one", damage=config_file('extends = "base.toml"'))
case("extends that names no file", damage=config_file("extends = 3"))
case("brackets without end", damage=config_file("[run]\nname = " + "[" * 5000))
case("a number that is none", "--optim.lr=1.2.3")
case("an unknown section", "--optin.lr=1")
case("an unknown key", "--optim.learning_rate=1")
case("a stray word", "stray")
case("a key without its section", "--lr=3")
case("a key without a value", "--optim.lr")
case("a text for a number", "--optim.lr=fast")
case("NaN", "--optim.lr=nan")
case("infinity", "--optim.lr=inf")
case("a negative rate", "--optim.lr=-1e-6")
case("a fraction of a step", "--train.steps=1.5")
case("true for a number", "--train.steps=true")
case("a number of 500 digits", f"--optim.lr={'9' * 500}")
case("a number of 5000 digits", f"--train.steps={'9' * 5000}")
case("a number for a flag", "--eval.greedy=1")
case("a text for a table", "--data.fields=prompt")
case("a date for a name", damage=config_file("[run]\nname = 2024-01-01"))
case("a list for a variable of the template", "--data.template={tools = [1]}")
case("a column that nothing reads", '--data.fields={prompt = "q", anwser = "a"}')
case("a backslash that TOML took", damage=config_file('[data]\ninstruction = "Put it in \\boxed{}."'))
case("a backslash that TOML took in quotes of the shell", '--data.system="Give \\text{units}."')
case("more new tokens than a machine holds", "--sampling.max_new_tokens=1000000000")
case("new tokens that are no whole number", "--sampling.max_new_tokens=1e9")
case("a weight of no divergence", "--loss.divergence=none")
case("a device that there is not", "--run.device=tpu")
case("an unknown divergence", "--loss.divergence=kl")
case("an order of alpha at its limit", "--loss.alpha=1")
case("an order of alpha that fp32 does not hold", "--loss.alpha=1e-5")
case("a threshold above the samples", "--presample.threshold=3")
case("a plain form of another divergence", "--loss.divergence_form=plain")
case("an estimator for reverse KL alone", "--loss.samples=own")
case(
    "two things that exclude each other",
    "--loss.samples=both",
    "--loss.divergence=js",
    "--loss.eta=1",
    "--presample.stored_top_k=4",
)
case("a key with an old name", "--presample.top_k=4")
case("a key that is gone", "--loss.level=sequence")
case("more stored tokens than the vocabulary has", "--presample.stored_top_k=128")
case("one beta", "--optim.betas=[0.9]")
case("a dual clip below 1", "--loss.dual_clip=0.5")
case("more updates than rows", "--train.updates_per_step=9")
case("a penalty longer than an answer", "--train.overlong_buffer=3")
case("a k above the samples", "--eval.k=[1, 8]")
case("a run's name that is a path", "--run.name=../x")
case("no run's name", "--run.name=")
case("a run's name of two lines", '--run.name="two\\nlines"')
case("a run's name that is no UTF-8", "--run.name=caf\udce9")
case("a run's name that is taken", "--run.name=base")
case("a run's name that is a world's folder", "--run.name=miniature-seed0")
case("a zero byte in a name", '--run.name="a\\u0000b"')
case("an evaluation set twice", '--data.eval=["miniature:test", "miniature:test"]')
case("replay of a run without rollouts", "--rollouts-from", "elsewhere")
case("evaluation of nothing", command="evaluate", config=False)
case("evaluation without sets", "--data.eval=[]", command="evaluate")
case("the same model twice", "model", "model", command="evaluate")
case("a task that cannot be regraded", "--regrade", "x.jsonl", "--task", "poetry", command="evaluate", config=False)
case("regrading a missing file", "--regrade", "x.jsonl", "--task", "math", command="evaluate", config=False)
case("regrading a row without response", "--regrade", "x.jsonl", "--task", "math", command="evaluate", config=False,
     damage=writes("x.jsonl", '{"answer": "1"}'))  # fmt: skip

# ---- data --------------------------------------------------------------------------------------------------------


def rows(what: str, content: str | bytes, *arguments: str, task: str = "math") -> None:
    case(what, f"--data.train={task}:x.jsonl", *arguments, damage=writes("x.jsonl", content))


GOOD = '{"question": "1 + 1?", "answer": "2"}\n'
for name, source in {
    "a source without a task": "x.jsonl",
    "an unknown task": "poetry:x.jsonl",
    "an unknown option": "miniature:train?cuont=3",
    "an option without a value": "miniature:train?count",
    "a limit of 0": "miniature:train?limit=0",
    "an unknown set": "miniature:dev",
    "a data file that is not there": "math:x.jsonl",
    "a folder in place of a data file": "math:model",
}.items():
    case(name, f"--data.train={source}")
rows("an empty file", "")
rows("a file of blank lines", "\n \n")
rows("a row cut short", GOOD + '{"question": "1 + ')
rows("a row that is a list", GOOD + "[1]")
rows("a row that is not UTF-8", GOOD.encode() + b'{"question": "\xff"}')
rows("a row nested too deeply", "[" * 100_000)
rows("half a surrogate pair", '{"question": "\\ud83d", "answer": "2"}')
rows("a question whose backslash JSON took", '{"question": "What is \\beta?", "answer": "2"}')
rows("an answer whose backslash JSON took", '{"question": "1/2?", "answer": "\\frac{1}{2}"}')
rows("a chat whose backslash JSON took", '{"question": [{"role": "user", "content": "5\\times 2"}], "answer": "10"}')
rows("a row without a question", '{"answer": "2"}')
rows("a question that is a number", '{"question": 3, "answer": "2"}')
rows("a blank question", '{"question": " ", "answer": "2"}')
rows("a row without an answer", '{"question": "1 + 1?"}')
rows("an answer that is true", '{"question": "1 + 1?", "answer": true}')
rows("an answer that is NaN", '{"question": "1 + 1?", "answer": NaN}')
rows("an answer of nothing", '{"question": "1 + 1?", "answer": "#### "}')
rows("a chat without a role", '{"question": [{"content": "1 + 1?"}], "answer": "2"}')
rows("an answer in no list", '{"question": "q", "final_answer": "2", "context": null}')
rows("verl's row without ground truth", '{"prompt": [{"role": "user", "content": "q"}], "reward_model": {}}')
rows("only overlong prompts", GOOD, "--data.max_prompt_tokens=1")
rows("a database that is not there", '{"question": "q", "db_id": "x", "query": "SELECT 1"}', task="sql")
rows("a database outside db_root", '{"question": "q", "db_id": "../x", "query": "SELECT 1"}', "--data.db_root=model",
     task="sql")  # fmt: skip
rows("an unknown comparison", '{"question": "q", "db_id": "x", "query": "SELECT 1", "cmp_method": "y"}',
     "--data.db_root=model", task="sql")  # fmt: skip


def own_task(what: str, content: str, *changes: str) -> None:
    """A case of a task's file: `content`, with each of `changes`, OLD -> NEW, made to it."""
    for change in changes:
        old, new = change.split(" -> ")
        content = content.replace(old, new)
    case(what, "--data.train=task:mine.py", damage=writes("mine.py", content))


MINE = """from dph.tasks import Prompt, Reward, Task
class Mine(Task):
    def __init__(self, options, data, seed):
        message = {"role": "user", "content": "coin"}
        super().__init__("mine", [Prompt(i, (message,), "yes", {}) for i in range(4)])
    def rewards(self, pairs):
        return [Reward(0.0, "wrong", text) for prompt, text in pairs]
"""
case("a task's file that is not there", "--data.train=task:mine.py")
case("a task's file that is no Python file", "--data.train=task:small.toml")
own_task("a task's file that is not Python", "class Mine(:\n")
own_task("a task's file without a task", "x = 1\n")
own_task("a task's file with two tasks", MINE + "class Other(Task):\n    pass\n")
own_task("a task's file that ends the program", "raise SystemExit\n")
own_task("a task that takes no options", MINE, "options, data, seed -> data")
own_task("a prompt of a task without a gold answer", MINE, '"yes" -> None')
own_task("a reward above 1", MINE, "0.0 -> 1.5")
own_task("a reward that is NaN", MINE, '0.0 -> float("nan")')
own_task("a reward for fewer answers", MINE, "in pairs -> in pairs[1:]")
own_task("a reward that fails", MINE, "Reward(0.0 -> Reward(text.no_such")

# ---- model folders -----------------------------------------------------------------------------------------------


def config_json(**changes: object) -> Damage:
    path = Path("model/config.json")
    return lambda: path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage() -> None:
        tensors = load_file("model/model.safetensors")
        change(tensors)
        save_file(tensors, "model/model.safetensors")

    return damage


def tokenizer_config(**changes: object) -> Damage:
    path = Path("model/tokenizer_config.json")
    return lambda: path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def old_run() -> None:
    for step in (9, 100):
        writes(f"runs/old/checkpoints/step-{step}/config.json", "{}")()
    writes("runs/old/config.toml", "")()


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 272515648\n"
ADAPTER = writes("model/adapter_config.json", '{"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}')


def sharded(shards: object) -> Damage:
    return lambda: (
        Path("model/model.safetensors").unlink(),
        Path("model/model.safetensors.index.json").write_text(json.dumps({"weight_map": shards})),
    )


NORM = "model.norm.weight"
case("a model that is not there", "--model.path=/no/such/model")
case("a file in place of a model", "--model.path=model/config.json")
case("no config.json", damage=lambda: Path("model/config.json").unlink())
case("a config.json that is no JSON", damage=writes("model/config.json", "{"))
case("an unknown architecture", damage=config_json(model_type="gpt2"))
case("a size that is a text", damage=config_json(hidden_size="32"))
case("heads that do not divide", damage=config_json(num_key_value_heads=3))
case("a quantised model", damage=config_json(quantization_config={"quant_method": "awq", "bits": 4}))
case("quantised weights that the config does not name",
     damage=weights(lambda w: w.update({"model.norm.qweight": torch.ones(2, dtype=torch.int32)})))  # fmt: skip
case("GGUF in place of a model", damage=lambda: Path("model/model.safetensors").rename("model/q4.gguf"))
case("a pointer of git-lfs", damage=writes("model/model.safetensors", LFS))
case("an adapter in place of a model", damage=lambda: (Path("model/model.safetensors").unlink(),
                                                       Path("model/config.json").unlink(), ADAPTER()))  # fmt: skip
case("an adapter without a tokenizer", "--model.path=adapter",
     damage=writes("adapter/adapter_config.json", '{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}'))  # fmt: skip
case("an adapter beside whole weights", damage=ADAPTER)
case("adapters of a higher rank than a matrix has", "--model.adapter_rank=17")
case("adapters without weight", "--model.adapter_rank=4", "--model.adapter_alpha=0")
case("checkpoints of adapters in bf16", "--model.adapter_rank=4", "--train.save_dtype=bf16")
case("a run in place of a model", "--model.path=runs/old", damage=old_run)
case("its checkpoints in place of a model", "--model.path=runs/old/checkpoints", damage=old_run)
case(
    "a run without checkpoints in place of a model", "--model.path=runs/old", damage=writes("runs/old/config.toml", "")
)
case("no weights", damage=lambda: Path("model/model.safetensors").unlink())
case("weights in a pickle alone",
     damage=lambda: Path("model/model.safetensors").rename("model/pytorch_model.bin"))  # fmt: skip
case("weights cut short", damage=lambda: os.truncate("model/model.safetensors", 1000))
case("a header of 2^62 bytes", damage=writes("model/model.safetensors", (2**62).to_bytes(8, "little") + b"{}"))
case("a missing shard", damage=sharded({NORM: "model-00001-of-00002.safetensors"}))
case("a shard outside the folder", damage=sharded({NORM: "../secret.safetensors"}))
case("an index without a map", damage=sharded(None))
case("a missing tensor", damage=weights(lambda w: w.pop(NORM)))
case("an extra tensor", damage=weights(lambda w: w.update(extra=torch.ones(1))))
case("a tensor of another shape", damage=weights(lambda w: w.update({NORM: torch.ones(31)})))
case("NaN weights", damage=weights(lambda w: w[NORM].fill_(float("nan"))))
case("another vocabulary in config.json", damage=config_json(vocab_size=7))
case("a vocabulary smaller than the tokenizer's",
     damage=lambda: (config_json(vocab_size=7)(),
                     weights(lambda w: w.update({k: w[k][:7].clone() for k in w if len(w[k]) > 96}))()))  # fmt: skip
case("a vocabulary without its tokenizer", damage=lambda: (Path("model/tokenizer.model").unlink(),
                                                           writes("model/vocab.json", "{}")(),
                                                           writes("model/merges.txt", "")()))  # fmt: skip
case("no tokenizer", damage=lambda: Path("model/tokenizer.model").unlink())
case("a tokenizer that is none", damage=writes("model/tokenizer.model", "x"))
case("no end token", damage=lambda: (writes("model/generation_config.json", "{}")(),
                                     writes("model/tokenizer_config.json", "{}")(), strip_end()))  # fmt: skip
case("an end token that is a number", damage=tokenizer_config(eos_token=2))
case("an end token without its text", damage=tokenizer_config(eos_token={"id": 2}))
case("an end token's id that is true", damage=writes("model/generation_config.json", '{"eos_token_id": true}'))
case("added tokens in a list", damage=tokenizer_config(added_tokens_decoder=["<think>"]))
case("an added token without its text", damage=tokenizer_config(added_tokens_decoder={"128": {"special": True}}))
case("an added token whose id is taken", damage=tokenizer_config(added_tokens_decoder={"7": {"content": "</s>"}}))
case("two added tokens of one id", damage=writes("model/added_tokens.json", '{"<a>": 128, "<b>": 128}'))
case("an empty chat template", damage=writes("model/chat_template.jinja", ""))
case("a chat template that is not UTF-8", damage=writes("model/chat_template.jinja", b"\xff{{ messages }}"))
case("a chat template that is a number", damage=tokenizer_config(chat_template=3))
case("a chat template that writes nothing", damage=writes("model/chat_template.jinja", "{% set x = messages %}"))
case("a variable that the chat template does not read", "--data.template={enable_thinkin=false}",
     damage=writes("model/chat_template.jinja", "{{ messages }}{{ enable_thinking }}"))  # fmt: skip
case("a variable without a chat template", "--data.template={enable_thinking=false}",
     damage=tokenizer_config(chat_template=None))  # fmt: skip
case("a broken chat template", damage=writes("model/chat_template.jinja", "{% for"))
case("a template that reaches for Python", damage=writes("model/chat_template.jinja", "{{ ''.__class__.__mro__ }}"))
case("a template that divides by zero", damage=writes("model/chat_template.jinja", "{{ 1 / 0 }}"))
case("a template without end", damage=writes("model/chat_template.jinja", "{{ range(10 ** 9) | list }}"))


def strip_end() -> None:
    """A tokenizer.json whose end token nothing names."""
    import tokenizers

    Path("model/tokenizer.model").unlink()
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save("model/tokenizer.json")


# ---- run folders -------------------------------------------------------------------------------------------------

RUN = "runs/small"


def another_run() -> None:
    writes(f"{RUN}/config.toml", to_toml(load_config("small.toml", ["--loss.eta=0.2"])))()
    writes(f"{RUN}/metrics.jsonl", "")()


def stale() -> None:
    writes(f"{RUN}/presample/partition.jsonl", "")()
    writes(f"{RUN}/presample/report.json", json.dumps({"fingerprint": {"model": "x"}}))()
    save_file({"x": torch.ones(1)}, f"{RUN}/presample/rehearsal.safetensors")


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Another process that holds the lock of a run."""
    writes(path, "")()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield
        child.terminate()


case("a run's day that is none", damage=writes(f"{RUN}/chat_day.txt", "yesterday"))
case("the folder of another run", damage=another_run)
case("a run's config.toml that is no TOML",
     damage=lambda: (another_run(), writes(f"{RUN}/config.toml", "x")()))  # fmt: skip
case("a run that another process works on")
case("a file in place of the run's folder", damage=writes(RUN, ""))
case("a runs folder that cannot be made", "--run.folder=/proc/runs")
case("a partition of something else", damage=stale)
case("a partition that is broken", damage=writes(f"{RUN}/presample/report.json", "{"))
case("progress of something else", damage=writes(f"{RUN}/presample/progress.jsonl", '{"model": "x"}\n'))
case("progress that is broken", damage=writes(f"{RUN}/presample/progress.jsonl", "x\n"))
case("metrics that are broken", *PLAIN, damage=writes(f"{RUN}/metrics.jsonl", '{"step": 1}\nx\n'))
case("metrics without a step", *PLAIN, damage=writes(f"{RUN}/metrics.jsonl", '{"reward": 1}\n'))
case("no whole checkpoint", *PLAIN,
     damage=lambda: (train_first(*PLAIN), writes(f"{RUN}/checkpoints/step-1/state.json", "{}")()))  # fmt: skip
case("an evaluation that is broken", command="evaluate", damage=writes(f"{RUN}/evaluation/model.json", "{"))


# ---- what a run was made from ------------------------------------------------------------------------------------

OWN_DATA = ("--data.train=math:x.jsonl", *PLAIN)
ONE = '{"question": "1 + 1?", "answer": "2"}'


def train_first(*arguments: str) -> None:
    """A run of small.toml that ends well."""
    old, sys.argv = sys.argv, ["train.py", "small.toml", *arguments]
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            run_command(train.main, "", train._arguments)
    finally:
        sys.argv = old


def made_from_other(what: str, harm: Damage, *arguments: str) -> None:
    """A case in which `harm` is done to a run that has ended well, then the same command is given."""

    def damage() -> None:
        writes("x.jsonl", ONE)()
        train_first(*arguments)
        harm()

    case(what, *arguments, damage=damage)


def write_database(path: str, value: int) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"CREATE TABLE t (a); INSERT INTO t VALUES ({value});")


def another_model() -> None:
    save_model(tiny_model(1, load_tokenizer("model").vocab_size), "model")


def another_special_token() -> None:
    piece = next(piece for piece in load_tokenizer("model").vocabulary if piece.endswith("'oslo'"))
    writes("model/special_tokens_map.json", json.dumps({"additional_special_tokens": [piece]}))()


QUERIES = '{"question": [{"role": "user", "content": "1"}], "db_id": "d", "query": "SELECT a FROM t"}'
ON_DATABASES = ("--data.train=sql:queries.jsonl", "--data.db_root=databases", *PLAIN)
more_ends = writes("model/generation_config.json", '{"eos_token_id": [2, 3]}')
made_from_other("a run whose prompts changed", writes("x.jsonl", ONE.replace("1 + 1", "2")), *OWN_DATA)
made_from_other("a run whose gold answers changed", writes("x.jsonl", ONE.replace('"2"', '"3"')), *OWN_DATA)
made_from_other("a run whose end tokens changed", more_ends, *OWN_DATA)
made_from_other("a run whose tokenizer changed", another_special_token, *OWN_DATA)
made_from_other("a run whose model changed", another_model, *OWN_DATA)
made_from_other("a run whose prompts and gold answers changed", writes("x.jsonl", '{"question": "3", "answer": "3"}'),
                *OWN_DATA)  # fmt: skip
case("a run whose databases changed", *ON_DATABASES, damage=lambda: (
     writes("queries.jsonl", QUERIES)(), write_database("databases/d.sqlite", 1), train_first(*ON_DATABASES),
     write_database("databases/d.sqlite", 2)))  # fmt: skip
made_from_other("a partition whose end tokens changed", lambda: (more_ends(), Path(RUN, "made_from.json").unlink(),
                shutil.rmtree(f"{RUN}/checkpoints")))  # fmt: skip
made_from_other("a run that does not say what it was made from", Path(RUN, "made_from.json").unlink, *PLAIN)
made_from_other("what a run was made from, broken", writes(f"{RUN}/made_from.json", "{"), *PLAIN)

REPLAY = ("--run.name=again", f"--rollouts-from={RUN}", *PLAIN)
RECORD = ("--train.record_rollouts=true", *PLAIN)
case("recorded rollouts of another task", "--data.train=miniature:arithmetic?count=4", *REPLAY,
     damage=lambda: train_first(*RECORD))  # fmt: skip
case("recorded rollouts of another tokenizer", *REPLAY,
     damage=lambda: (train_first(*RECORD), another_special_token()))  # fmt: skip
case("recorded rollouts of other settings", "--sampling.temperature=0.5", "--train.responses_per_prompt=4", *REPLAY,
     damage=lambda: train_first(*RECORD))  # fmt: skip
case("recorded rollouts that do not say what they were made from", *REPLAY,
     damage=lambda: (train_first(*RECORD), Path(RUN, "made_from.json").unlink()))  # fmt: skip


# ---- the test ----------------------------------------------------------------------------------------------------


def answered(what: str, folder: Path) -> tuple[int, list[str], list[str]]:
    """Exit code, lines on standard error without bars, and what is left half-written, of a case in `folder`."""
    command, arguments, damage = CASES[what]
    module, err, code = COMMANDS[command], io.StringIO(), 0
    holder = locked(f"{RUN}/lock") if what == "a run that another process works on" else contextlib.nullcontext()
    with contextlib.chdir(folder), holder:
        if damage is not None:
            damage()
        before = half_written()
        old, sys.argv = sys.argv, [f"{command}.py", *arguments]
        try:
            with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
                run_command(module.main, "", getattr(module, "_arguments", config_argument))
        except SystemExit as stop:
            code = int(stop.code or 0)
        except Exception as error:  # a traceback, for a user
            return 1, [f"{type(error).__name__}: {error}"], []
        finally:
            sys.argv = old
        new = sorted(half_written() - before)
    lines = [line for line in err.getvalue().replace(str(folder), "...").split("\n") if line and "\r" not in line]
    return code, lines, new


def half_written() -> set[str]:
    """What a command should not leave when it stops at a mistake."""
    return {str(p) for p in Path("runs").rglob("*") if p.suffix == ".partial" or p.name == "state.json"}


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("whole"))


def made(folder: Path) -> Path:
    """A folder in which `train small.toml` works."""
    tiny_folder(folder / "model")
    (folder / "small.toml").write_text(SMALL)
    return folder


def test_there_are_enough() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("what", CASES)
def test_a_wrong_input_is_answered_as_the_document_says(what: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    code, lines, half = answered(what, tmp_path)
    assert code == 2, lines
    assert half == []
    assert lines[-1].startswith("error: "), lines
    assert f"{what}\n    {lines[-1].removeprefix('error: ')}\n" in DOCUMENT.read_text(encoding="utf-8")


def test_what_is_unusual_but_right_is_taken(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "small.toml").write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    data = '\ufeff{"question": "1\u2028+ 1?", "answer": "2"}\r\n\r\n{"question": "2?", "answer": 2}'
    (tmp_path / "x.jsonl").write_text(data, encoding="utf-8")
    CASES["right"] = ("train", ["small.toml", "--data.train=math:x.jsonl", "--train.prompts_per_step=2"], None)
    try:
        assert answered("right", tmp_path)[0] == 0
    finally:
        del CASES["right"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        source = made(Path(scratch) / "whole")
        print("Wrong inputs and their answers, one line each, exit code 2: python -m tests.test_bad_input\n")
        for number, name in enumerate(CASES):
            place = shutil.copytree(source, Path(scratch) / str(number))
            code, lines, _ = answered(name, place)
            print(f"{name}\n    {lines[-1].removeprefix('error: ') if lines else ''}" + f" [{code}]" * (code != 2))
